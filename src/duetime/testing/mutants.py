"""Known defects: each mutant removes one safety rule and keeps all the others.

They test the simulator and the checker: every mutant must be caught within its number of seeds
(`tests/sim/test_mutants.py`). If one is not caught, the workload or the faults are too weak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from duetime.api.peer_server import _RequestNumbers
from duetime.cluster.membership import Membership
from duetime.domain import recurrence, settle
from duetime.domain.flow_shares import FlowAllowance, FlowReport, FlowShare
from duetime.domain.schedule import Occurrence
from duetime.domain.settle import Settlement
from duetime.domain.timer import CommandPosition, Namespace, Outcome, Timer, TimerSpec, Verdict
from duetime.domain.wall_clock import ScheduleState
from duetime.engine.fire_loop import FireLoop, Firing
from duetime.engine.flow_homes import FlowHomes
from duetime.engine.flow_slots import Slots
from duetime.engine.namespaces import Namespaces
from duetime.engine.ownership import Ownership
from duetime.engine.shard import Entry, Phase, Shard, end_of
from duetime.engine.window import Window
from duetime.errors import Conflict, NotOwner, ShardLost
from duetime.service.commands import Commands
from duetime.service.forwarded import ForwardedCommands
from duetime.service.namespaces import NamespaceOperations
from duetime.stores.memory import MemoryStore
from duetime.testing.simulation.network import SimStore

__all__ = ["MUTANTS", "Mutant"]


class Mutant(Struct, frozen=True):
    name: str
    wrong: str  # the defect, in words
    patches: tuple[tuple[type | ModuleType, str, Any], ...]
    seeds: int = 100  # it is caught within so many seeds

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.patches]
        for owner, name, wrong in self.patches:
            setattr(owner, name, wrong)
        try:
            yield
        finally:
            for owner, name, right in before:
                setattr(owner, name, right)


# --- the store -----------------------------------------------------------------------------------


def _owned_by_anybody(self: MemoryStore, fence: Any) -> Any:
    return self._shards.get(fence.shard_id) or ShardLost("no such shard")


def _owned_by_version(self: MemoryStore, fence: Any) -> Any:
    shard = self._shards.get(fence.shard_id)
    if shard is None or shard.row.version != fence.version:
        return ShardLost("another version")
    return shard


async def _checked_then_written(self: SimStore, name: str, inner: Any, args: Any) -> Any:
    """Checks the fence, and writes a moment later without a lock on it."""
    if name != "commit":
        return await inner(*args)
    database = self._cluster.database
    lost = [isinstance(database._owned(batch.fence), ShardLost) for batch in args[0]]
    await asyncio.sleep(self._cluster.rng.choice((0.01, 0.3, 5.0)))
    results = []
    for batch, is_lost in zip(args[0], lost, strict=True):
        right, MemoryStore._owned = MemoryStore._owned, _owned_by_anybody  # type: ignore[method-assign]
        results.append(ShardLost("lost") if is_lost else database._commit(batch))
        MemoryStore._owned = right  # type: ignore[method-assign]
    return results


# --- the engine ----------------------------------------------------------------------------------


def _once_leased_for_ever(self: Membership) -> bool:
    return self._lease_until_ms > 0


def _settle_whatever_is_there(self: Shard, entry: Entry, settlement: Any) -> bool:
    self._attempt_ended(entry.timer.key)
    current = self.entries.get(entry.timer.key)
    if self.dropped or current is None:
        return False
    if current.phase is Phase.ARMED:
        self._host.disarm(current)
    self._settle(current, settlement)
    return True


def _end_load_too_far(self: Shard, page: Any, now_ms: int) -> None:
    _right_end_load(self, page, now_ms)
    if page is not None and not self.dropped:
        self.window.horizon = end_of(self.horizon.execute_at_ms)


_right_end_load = Shard.end_load


def _end_load_page_wins(self: Shard, page: Any, now_ms: int) -> None:
    self._changed_during_load = {}
    _right_end_load(self, page, now_ms)


def _arm_without_waking(self: FireLoop, entry: Entry) -> None:
    right, self._wake_for = self._wake_for, lambda due_ms: None  # type: ignore[method-assign]
    try:
        _right_arm(self, entry)
    finally:
        self._wake_for = right  # type: ignore[method-assign]


_right_arm = FireLoop.arm


def _never_wake(self: FireLoop) -> None:
    pass


def _try_again_blindly(self: Ownership, shard: Shard) -> None:
    shard.not_committed()


async def _release_at_once(self: Ownership, shards: list[Shard]) -> None:
    fences = [shard.fence for shard in shards if not shard.dropped]
    for shard in shards:
        if not shard.dropped:
            self.drop(shard, NotOwner())
    await self._release_rows(fences)


def _begin_without_looking(self: Firing) -> int | None:
    loop, entry = self.loop, self.entry
    now_ms = loop.membership.now_ms()
    if entry.phase is Phase.QUEUED:
        entry.shard.begin(entry, now_ms, again=False)
    elif not self.begun:
        entry.started_at_ms = now_ms
        entry.shard.sending[entry.timer.key] = entry.shard.sending.get(entry.timer.key, 0) + 1
    self.begun = True
    return now_ms


def _now_is_the_wall_clock(self: Membership) -> int:
    return self._clock.wall_ms()


async def _recover_without_claiming(self: Ownership, shard: Shard) -> None:
    """Reads what is there now and believes it, while the old commit may still be on its way."""
    found = await self._read(shard.shard_id, list(shard.committing))
    rows = {row.shard_id: row for row in await self._store.shards()}
    if not shard.dropped:
        shard.finish_recovery(rows[shard.shard_id], found)


def _take_again(self: ForwardedCommands, forward: Any) -> Any:
    """Carries out every command that arrives, at any time and any number of times."""

    async def carry_out() -> Any:
        shard = self._commands.local_shard(forward.shard_id)
        if shard is None:
            raise NotOwner
        return await self._commands.carry_out(shard, forward.command)

    return asyncio.ensure_future(carry_out())


def _every_number_is_new(self: _RequestNumbers, receiver: str, sender: str, number: int) -> bool:
    return True


def _known_or_plain(self: Namespaces, name: str) -> Namespace | None:
    """As on an instance that has not read the namespaces since this one was created."""
    known = _right_known(self, name)
    if name == "default" or (known is not None and known.revision):
        return known
    return Namespace(name=name, num_shards=1, created_at_ms=0)


_right_known = Namespaces.known


def _now_with_the_offset(self: Membership) -> int:
    """Ignores jumps, but does not correct a constant error of the clock."""
    return _right_now_ms(self) + self._correction_ms


_right_now_ms = Membership.now_ms


async def _delete_after_one_look(self: NamespaceOperations, name: str) -> None:
    """Marks the namespace and does not search again for timers that were accepted before all instances
    knew."""
    old = await self._cache.get(name)
    if name == "default":
        raise Conflict("stays")
    await self._refuse_if_used(old)
    await self._cache.replace(replace(old, revision=old.revision + 1, deleted=True), old)


def _restore_nothing(self: Shard, key: Any, previous_entry: Entry | None) -> None:
    pass


def _begin_again_without_looking(self: Shard, entry: Entry, now_ms: int, *, again: bool) -> bool:
    return again or _right_shard_begin(self, entry, now_ms, again=again)


_right_shard_begin = Shard.begin


def _shrink_without_the_horizon(self: Shard, cutoff_ms: int) -> None:
    before = self.horizon
    _right_shrink(self, cutoff_ms)
    self.window.horizon = before


_right_shrink = Shard.shrink


def _forgets_what_was_decided_meanwhile(self: Shard, page: Any, now_ms: int) -> None:
    """What was written beyond the old horizon while the page was read is not on the page."""
    if self._changed_during_load:
        self._changed_during_load = dict.fromkeys(self._changed_during_load)
    _right_end_load(self, page, now_ms)


def _spill_without_a_backlog(self: Window, position: Any) -> None:
    pass


def _jump_without_a_backlog(self: Window, load: Any, following: Any, now_ms: int) -> Any:
    before = self.backlog
    end = _right_window_end_load(self, load, following, now_ms)
    if not load.is_backlog:
        self.backlog = before
    return end


_right_window_end_load = Window.end_load


def _ends_the_backlog_after_a_page(self: Window, load: Any, following: Any, now_ms: int) -> Any:
    end = _right_window_end_load(self, load, following, now_ms)
    if load.is_backlog:
        self.backlog = None
    return end


def _is_never_over_share(self: Slots, namespace: Any) -> bool:
    return False


def _origin_of(self: Timer) -> str:
    return "/".join(self.callback_url.split("/")[:3])


def _discard_nothing(self: FireLoop, entry: Entry) -> None:
    pass


def _the_whole_limit(self: FlowHomes, instance: str, report: FlowReport) -> FlowAllowance:
    """Every instance may use the whole limit of a flow."""
    namespace = self._namespaces.known(report.namespace)
    return FlowAllowance(undecided=True) if namespace is None else FlowAllowance(None, None)


def _raise_at_once(self: FlowShare, *args: Any, may_raise: bool = True) -> FlowAllowance:
    """A new home gives the limit away before it has heard who uses it already."""
    return _right_report(self, *args, may_raise=True)


_right_report = FlowShare.report


async def _existing_whatever_is_over(self: Commands, shard: Shard, key: Any, spec: TimerSpec, timer: Timer) -> Any:
    return await _right_existing(self, shard, key, replace(spec, ignore_reached=False), timer)


_right_existing = Commands._existing


def _is_after_whatever_comes(self: CommandPosition, other: CommandPosition) -> bool:
    return True


async def _deleted_only_if_created(
    self: Commands, shard: Shard, key: Any, command: CommandPosition | None = None, *, if_stored: bool = False
) -> Verdict:
    found = await self._find(shard, key)
    if command is not None and found.timer is None and found.reached is None and found.unreadable is None:
        return Verdict.CANCELLED
    return await _right_delete(self, shard, key, command, if_stored=if_stored)


_right_delete = Commands.delete


def _following_the_delivery(state: ScheduleState, now_ms: int) -> Occurrence | None:
    return _right_following(replace(state, after_ms=max(state.after_ms, now_ms)), now_ms)


_right_following = recurrence.following


def _over_after_a_failure(settlement: Settlement, now_ms: int) -> Settlement:
    if settlement.reached is not None and settlement.reached.outcome is Outcome.FAILED:
        return Settlement(settlement.reached, None, settlement.succeeded)
    return _right_continued(settlement, now_ms)


_right_continued = settle._continued


def _settle_and_then_arm(self: Shard, entry: Entry, settlement: Settlement) -> None:
    """The end of an occurrence is committed, and the next one a moment later."""
    rearmed = settlement.rearmed
    if settlement.reached is None or rearmed is None or recurrence.state_of(rearmed) is None:
        _right_shard_settle(self, entry, settlement)
        return
    _right_shard_settle(self, entry, Settlement(settlement.reached, None, settlement.succeeded))
    self._loop.call_later(0.1, _write_if_possible, self, rearmed)


def _write_if_possible(shard: Shard, timer: Timer) -> None:
    if not shard.closing and shard._counters.has_room():
        shard.write(timer.key, timer, []).add_done_callback(lambda written: written.cancelled() or written.exception())


_right_shard_settle = Shard._settle


def _id_of_an_attempt(self: Timer) -> str:
    high_low = f"{self.uuid_high:x}{self.uuid_low:x}"
    return f"{high_low}.{self.generation:x}.{self.extras.occurrence}.{self.attempts}"


MUTANTS = (
    Mutant("no-fence", "the store does not check the fence", ((MemoryStore, "_owned", _owned_by_anybody),)),
    Mutant(
        "fence-without-lock",
        "the store checks the fence and writes a moment later",
        ((SimStore, "perform", _checked_then_written),),
    ),
    Mutant(
        "no-nonce",
        "the store compares versions only",
        ((MemoryStore, "_owned", _owned_by_version),),
    ),
    Mutant(
        "no-lease",
        "an instance fires even after its lease has ended",
        ((Membership, "may_fire", _once_leased_for_ever),),
    ),
    Mutant(
        "settle-without-generation",
        "the result of an attempt settles any timer that has that id now",
        ((Shard, "settle", _settle_whatever_is_there),),
    ),
    Mutant(
        "horizon-off-by-one",
        "the horizon is at the end of the last millisecond that was loaded in part",
        ((Shard, "end_load", _end_load_too_far),),
    ),
    Mutant(
        "memory-loses-on-load",
        "a page that was read before a commit overwrites it",
        ((Shard, "end_load", _end_load_page_wins),),
    ),
    Mutant(
        "wake-up-lost",
        "a new earliest timer does not wake the fire loop, and nothing else wakes it",
        ((FireLoop, "arm", _arm_without_waking), (FireLoop, "wake", _never_wake)),
    ),
    Mutant(
        "re-claim-skipped",
        "after an unknown outcome the batch is simply sent again",
        ((Ownership, "recover", _try_again_blindly),),
    ),
    Mutant(
        "read-without-re-claim",
        "after an unknown outcome the store is read, but the old commit is not fenced off",
        ((Ownership, "_recover", _recover_without_claiming),),
    ),
    Mutant(
        "release-without-drain",
        "a shard is given away with writes and deliveries on their way",
        ((Ownership, "release", _release_at_once),),
    ),
    Mutant(
        "forward-taken-twice",
        "a request between instances that the network repeats is accepted, and its commands are carried out again",
        ((ForwardedCommands, "receive", _take_again), (_RequestNumbers, "is_new", _every_number_is_new)),
    ),
    Mutant(
        "begin-without-looking",
        "nothing is checked immediately before the first byte is sent",
        ((Firing, "begin", _begin_without_looking),),
    ),
    Mutant(
        "wall-clock-believed",
        "a wall clock that jumps ahead is used at once",
        ((Membership, "now_ms", _now_is_the_wall_clock),),
    ),
    Mutant(
        "namespace-unknown",
        "a timer fires with default settings as long as its namespace is not known",
        ((Namespaces, "known", _known_or_plain),),
    ),
    Mutant(
        "clock-offset-not-corrected",
        "a clock that is wrong by a constant within clock_skew_max is not corrected",
        ((Membership, "now_ms", _now_with_the_offset),),
    ),
    Mutant(
        "deleted-after-one-look",
        "a namespace is deleted without a second search for timers that were accepted meanwhile",
        ((NamespaceOperations, "delete", _delete_after_one_look),),
    ),
    Mutant(
        "released-before-recorded",
        "a shard is released before the results of its deliveries are recorded",
        ((Shard, "is_quiet", property(lambda self: not self.sending)),),
    ),
    Mutant(
        "expired-not-restored",
        "a timer whose update could not be written in time is not armed again",
        ((Shard, "_restore", _restore_nothing),),
        seeds=200,
    ),
    Mutant(
        "sent-again-without-looking",
        "a request that is sent again on another connection is not checked again",
        ((Shard, "begin", _begin_again_without_looking),),
    ),
    Mutant(
        "shrink-keeps-horizon",
        "timers are dropped to save memory, but the horizon still counts them as loaded",
        ((Shard, "shrink", _shrink_without_the_horizon),),
    ),
    Mutant(
        "namespace-without-share",
        "one namespace may use all slots",
        ((Slots, "_is_over_share", _is_never_over_share),),
    ),
    Mutant(
        "breaker-without-flow",
        "all URLs of an origin have one breaker",
        ((Timer, "flow_key", property(_origin_of)),),
    ),
    Mutant(
        "discard-forgotten",
        "a timer that is deleted while it is held stays in its queue",
        ((FireLoop, "discard", _discard_nothing),),
    ),
    Mutant(
        "backlog-forgotten",
        "due timers are removed from memory, and nothing says that they have to be loaded again",
        ((Window, "add_to_backlog", _spill_without_a_backlog),),
    ),
    Mutant(
        "overdue-timers-skipped",
        "the horizon is set to now, and the timers between the page and now are not loaded",
        ((Window, "end_load", _jump_without_a_backlog),),
    ),
    Mutant(
        "backlog-ends-too-early",
        "one page of the backlog counts as all of it",
        ((Window, "end_load", _ends_the_backlog_after_a_page),),
    ),
    Mutant(
        "low-water-passes-backlog",
        "the low-water mark rises past timers of the backlog that are not in memory",
        ((Window, "complete_until", property(lambda self: self.horizon)),),
        seeds=200,
    ),
    Mutant(
        "load-misses-what-was-written",
        "a timer written while a page was read is neither on the page nor placed",
        ((Shard, "end_load", _forgets_what_was_decided_meanwhile),),
    ),
    Mutant(
        "limits-not-divided",
        "every instance may use the whole limit of a flow",
        ((FlowHomes, "answer", _the_whole_limit),),
    ),
    Mutant(
        "new-home-raises-at-once",
        "a new home of a flow gives the limit away before it has heard who uses it already",
        ((FlowShare, "report", _raise_at_once),),
        seeds=300,
    ),
    Mutant(
        "if-reached-ignored",
        "a create with ifReached=ignore creates a timer again that is over",
        ((Commands, "_existing", _existing_whatever_is_over),),
    ),
    Mutant(
        "older-command-replaces-newer",
        "a command that arrives late replaces or cancels what a later one has written",
        ((CommandPosition, "is_after", _is_after_whatever_comes),),
    ),
    Mutant(
        "early-cancel-forgotten",
        "the cancel of a timer that is not created yet leaves nothing behind, and its create arrives after it",
        ((Commands, "delete", _deleted_only_if_created),),
    ),
    Mutant(
        "next-from-the-delivery",
        "the next occurrence is the first after the delivery, not after the occurrence before it",
        ((settle, "following", _following_the_delivery),),
    ),
    Mutant(
        "over-after-a-failure",
        "an occurrence that failed ends the schedule",
        ((settle, "_continued", _over_after_a_failure),),
    ),
    Mutant(
        "next-in-another-commit",
        "the end of an occurrence is committed, and the next occurrence a moment later",
        ((Shard, "_settle", _settle_and_then_arm),),
    ),
    Mutant(
        "id-of-the-attempt",
        "an occurrence that is called again has another id, so that its receiver acts twice",
        ((Timer, "delivery_id", property(_id_of_an_attempt)),),
    ),
)
