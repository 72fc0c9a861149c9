"""Judges a history: what clients asked for and were told, against what receivers saw.

The receiver's log is the evidence. Every put carries a value of its own (its payload), so that a callback
tells which wish it serves. Wishes about one timer come one after the other, or two at the same time; an outcome
that nobody knows (`INFO`: the connection broke, the server died) counts as maybe.

    A  a timer whose last wish is a put that was acknowledged fires with that value; one that was replayed fires again
    B  nothing fires before its time
    C  nothing starts after an acknowledged delete, no older value after an acknowledged put
    D  what fires last is the last acknowledged value (together with A and C), and nothing nobody asked for
    E  one firing owner at a time: once a shard has fired under a version, no older one fires, and nobody
       else fires under that one
    R  (if `judge` is told which faults there were) what a receiver has accepted is repeated only if a fault
       struck whoever delivered it before that could be on record

`judge` answers the violations as readable stories; an empty list is a pass.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from duetime.domain.instants import format_instant

__all__ = ["Callback", "Fault", "Kind", "Result", "Violation", "Wish", "judge", "repetitions"]

# A delivery is on record within this time, on a machine that is slow but not broken.
_ON_RECORD_WITHIN_MS = 5_000


class Kind(enum.StrEnum):
    PUT = "put"
    DELETE = "delete"
    FIRE_NOW = "fireNow"  # makes the value that is scheduled due at once
    REPLAY = "replay"  # arms the last value of a timer that is over, due at once
    ENSURE = "ensure"  # a create with ifAbsent whose answer was that the same timer existed already


class Result(enum.StrEnum):
    OK = "ok"  # acknowledged
    FAIL = "fail"  # certainly not applied
    INFO = "info"  # nobody knows


class Wish(Struct, frozen=True):
    """One request about one timer, and what its client was told. Times are wall time in milliseconds."""

    timer: str
    kind: Kind
    asked_at_ms: int
    told_at_ms: int
    result: Result
    value: str = ""
    due_ms: int = 0
    keeps_due: bool = False  # an update that keeps the time: the value is due when the one before it was
    skip_late_ms: int = 0  # the missed-fire policy: a first attempt that would be later than this is not made; 0: none


class Callback(Struct, frozen=True):
    """One call as a receiver saw it. `started_at_ms` is when the sender began it, by its own stamp."""

    timer: str
    value: str
    attempt: int
    started_at_ms: int
    seen_at_ms: int
    fence: str = ""
    owner: str = ""
    delivery: str = ""  # the same for everything that serves one firing: what receivers deduplicate by
    accepted_at_ms: int = 0  # when the receiver said that it is done; 0: it did not
    recorded_at_ms: int = 0  # when the outcome of this attempt was in the database; 0: not known
    over_at_ms: int = 0  # when the end of this delivery was in the database; 0: not known
    begun_at_ms: int = 0  # if this is a repeat on a fresh connection: when the attempt began; 0: it is none


class Fault(Struct, frozen=True):
    """Something that was done to the cluster, until it had recovered. `who` is the owner it struck; empty: all."""

    kind: str
    from_ms: int
    until_ms: int
    who: str = ""
    delivery: str = ""  # explains a repetition of this delivery only, however late it comes; empty: of any


class Violation(Struct, frozen=True):
    invariant: str
    timer: str
    what: str
    story: str

    def __str__(self) -> str:
        return f"[{self.invariant}] {self.timer}: {self.what}\n{self.story}"


def judge(
    wishes: Iterable[Wish],
    callbacks: Sequence[Callback],
    *,
    clock_error_ms: int = 0,
    faults: Sequence[Fault] | None = None,
    all_accepted: bool = False,
) -> list[Violation]:
    """Everything that should not have been, timer by timer. `clock_error_ms`: how far a sender's clock may be off.

    Without `faults` repetitions are not judged; with an empty list none is allowed. `all_accepted`: every receiver
    accepts in the end, so each last value must be accepted, not only sent.
    """
    by_timer: dict[str, list[Wish]] = defaultdict(list)
    for wish in wishes:
        by_timer[wish.timer].append(wish)
    calls: dict[str, list[Callback]] = defaultdict(list)
    for callback in callbacks:
        calls[callback.timer].append(callback)
    violations: list[Violation] = []
    for timer in sorted(by_timer.keys() | calls.keys()):
        history = _with_what_was_learnt(sorted(by_timer[timer], key=lambda wish: wish.asked_at_ms))
        seen = sorted(calls[timer], key=lambda call: call.seen_at_ms)
        wrongs = [*_wrongs(history, seen, clock_error_ms), *_missing(history, seen, all_accepted)]
        if faults is not None:
            wrongs += _needless(history, seen, faults)
        violations += [Violation(invariant, timer, what, _story(history, seen)) for invariant, what in wrongs]
    return violations + _two_owners(callbacks)


def _with_what_was_learnt(history: list[Wish]) -> list[Wish]:
    """A put of unknown outcome counts as applied if the server later answers that its value is there."""
    there = {wish.value for wish in history if wish.kind is Kind.ENSURE and wish.result is Result.OK}
    return [
        replace(wish, result=Result.OK)
        if wish.result is Result.INFO and wish.kind is Kind.PUT and wish.value in there
        else wish
        for wish in history
    ]


# --- repetitions ---------------------------------------------------------------------------------


def repetitions(callbacks: Iterable[Callback]) -> list[tuple[Callback, Callback]]:
    """What was accepted, and the call that came for it all the same."""
    by_delivery: dict[str, list[Callback]] = defaultdict(list)
    for call in callbacks:
        if call.delivery:
            by_delivery[call.delivery].append(call)
    return [
        (before, again)
        for calls in by_delivery.values()
        for before, again in pairwise(sorted(calls, key=lambda call: call.started_at_ms))
        if before.accepted_at_ms
    ]


def _needless(history: Sequence[Wish], seen: Sequence[Callback], faults: Sequence[Fault]) -> Iterator[tuple[str, str]]:
    for call in seen:
        if call.over_at_ms and call.started_at_ms > call.over_at_ms:
            yield "R", f"{call.value!r} came from {call.owner}, though it was over since {_clock(call.over_at_ms)}"
    for before, again in [*repetitions(seen), *_fired_again(history, seen)]:
        if any(fault.delivery == before.delivery for fault in faults if fault.delivery):
            continue
        came = f"{before.value!r} was accepted from {before.owner} at {_clock(before.accepted_at_ms)} and came again"
        begun_ms = before.begun_at_ms or before.started_at_ms
        on_record_ms = before.recorded_at_ms or before.over_at_ms or before.accepted_at_ms + _ON_RECORD_WITHIN_MS
        struck = (fault for fault in faults if fault.who in ("", before.owner) and not fault.delivery)
        if not any(fault.from_ms <= on_record_ms and fault.until_ms >= begun_ms for fault in struck):
            yield "R", f"{came} from {again.owner}, though nothing had happened to {before.owner}"


def _fired_again(history: Sequence[Wish], seen: Sequence[Callback]) -> Iterator[tuple[Callback, Callback]]:
    """The same for a value that came again as another delivery, without anybody having asked for that."""
    by_value: dict[str, list[Callback]] = defaultdict(list)
    for call in seen:
        if call.delivery:
            by_value[call.value].append(call)
    asked = [w for w in history if w.kind in (Kind.REPLAY, Kind.PUT) and w.result is not Result.FAIL]
    for value, calls in by_value.items():
        for before, again in pairwise(sorted(calls, key=lambda call: call.started_at_ms)):
            if not before.accepted_at_ms or before.delivery == again.delivery:
                continue
            if not any(
                wish.asked_at_ms <= again.started_at_ms and wish.told_at_ms >= before.started_at_ms
                for wish in asked
                if wish.kind is Kind.REPLAY or wish.value == value
            ):
                yield before, again


def _two_owners(callbacks: Sequence[Callback]) -> list[Violation]:
    violations: list[Violation] = []
    last: dict[str, tuple[int, Callback]] = {}
    for call in sorted(callbacks, key=lambda call: call.started_at_ms):
        shard, _, version_text = call.fence.partition(".")
        if not version_text:
            continue
        version = int(version_text)
        newest, before = last.get(shard, (version, call))
        if version < newest or (version == newest and call.owner != before.owner):
            what = (
                f"shard {shard} fired under {call.fence} by {call.owner} after {before.fence} by {before.owner}"
                f" had fired {before.timer}"
            )
            violations.append(Violation("E", call.timer, what, _story((), (before, call))))
        else:
            last[shard] = (version, call)
    return violations


# --- what fired ----------------------------------------------------------------------------------


def _wrongs(history: Sequence[Wish], seen: Sequence[Callback], clock_error_ms: int) -> Iterator[tuple[str, str]]:
    puts: dict[str, list[int]] = defaultdict(list)
    for index, wish in enumerate(history):
        if wish.kind is Kind.PUT:
            puts[wish.value].append(index)
        elif wish.kind is Kind.ENSURE and wish.result is Result.OK and wish.value not in puts:
            yield "D", f"{wish.value!r} was said to exist already, but had not been asked for before"
    for call in seen:
        asked = puts.get(call.value)
        if asked is None:
            yield "D", f"fired with a value nobody asked for: {call.value!r}"
            continue
        if all(history[index].result is Result.FAIL for index in asked):
            yield "D", f"fired with {call.value!r}, which was refused"
        early_ms = _earliest_ms(history, asked, call) - call.seen_at_ms
        if early_ms > clock_error_ms:
            yield "B", f"{call.value!r} fired {early_ms} ms early"
        # The same value may be asked for twice (ifAbsent): the last one before the call counts.
        before = [index for index in asked if history[index].asked_at_ms <= call.started_at_ms]
        yield from _overtaken(history, before[-1] if before else asked[0], call)


def _overtaken(history: Sequence[Wish], index: int, call: Callback) -> Iterator[tuple[str, str]]:
    """Started after a later wish was acknowledged."""
    put = history[index]
    # By their order, not by time alone: two wishes may be asked and told within one millisecond.
    for number, wish in enumerate(history[index + 1 :], index + 1):
        if wish.asked_at_ms < put.told_at_ms or wish.result is not Result.OK or call.started_at_ms <= wish.told_at_ms:
            continue
        # A replay that was under way when the delete was asked for may come after it.
        beside = [other for other in history[:number] if other.told_at_ms > wish.asked_at_ms]
        if wish.kind is Kind.PUT or (
            wish.kind is Kind.DELETE and not _replayed([*beside, *history[number + 1 :]], call)
        ):
            yield "C", f"{call.value!r} started {call.started_at_ms - wish.told_at_ms} ms after {_named(wish)}"


def _replayed(later: Sequence[Wish], call: Callback) -> bool:
    return any(
        wish.kind is Kind.REPLAY and wish.result is not Result.FAIL and wish.asked_at_ms <= call.started_at_ms
        for wish in later
    )


def _earliest_ms(history: Sequence[Wish], asked: Sequence[int], call: Callback) -> int:
    """The earliest time at which this call may be made, by everything that may have been applied."""
    first = history[asked[0]]
    at_once = [
        wish.asked_at_ms
        for wish in history
        if wish.kind in (Kind.FIRE_NOW, Kind.REPLAY)
        and wish.result is not Result.FAIL
        and first.asked_at_ms <= wish.told_at_ms
        and wish.asked_at_ms <= call.seen_at_ms
    ]
    return min([_due_ms(history, index) for index in asked] + at_once)


def _due_ms(history: Sequence[Wish], index: int) -> int:
    """When the value of this put is due; of an update that keeps the time, at the earliest."""
    put = history[index]
    if not put.keeps_due:
        return put.due_ms
    # What was asked for at the same time may have come first.
    dues = [
        wish.due_ms if wish.kind is Kind.PUT else wish.asked_at_ms
        for wish in history[index + 1 :]
        if wish.asked_at_ms <= put.told_at_ms and _sets_due(wish) and not wish.keeps_due
    ]
    for number in range(index - 1, -1, -1):
        wish = history[number]
        if not _sets_due(wish):
            continue
        dues.append(_due_ms(history, number) if wish.kind is Kind.PUT else wish.asked_at_ms)
        if wish.kind is Kind.PUT and wish.result is Result.OK and wish.told_at_ms <= put.asked_at_ms:
            break
    return min(dues, default=0)


def _sets_due(wish: Wish) -> bool:
    return wish.kind in (Kind.PUT, Kind.FIRE_NOW, Kind.REPLAY) and wish.result is not Result.FAIL


# --- what did not fire ---------------------------------------------------------------------------


def _missing(history: Sequence[Wish], seen: Sequence[Callback], all_accepted: bool) -> Iterator[tuple[str, str]]:
    """The last acknowledged wish, and those that may have been applied after it, decide what must have fired."""
    words = [
        (index, wish)
        for index, wish in enumerate(history)
        if wish.kind in (Kind.PUT, Kind.DELETE) and wish.result is not Result.FAIL
    ]
    last = [wish for index, wish in words if not _followed(index, wish, words)]
    done = [call for call in seen if call.accepted_at_ms or not all_accepted]
    fired = {call.value for call in done}
    may_be_deleted = any(wish.kind is Kind.DELETE for wish in last)
    acknowledged = [wish for wish in last if wish.result is Result.OK]
    must_fire = acknowledged and not may_be_deleted and not fired & {wish.value for wish in last}
    if must_fire and not any(_may_be_skipped(history, wish, seen) for wish in last):
        yield "A", f"{acknowledged[-1].value!r} was acknowledged and never {'accepted' if seen else 'fired'}"
    for index, wish in enumerate(history):
        if wish.kind is Kind.REPLAY and wish.result is Result.OK and not wish.skip_late_ms:
            replaced = [w for number, w in words if number > index or w.told_at_ms >= wish.asked_at_ms]
            if not replaced and not any(call.seen_at_ms >= wish.asked_at_ms for call in done):
                yield "A", f"the replay acknowledged at {_clock(wish.told_at_ms)} never fired"


def _followed(index: int, wish: Wish, words: Sequence[tuple[int, Wish]]) -> bool:
    return any(
        other.result is Result.OK and number > index and other.asked_at_ms >= wish.told_at_ms for number, other in words
    )


def _may_be_skipped(history: Sequence[Wish], put: Wish, seen: Sequence[Callback]) -> bool:
    """Does the missed-fire policy allow that this value never fires? Not if an attempt was made in time, and was on
    record before an update that kept the time."""
    if not put.skip_late_ms:
        return False
    index = history.index(put)
    values = {put.value}
    while history[index].keeps_due:
        index -= 1
        if index < 0 or history[index].kind is not Kind.PUT or history[index].result is not Result.OK:
            return True  # what it changed is not known for certain
        values.add(history[index].value)
    first = history[index]
    if any(wish.kind is not Kind.PUT and wish.result is not Result.FAIL for wish in history[index:]):
        return True
    return not any(
        call.value in values
        and call.started_at_ms <= first.due_ms + put.skip_late_ms
        and call.recorded_at_ms
        and (call.value == put.value or call.recorded_at_ms < put.asked_at_ms)
        for call in seen
    )


# --- stories -------------------------------------------------------------------------------------


def _named(wish: Wish) -> str:
    return f"the {wish.kind} {wish.value!r}".rstrip("' ") + f" acknowledged at {_clock(wish.told_at_ms)}"


def _story(history: Sequence[Wish], seen: Sequence[Callback]) -> str:
    lines = [
        (
            wish.asked_at_ms,
            f"{_clock(wish.asked_at_ms)}–{_clock(wish.told_at_ms)}  {wish.kind} {wish.value}"
            + (
                ""
                if wish.kind is not Kind.PUT
                else " due as before"
                if wish.keeps_due
                else f" due {_clock(wish.due_ms)}"
            )
            + f" -> {wish.result}",
        )
        for wish in history
    ]
    lines += [
        (
            call.started_at_ms,
            f"{_clock(call.started_at_ms)}–{_clock(call.seen_at_ms)}  fired {call.value}"
            f" attempt {call.attempt} fence {call.fence} {call.owner} {call.delivery}".rstrip()
            + (f" accepted {_clock(call.accepted_at_ms)}" if call.accepted_at_ms else ""),
        )
        for call in seen
    ]
    return "\n".join("    " + text for _, text in sorted(lines))


def _due(wish: Wish) -> str:
    if wish.kind is not Kind.PUT:
        return ""
    return " due as before" if wish.keeps_due else f" due {_clock(wish.due_ms)}"


def _clock(milliseconds: int) -> str:
    return format_instant(milliseconds)[11:23]
