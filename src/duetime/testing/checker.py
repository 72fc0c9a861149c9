"""Judges a history: what clients asked for and were told, against what receivers saw.

The receiver's log is the evidence. Every put carries a value of its own (its payload), so that a callback
tells which wish it serves. Wishes about one timer come one after the other; an outcome that nobody knows
(`INFO`: the connection broke, the server died) counts as maybe.

    A  a timer whose last word is a put that was acknowledged fires with that value
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
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from duetime.timetext import format_instant

__all__ = ["Callback", "Fault", "Kind", "Result", "Violation", "Wish", "judge", "repetitions"]

# A delivery is on record within this time, on a machine that is slow but not broken.
_ON_RECORD_WITHIN_MS = 5_000


class Kind(enum.StrEnum):
    PUT = "put"
    DELETE = "delete"


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


class Fault(Struct, frozen=True):
    """Something that was done to the cluster, until it had recovered. `who` is the owner it struck; empty: all."""

    kind: str
    from_ms: int
    until_ms: int
    who: str = ""


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
) -> list[Violation]:
    """Everything that should not have been, timer by timer. `clock_error_ms`: how far a sender's clock may be off.

    Without `faults` nothing is said about repetitions; with an empty list there may be none.
    """
    by_timer: dict[str, list[Wish]] = defaultdict(list)
    for wish in wishes:
        by_timer[wish.timer].append(wish)
    calls: dict[str, list[Callback]] = defaultdict(list)
    for callback in callbacks:
        calls[callback.timer].append(callback)
    violations: list[Violation] = []
    for timer in sorted(by_timer.keys() | calls.keys()):
        history = sorted(by_timer[timer], key=lambda wish: wish.asked_at_ms)
        seen = sorted(calls[timer], key=lambda call: call.seen_at_ms)
        for invariant, what in _wrongs(history, seen, clock_error_ms):
            violations.append(Violation(invariant, timer, what, _story(history, seen)))
    violations += _two_owners(callbacks)
    if faults is not None:
        violations += _needless(callbacks, faults)
    return violations


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


def _needless(callbacks: Sequence[Callback], faults: Sequence[Fault]) -> Iterable[Violation]:
    for before, again in repetitions(callbacks):
        on_record_ms = before.accepted_at_ms + _ON_RECORD_WITHIN_MS
        struck = (fault for fault in faults if fault.who in ("", before.owner))
        if not any(fault.from_ms <= on_record_ms and fault.until_ms >= before.started_at_ms for fault in struck):
            what = (
                f"{before.value!r} was accepted from {before.owner} at {_clock(before.accepted_at_ms)} and came again"
                f" from {again.owner}, though nothing had happened to {before.owner}"
            )
            yield Violation("R", before.timer, what, _story((), (before, again)))


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


def _wrongs(history: Sequence[Wish], seen: Sequence[Callback], clock_error_ms: int) -> Iterable[tuple[str, str]]:
    puts = {wish.value: wish for wish in history if wish.kind is Kind.PUT}
    for call in seen:
        put = puts.get(call.value)
        if put is None:
            yield "D", f"fired with a value nobody asked for: {call.value!r}"
            continue
        if put.result is Result.FAIL:
            yield "D", f"fired with {call.value!r}, which was refused"
        if call.seen_at_ms + clock_error_ms < put.due_ms:
            yield "B", f"fired {put.due_ms - call.seen_at_ms} ms early"
        # By their order, not by time alone: two wishes may be asked and told within one millisecond.
        later = [wish for wish in history[history.index(put) + 1 :] if wish.asked_at_ms >= put.told_at_ms]
        for wish in later:
            if wish.result is Result.OK and call.started_at_ms > wish.told_at_ms:
                yield "C", f"{call.value!r} started {call.started_at_ms - wish.told_at_ms} ms after {_named(wish)}"
    yield from _missing(history, {call.value for call in seen})


def _missing(history: Sequence[Wish], fired: set[str]) -> Iterable[tuple[str, str]]:
    """The last acknowledged word, and whatever unknown ones came after it, say what must have fired."""
    may_be_deleted = False
    may_be: set[str] = set()
    last: Wish | None = None
    for wish in reversed(history):
        if wish.result is Result.OK:
            last = wish
            break
        if wish.result is Result.INFO:
            if wish.kind is Kind.DELETE:
                may_be_deleted = True
            else:
                may_be.add(wish.value)
    if last is None or last.kind is Kind.DELETE or may_be_deleted:
        return
    if not fired & (may_be | {last.value}):
        yield "A", f"{last.value!r} was acknowledged and never fired"


def _named(wish: Wish) -> str:
    return f"the {wish.kind} {wish.value!r}".rstrip("' ") + f" acknowledged at {_clock(wish.told_at_ms)}"


def _story(history: Sequence[Wish], seen: Sequence[Callback]) -> str:
    lines = [
        (
            wish.asked_at_ms,
            f"{_clock(wish.asked_at_ms)}–{_clock(wish.told_at_ms)}  {wish.kind} {wish.value}"
            + (f" due {_clock(wish.due_ms)}" if wish.kind is Kind.PUT else "")
            + f" -> {wish.result}",
        )
        for wish in history
    ]
    lines += [
        (
            call.started_at_ms,
            f"{_clock(call.started_at_ms)}–{_clock(call.seen_at_ms)}  fired {call.value}"
            f" attempt {call.attempt} fence {call.fence} {call.owner}".rstrip(),
        )
        for call in seen
    ]
    return "\n".join("    " + text for _, text in sorted(lines))


def _clock(milliseconds: int) -> str:
    return format_instant(milliseconds)[11:23]
