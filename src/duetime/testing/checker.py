"""Checks a history: compares the requests of clients, and the answers they got, with the callbacks receivers saw.

Every put carries a value of its own (its payload), so a callback shows which put it belongs to. Requests about one
timer are sent one after the other, or two at the same time. A request of unknown outcome (`Result.INFO`: the
connection broke, the server crashed) may or may not have been applied.

    A  a timer whose last request is an acknowledged put fires with that value; a replayed timer fires again
    B  no timer fires before it is due
    C  no callback starts after an acknowledged delete, none after the answer that the timer is over (a create that was
       ignored for that), and none with an older value after an acknowledged put
    D  the last value that fires is the last acknowledged one (together with A and C); no value fires that no client
       sent
    I  a create with ifReached=ignore does not create a timer again that is known to be over
    E  one firing owner at a time: after a shard has fired under a version, it fires under no older version, and no
       other instance fires under the same version
    R  (only if the faults are given to `find_violations`) a callback that a receiver has accepted is repeated only if
       a fault struck its sender before the result could be recorded

`find_violations` returns each violation with the history of its timer. An empty list means that the check passed.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from duetime.domain.instants import format_instant

__all__ = ["Callback", "ClientRequest", "Fault", "Kind", "Result", "Violation", "find_violations", "repetitions"]

# The result of a delivery is recorded within this time, on a machine that is slow but not broken.
_ON_RECORD_WITHIN_MS = 5_000


class Kind(enum.StrEnum):
    PUT = "put"
    DELETE = "delete"
    FIRE_NOW = "fireNow"  # makes the value that is scheduled due at once
    REPLAY = "replay"  # schedules the last value of a reached timer again, due at once
    ENSURE = "ensure"  # a create with ifAbsent whose answer was that the same timer existed already
    OVER = "over"  # a create with ifReached=ignore whose answer was that the timer is over: nothing was created


class Result(enum.StrEnum):
    OK = "ok"  # acknowledged
    FAIL = "fail"  # certainly not applied
    INFO = "info"  # unknown outcome


class ClientRequest(Struct, frozen=True):
    """One request about one timer, and its result. Times are wall time in milliseconds."""

    timer: str
    kind: Kind
    sent_at_ms: int
    answered_at_ms: int
    result: Result
    value: str = ""
    due_ms: int = 0
    keeps_due: bool = False  # an update without a new time: the value is due when the value before it was due
    skip_late_ms: int = 0  # the missed-fire policy: no first attempt later than this; 0: no policy
    ignores_reached: bool = False  # a put with ifReached=ignore, where reached timers are kept
    repeats: bool = False  # a put with a schedule: its value fires again and again (testing/occurrences.py)


class Callback(Struct, frozen=True):
    """One call as a receiver saw it. `started_at_ms` is when the sender began it, by the sender's own clock."""

    timer: str
    value: str
    attempt: int
    started_at_ms: int
    seen_at_ms: int
    fence: str = ""
    owner: str = ""
    delivery: str = ""  # the same for all attempts of one firing; receivers deduplicate by it
    accepted_at_ms: int = 0  # when the receiver accepted it; 0: it did not
    recorded_at_ms: int = 0  # when the result of this attempt was stored; 0: not known
    over_at_ms: int = 0  # when the end of this delivery was stored; 0: not known
    scheduled_ms: int = 0  # the time that was asked for
    begun_at_ms: int = 0  # if this is a repeat on a new connection: when the attempt began; 0: no repeat


class Fault(Struct, frozen=True):
    """A fault, from its start until the cluster had recovered. `owner` is the instance it struck; empty: all."""

    kind: str
    from_ms: int
    until_ms: int
    owner: str = ""
    delivery: str = ""  # allows a repetition of this delivery only, at any later time; empty: of any delivery


class Violation(Struct, frozen=True):
    invariant: str
    timer: str
    what: str
    history: str

    def __str__(self) -> str:
        return f"[{self.invariant}] {self.timer}: {self.what}\n{self.history}"


def find_violations(
    requests: Iterable[ClientRequest],
    callbacks: Sequence[Callback],
    *,
    clock_error_ms: int = 0,
    faults: Sequence[Fault] | None = None,
    all_accepted: bool = False,
) -> list[Violation]:
    """All violations, timer by timer. `clock_error_ms`: how far a sender's clock may be wrong.

    Without `faults` repetitions are not checked; with an empty list no repetition is allowed. `all_accepted`: every
    receiver accepts in the end, so the last value of each timer must be accepted, not only sent.
    """
    by_timer: dict[str, list[ClientRequest]] = defaultdict(list)
    for request in requests:
        by_timer[request.timer].append(request)
    calls: dict[str, list[Callback]] = defaultdict(list)
    for callback in callbacks:
        calls[callback.timer].append(callback)
    violations: list[Violation] = []
    for timer in sorted(by_timer.keys() | calls.keys()):
        history = _with_confirmed_puts(sorted(by_timer[timer], key=lambda request: request.sent_at_ms))
        seen = sorted(calls[timer], key=lambda call: call.seen_at_ms)
        found = [
            *_wrong_callbacks(history, seen, clock_error_ms),
            *_missing_callbacks(history, seen, all_accepted),
            *_brought_back(history),
        ]
        if faults is not None:
            found += _unexplained_repetitions(history, seen, faults)
        violations += [Violation(invariant, timer, what, _history_text(history, seen)) for invariant, what in found]
    return violations + _overlapping_owners(callbacks)


