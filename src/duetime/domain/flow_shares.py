"""How the limits of one flow are divided among the instances: the decisions of its home. Pure.

An instance that has timers waiting or calls in flight in a limited flow reports this to the home of the flow, again and
again, together with the allowance that it goes by. The answer is its new allowance.

Reports and answers get lost. Until the next report of an instance arrives, it goes by the allowance in its last report
or by the answer to that report, and it may have as many calls in flight as the larger one of them allows, or as it
reported. The home counts the largest of the three as taken. An answer raises an allowance only by what is not taken:
so what is taken never exceeds the limit, whatever gets lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

__all__ = ["ALLOWANCE_MS", "UNSEEN_CALLS_MS", "FlowAllowance", "FlowReport", "FlowShare", "divided", "divided_rate"]

# An instance starts no call under an allowance that it asked for longer ago than this. The home counts from the arrival
# of the report, which is later.
ALLOWANCE_MS = 3_000
# Calls of an instance that is alive and does not report are counted for so long: as long as most callbacks take.
UNSEEN_CALLS_MS = 10_000
_TURN_MS = 1_000  # an instance that had its turn for so long lets another one have it
_COOLING_MAX = 64  # with more entries they become one, the latest of them
_RATE_PART_MIN = 0.01  # of the limit: less is nothing, or the first call under it would be set hours ahead


class FlowReport(
    Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    rename={"namespace": "n", "flow_key": "k", "waiting": "w", "in_flight": "f", "rate": "r", "concurrency": "c"},
):
    """One flow on one instance. `rate` and `concurrency` are the allowance that it goes by. All zero: it has nothing to
    do in this flow, and gives its allowance back."""

    namespace: str
    flow_key: str
    waiting: int = 0
    in_flight: int = 0
    rate: float = 0.0
    concurrency: int = 0


class FlowAllowance(
    Struct, frozen=True, gc=False, omit_defaults=True, rename={"rate": "r", "concurrency": "c", "undecided": "u"}
):
    """What one instance may use of the limits of a flow. None: there is no such limit."""

    rate: float | None = 0.0
    concurrency: int | None = 0
    undecided: bool = False  # the instance asked is not the home, or not yet: the allowance before stays as it is


class _Holder:
    """One instance, as its last report and the answer to it say."""

    __slots__ = ("granted", "granted_rate", "rank", "report", "seen_ms", "silent", "turn_since_ms")

    def __init__(self, report: FlowReport, now_ms: int, rank: int) -> None:
        self.report = report
        self.granted = 0
        self.granted_rate = 0.0
        self.seen_ms = now_ms
        self.rank = rank  # those with the lowest ranks have their turn
        self.turn_since_ms = now_ms
        self.silent = False

    @property
    def wanted(self) -> int:
        return 0 if self.silent else self.report.waiting + self.report.in_flight

    @property
    def taken(self) -> int:
        return max(self.report.in_flight, self.report.concurrency, self.granted)

    @property
    def taken_rate(self) -> float:
        return 0.0 if self.silent else max(self.report.rate, self.granted_rate)


class FlowShare:
    """One limited flow at its home."""

    __slots__ = ("_cooling", "_holders", "_rank")

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._cooling: list[tuple[float, int]] = []  # rates that were given back, and until when they count as taken
        self._rank = 0

    def report(
        self,
        instance: str,
        report: FlowReport,
        rate: float | None,
        concurrency: int | None,
        now_ms: int,
        *,
        may_raise: bool = True,
    ) -> FlowAllowance:
        """The allowance of this instance, of the limits `rate` and `concurrency` of the whole cluster. Without
        `may_raise` it is at most what the instance goes by already: a new home has to hear of all others first."""
        self._expire(now_ms)
        holder = self._update(instance, report, now_ms)
        if not (report.waiting or report.in_flight or report.concurrency or report.rate):
            del self._holders[instance]
            return FlowAllowance()
        allowance = FlowAllowance(
            None if rate is None else self._rate(holder, rate, may_raise),
            None if concurrency is None else self._concurrency(holder, concurrency, now_ms, may_raise),
        )
        holder.granted_rate = allowance.rate or 0.0
        holder.granted = allowance.concurrency or 0
        return allowance

    def keep_only(self, members: Iterable[str], now_ms: int) -> None:
        """Forget the members that are not alive: they start nothing more."""
        for gone in self._holders.keys() - set(members):
            self._cool(self._holders.pop(gone).taken_rate, now_ms)

    def is_over(self, now_ms: int) -> bool:
        """Is nothing left to be remembered?"""
        self._expire(now_ms)
        return not self._holders and not self._cooling

    def _update(self, instance: str, report: FlowReport, now_ms: int) -> _Holder:
        holder = self._holders.get(instance)
        if holder is None:
            self._rank += 1
            holder = self._holders[instance] = _Holder(report, now_ms, self._rank)
            return holder
        if not holder.wanted:  # it has been idle: its turn comes after that of those who wait
            holder.rank = self._next_rank()
        self._cool(holder.taken_rate - report.rate, now_ms, of=holder.taken_rate)
        holder.report, holder.seen_ms, holder.silent = report, now_ms, False
        holder.granted, holder.granted_rate = 0, 0.0
        return holder

    def _next_rank(self) -> int:
        self._rank += 1
        return self._rank

    def _cool(self, rate: float, now_ms: int, of: float = 0.0) -> None:
        """A part of a rate was given back. The last call under it may have been started just now, and takes up the rate
        until the next one would be allowed."""
        if rate > 0:
            self._cooling.append((rate, now_ms + int(1_000 / (of or rate))))
        if len(self._cooling) > _COOLING_MAX:
            rates, untils_ms = zip(*self._cooling, strict=True)
            self._cooling = [(sum(rates), max(untils_ms))]

    def _expire(self, now_ms: int) -> None:
        for instance, holder in list(self._holders.items()):
            silent_ms = now_ms - holder.seen_ms
            if silent_ms > ALLOWANCE_MS and not holder.silent:
                self._cool(holder.taken_rate, holder.seen_ms + ALLOWANCE_MS)
                holder.silent = True
            if silent_ms > UNSEEN_CALLS_MS or (holder.silent and not holder.taken):
                del self._holders[instance]
        if self._cooling:
            self._cooling = [(rate, until_ms) for rate, until_ms in self._cooling if until_ms > now_ms]

    # --- the parts --------------------------------------------------------------------------------

    def _concurrency(self, holder: _Holder, limit: int, now_ms: int, may_raise: bool) -> int:
        free = limit - sum(other.taken for other in self._holders.values() if other is not holder)
        if not may_raise:
            return max(0, min(free, holder.report.concurrency))
        wanting = sorted((h for h in self._holders.values() if h.wanted), key=lambda h: h.rank)
        has_had_turn = holder.report.concurrency and now_ms - holder.turn_since_ms >= _TURN_MS
        if has_had_turn and len(wanting) > limit and holder in wanting[:limit]:
            holder.rank = self._next_rank()
            wanting.remove(holder)
            wanting.append(holder)
        shown = wanting + [h for h in self._holders.values() if not h.wanted and not h.silent]
        parts = divided(limit, [h.wanted for h in shown])
        part = max(0, min(free, parts[shown.index(holder)]))
        if part and not holder.report.concurrency:
            holder.turn_since_ms = now_ms
        return part

    def _rate(self, holder: _Holder, limit: float, may_raise: bool) -> float:
        free = limit - sum(other.taken_rate for other in self._holders.values() if other is not holder)
        free -= sum(rate for rate, _ in self._cooling)
        if not may_raise:
            return max(0.0, min(free, holder.report.rate))
        shown = [h for h in self._holders.values() if not h.silent]
        parts = divided_rate(limit, [float(h.report.waiting) for h in shown])
        part = min(free, parts[shown.index(holder)])
        return part if part >= limit * _RATE_PART_MIN else 0.0


def divided(limit: int, wanted: Sequence[int]) -> list[int]:
    """The parts of a limit. One each first, to those in front; then the small demands are met, and those who want more
    get equal parts; what nobody wants is spread evenly."""
    parts = [0] * len(wanted)
    order = [index for index, want in enumerate(wanted) if want]
    for index in order[:limit]:
        parts[index] = 1
    rest = limit - min(limit, len(order))
    for left, index in zip(range(len(order), 0, -1), sorted(order, key=lambda i: wanted[i]), strict=True):
        more = min(wanted[index] - 1, rest // left)
        parts[index] += more
        rest -= more
    if parts:
        share, extra = divmod(rest, len(parts))
        parts = [part + share + (index < extra) for index, part in enumerate(parts)]
    return parts


def divided_rate(limit: float, wanted: Sequence[float]) -> list[float]:
    """As `divided`, of a rate: no part has to be whole."""
    parts = [0.0] * len(wanted)
    rest = limit
    for left, index in zip(range(len(wanted), 0, -1), sorted(range(len(wanted)), key=lambda i: wanted[i]), strict=True):
        parts[index] = min(wanted[index], rest / left)
        rest -= parts[index]
    return [part + rest / len(parts) for part in parts]