def _with_confirmed_puts(history: list[ClientRequest]) -> list[ClientRequest]:
    """A put of unknown outcome counts as applied if the server later answers that its value exists."""
    there_at_ms: dict[str, int] = {}  # by value, when it was last reported to exist
    for request in history:
        if request.kind is Kind.ENSURE and request.result is Result.OK:
            there_at_ms[request.value] = max(request.answered_at_ms, there_at_ms.get(request.value, 0))
    return [
        replace(request, result=Result.OK)
        if request.result is Result.INFO
        and request.kind is Kind.PUT
        # The same value may be sent again after it was reported to exist: that says nothing about the later put.
        and request.sent_at_ms <= there_at_ms.get(request.value, -1)
        else request
        for request in history
    ]


# --- repetitions ---------------------------------------------------------------------------------


def repetitions(callbacks: Iterable[Callback]) -> list[tuple[Callback, Callback]]:
    """Pairs of an accepted call and the next call of the same delivery."""
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


def _unexplained_repetitions(
    history: Sequence[ClientRequest], seen: Sequence[Callback], faults: Sequence[Fault]
) -> Iterator[tuple[str, str]]:
    for call in seen:
        if call.over_at_ms and call.started_at_ms > call.over_at_ms:
            over = f"its delivery was over since {_time_of_day(call.over_at_ms)}"
            yield "R", f"{call.value!r} came from {call.owner} although {over}"
    for before, again in [*repetitions(seen), *_fired_again(history, seen)]:
        if any(fault.delivery == before.delivery for fault in faults if fault.delivery):
            continue
        came = (
            f"{before.value!r} was accepted from {before.owner} at {_time_of_day(before.accepted_at_ms)} and came again"
        )
        begun_ms = before.begun_at_ms or before.started_at_ms
        on_record_ms = before.recorded_at_ms or before.over_at_ms or before.accepted_at_ms + _ON_RECORD_WITHIN_MS
        struck = (fault for fault in faults if fault.owner in ("", before.owner) and not fault.delivery)
        if not any(fault.from_ms <= on_record_ms and fault.until_ms >= begun_ms for fault in struck):
            yield "R", f"{came} from {again.owner} although no fault had struck {before.owner}"


def _fired_again(history: Sequence[ClientRequest], seen: Sequence[Callback]) -> Iterator[tuple[Callback, Callback]]:
    """Pairs of an accepted call and a call with the same value in another delivery that no client requested."""
    by_value: dict[str, list[Callback]] = defaultdict(list)
    for call in seen:
        if call.delivery:
            by_value[call.value].append(call)
    repeating = {request.value for request in history if request.repeats}
    may_fire_again = [r for r in history if r.kind in (Kind.REPLAY, Kind.PUT) and r.result is not Result.FAIL]
    for value, calls in by_value.items():
        if value in repeating:
            continue
        for before, again in pairwise(sorted(calls, key=lambda call: call.started_at_ms)):
            if not before.accepted_at_ms or before.delivery == again.delivery:
                continue
            if not any(
                request.sent_at_ms <= again.started_at_ms and request.answered_at_ms >= before.started_at_ms
                for request in may_fire_again
                if request.kind is Kind.REPLAY or request.value == value
            ):
                yield before, again


def _overlapping_owners(callbacks: Sequence[Callback]) -> list[Violation]:
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
            violations.append(Violation("E", call.timer, what, _history_text((), (before, call))))
        else:
            last[shard] = (version, call)
    return violations


# --- what fired ----------------------------------------------------------------------------------


def _wrong_callbacks(
    history: Sequence[ClientRequest], seen: Sequence[Callback], clock_error_ms: int
) -> Iterator[tuple[str, str]]:
    puts: dict[str, list[int]] = defaultdict(list)
    for index, request in enumerate(history):
        if request.kind is Kind.PUT:
            puts[request.value].append(index)
        elif request.kind is Kind.ENSURE and request.result is Result.OK and request.value not in puts:
            yield "D", f"{request.value!r} was reported to exist already, but no client had sent it before"
    for call in seen:
        sent = puts.get(call.value)
        if sent is None:
            yield "D", f"fired with a value that no client sent: {call.value!r}"
            continue
        if all(history[index].result is Result.FAIL for index in sent):
            yield "D", f"fired with {call.value!r}, which was refused"
        early_ms = _earliest_ms(history, sent, call) - call.seen_at_ms
        if early_ms > clock_error_ms:
            yield "B", f"{call.value!r} fired {early_ms} ms early"
        # The same value may be sent twice (ifAbsent): the last request before the call counts.
        before = [index for index in sent if history[index].sent_at_ms <= call.started_at_ms]
        yield from _superseded(history, before[-1] if before else sent[0], call)


def _superseded(history: Sequence[ClientRequest], index: int, call: Callback) -> Iterator[tuple[str, str]]:
    """Was the call started after a later request had been acknowledged?"""
    put = history[index]
    # By their order, not by time alone: two requests may be sent and answered within one millisecond.
    for number, request in enumerate(history[index + 1 :], index + 1):
        if (
            request.sent_at_ms < put.answered_at_ms
            or request.result is not Result.OK
            or call.started_at_ms <= request.answered_at_ms
        ):
            continue
        # A replay that was in progress when the delete was sent may be applied after it.
        concurrent = [other for other in history[:number] if other.answered_at_ms > request.sent_at_ms]
        # Outside the default namespace rows of reached timers are purged soon: then a replay finds an older one.
        may_be_purged = "/" in request.timer and _replayed(history[number + 1 :], call)
        if (request.kind is Kind.PUT and not may_be_purged) or (
            # What is over stays over, as what is deleted does.
            request.kind in (Kind.DELETE, Kind.OVER) and not _replayed([*concurrent, *history[number + 1 :]], call)
        ):
            yield (
                "C",
                f"{call.value!r} started {call.started_at_ms - request.answered_at_ms} ms after {_describe(request)}",
            )


def _brought_back(history: Sequence[ClientRequest]) -> Iterator[tuple[str, str]]:
    """Was a timer created by a request that ignores timers that are over, after it was answered that it is over? If it
    had not been created before, only cancelled by a command that arrived early, a later command may create it."""
    for index, put in enumerate(history):
        if not (put.ignores_reached and put.kind is Kind.PUT and put.result is Result.OK):
            continue
        over = [
            number
            for number, request in enumerate(history[:index])
            if request.kind in (Kind.DELETE, Kind.OVER)
            and request.result is Result.OK
            and request.answered_at_ms <= put.sent_at_ms
            and any(
                created.kind is Kind.PUT
                and created.result is Result.OK
                and created.sent_at_ms <= request.answered_at_ms
                for created in history[:index]
            )
        ]
        if over and not any(
            other.kind in (Kind.PUT, Kind.REPLAY)
            and other.result is not Result.FAIL
            and number != index
            and other.sent_at_ms <= put.answered_at_ms
            and (number > over[-1] or other.answered_at_ms >= history[over[-1]].sent_at_ms)
            for number, other in enumerate(history)
        ):
            yield "I", f"{put.value!r} was created although {_describe(history[over[-1]])} said that the timer is over"


def _replayed(later: Sequence[ClientRequest], call: Callback) -> bool:
    return any(
        request.kind is Kind.REPLAY and request.result is not Result.FAIL and request.sent_at_ms <= call.started_at_ms
        for request in later
    )


def _earliest_ms(history: Sequence[ClientRequest], sent: Sequence[int], call: Callback) -> int:
    """The earliest time at which this call may be made, considering every request that may have been applied."""
    first = history[sent[0]]
    at_once = [
        request.sent_at_ms
        for request in history
        if request.kind in (Kind.FIRE_NOW, Kind.REPLAY)
        and request.result is not Result.FAIL
        and first.sent_at_ms <= request.answered_at_ms
        and request.sent_at_ms <= call.seen_at_ms
    ]
    return min([_due_ms(history, index) for index in sent] + at_once)


def _due_ms(history: Sequence[ClientRequest], index: int) -> int:
    """When the value of this put is due. For an update without a new time: the earliest possible time."""
    put = history[index]
    if not put.keeps_due:
        return put.due_ms
    # A request that was sent at the same time may have been applied first.
    dues = [
        request.due_ms if request.kind is Kind.PUT else request.sent_at_ms
        for request in history[index + 1 :]
        if request.sent_at_ms <= put.answered_at_ms and _sets_due(request) and not request.keeps_due
    ]
    # Back to the last acknowledged put before it, and to what was sent at the same time as that put.
    since_ms = 0
    for number in range(index - 1, -1, -1):
        request = history[number]
        if not _sets_due(request) or request.answered_at_ms < since_ms:
            continue
        dues.append(_due_ms(history, number) if request.kind is Kind.PUT else request.sent_at_ms)
        is_before = (
            request.kind is Kind.PUT and request.result is Result.OK and request.answered_at_ms <= put.sent_at_ms
        )
        if is_before and not since_ms:
            since_ms = request.sent_at_ms
    return min(dues, default=0)


def _sets_due(request: ClientRequest) -> bool:
    return request.kind in (Kind.PUT, Kind.FIRE_NOW, Kind.REPLAY) and request.result is not Result.FAIL


# --- what did not fire ---------------------------------------------------------------------------


def _missing_callbacks(
    history: Sequence[ClientRequest], seen: Sequence[Callback], all_accepted: bool
) -> Iterator[tuple[str, str]]:
    """The last acknowledged request, and those that may have been applied after it, decide what must have fired."""
    writes = [
        (index, request)
        for index, request in enumerate(history)
        if request.kind in (Kind.PUT, Kind.DELETE) and request.result is not Result.FAIL
    ]
    last = [request for index, request in writes if not _is_superseded(index, request, writes)]
    done = [call for call in seen if call.accepted_at_ms or not all_accepted]
    fired = {call.value for call in done}
    may_be_deleted = any(request.kind is Kind.DELETE for request in last)
    acknowledged = [request for request in last if request.result is Result.OK]
    must_fire = acknowledged and not may_be_deleted and not fired & {request.value for request in last}
    if must_fire and not any(_may_be_skipped(history, request, seen) for request in last):
        yield "A", f"{acknowledged[-1].value!r} was acknowledged and never {'accepted' if seen else 'fired'}"
    for index, request in enumerate(history):
        if request.kind is Kind.REPLAY and request.result is Result.OK and not request.skip_late_ms:
            replaced = [r for number, r in writes if number > index or r.answered_at_ms >= request.sent_at_ms]
            if not replaced and not any(call.seen_at_ms >= request.sent_at_ms for call in done):
                yield "A", f"the replay acknowledged at {_time_of_day(request.answered_at_ms)} never fired"


def _is_superseded(index: int, request: ClientRequest, writes: Sequence[tuple[int, ClientRequest]]) -> bool:
    return any(
        other.result is Result.OK and number > index and other.sent_at_ms >= request.answered_at_ms
        for number, other in writes
    )


def _may_be_skipped(history: Sequence[ClientRequest], put: ClientRequest, seen: Sequence[Callback]) -> bool:
    """Does the missed-fire policy allow that this value never fires? It does not if an attempt was made in time and
    was recorded before an update that kept the time."""
    if not put.skip_late_ms:
        return False
    if put.repeats:
        return True  # of each occurrence: testing/occurrences.py
    index = history.index(put)
    values = {put.value}
    while history[index].keeps_due:
        index -= 1
        if index < 0 or history[index].kind is not Kind.PUT or history[index].result is not Result.OK:
            return True  # it is not certain which timer it changed
        values.add(history[index].value)
    first = history[index]
    if any(request.kind is not Kind.PUT and request.result is not Result.FAIL for request in history[index:]):
        return True
    return not any(
        call.value in values
        and call.started_at_ms <= first.due_ms + put.skip_late_ms
        and call.recorded_at_ms
        # If the call of an earlier value was accepted, the update changed a further call that the receiver asked for.
        and (call.value == put.value or (call.recorded_at_ms < put.sent_at_ms and not call.accepted_at_ms))
        for call in seen
    )


# --- text of a violation -------------------------------------------------------------------------


def _describe(request: ClientRequest) -> str:
    return (
        f"the {request.kind} {request.value!r}".rstrip("' ")
        + f" acknowledged at {_time_of_day(request.answered_at_ms)}"
    )


def _history_text(history: Sequence[ClientRequest], seen: Sequence[Callback]) -> str:
    lines = [
        (
            request.sent_at_ms,
            f"{_time_of_day(request.sent_at_ms)}–{_time_of_day(request.answered_at_ms)}  {request.kind} {request.value}"
            f"{_due_text(request)} -> {request.result}",
        )
        for request in history
    ]
    lines += [
        (
            call.started_at_ms,
            f"{_time_of_day(call.started_at_ms)}–{_time_of_day(call.seen_at_ms)}  fired {call.value}"
            f" attempt {call.attempt} fence {call.fence} {call.owner} {call.delivery}".rstrip()
            + (f" accepted {_time_of_day(call.accepted_at_ms)}" if call.accepted_at_ms else ""),
        )
        for call in seen
    ]
    return "\n".join("    " + text for _, text in sorted(lines))


def _due_text(request: ClientRequest) -> str:
    if request.kind is not Kind.PUT:
        return ""
    return " due as before" if request.keeps_due else f" due {_time_of_day(request.due_ms)}"


def _time_of_day(milliseconds: int) -> str:
    return format_instant(milliseconds)[11:23]
