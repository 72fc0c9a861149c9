"""The client of the simulated cluster that creates timers with a schedule: some nobody touches again, others are
changed, paused, resumed, fired at once, deleted and replayed all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from duetime.domain.instants import format_instant
from duetime.domain.recurrence import SKIPPED_IF_LATE_BY_MS
from duetime.domain.timer import NOT_BY_OLDER_VERSIONS_MS, TimerPatch, TimerSpec
from duetime.domain.wall_clock import Schedule
from duetime.testing.checker import Kind, Result
from duetime.testing.occurrences import Pause, PauseRequest, Series
from duetime.testing.simulation.clients import DISCONNECTED, DISCONNECTED_MS, SimClient
from duetime.testing.simulation.network import value_of

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import SimulatedCluster

__all__ = ["ScheduleClient"]

_CATCH_UPS = ("one", "all", "skip")
_PERIODS_S = (1, 2, 5, 10)  # divisors of a minute
_SERIES_MAX = 8
_CHANGED = 3  # timers that are changed all the time
_SETTLED_SECONDS = 40  # then no request of unknown outcome is applied any more


class ScheduleClient(SimClient):
    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        super().__init__(cluster, name)
        self._paused_ms: dict[str, int] = {}  # by timer, since when a pause is acknowledged
        self._skipped: set[str] = set()  # timers with `catchUp: skip`

    async def create_series(self) -> None:
        """Timers that nobody touches again."""
        rng, cluster = self.cluster.rng, self.cluster
        for number in range(_SERIES_MAX):
            await asyncio.sleep(rng.expovariate(1.0 * cluster.settings.rate))
            if not cluster.faults_on:
                break
            await self._create_series(f"{self.name}-{number}")

    async def work(self) -> None:
        """Timers that are changed all the time."""
        rng, cluster = self.cluster.rng, self.cluster
        timers = [f"{self.name}-{number}" for number in range(_CHANGED)]
        while cluster.faults_on:
            await asyncio.sleep(rng.expovariate(6.0 * cluster.settings.rate))
            await self._change(rng.choice(timers))
        await self._resume_all(timers)

    def _schedule(self, catch_ups: Sequence[str] = ("one", "all")) -> tuple[Schedule, int, int, int]:
        """A schedule, its first occurrence, its period and its last one. A timer that is paused for more than a minute
        need not be called with `skip`, which the checker does not know: only timers that nobody pauses have it."""
        rng = self.cluster.rng
        period_s = rng.choice(_PERIODS_S)
        first_s = (self.cluster.now_ms() // 1_000 // period_s + rng.randint(0, 3)) * period_s
        last_s = first_s + period_s * rng.randint(0, max(1, 15 // period_s))
        schedule = Schedule(
            timezone=rng.choice(("UTC", "Asia/Kathmandu")),
            repeat=f"cron:*/{period_s} * * * * *" if rng.random() < 0.5 else f"rrule:FREQ=SECONDLY;INTERVAL={period_s}",
            catch_up=rng.choice(catch_ups),
        )
        offset_s = 0 if schedule.timezone == "UTC" else 20_700
        at, until = (format_instant((second + offset_s) * 1_000)[:19] for second in (first_s, last_s))
        schedule = Schedule(
            timezone=schedule.timezone, at=at, until=until, repeat=schedule.repeat, catch_up=schedule.catch_up
        )
        return schedule, first_s * 1_000, period_s * 1_000, last_s * 1_000

    async def _create_series(self, timer: str) -> None:
        schedule, first_ms, period_ms, last_ms = self._schedule(_CATCH_UPS)
        spec = self._spec_of(timer, schedule)
        sent_at_ms = self.cluster.now_ms()
        result, answer = await self._send(lambda service: service.create(spec))
        if schedule.catch_up == "skip":
            self._skipped.add(timer)
        self._record(timer, Kind.PUT, sent_at_ms, result, value_of(spec.payload), first_ms, repeats=True, answer=answer)
        if result is not Result.FAIL:
            created_ms = self.cluster.now_ms() if result is Result.OK else 0
            self.cluster.series.append(
                Series(self._name(timer), first_ms, period_ms, last_ms, schedule.catch_up or "one", created_ms)
            )

    def _skip_late_ms(self, timer: str) -> int:
        """With `catchUp: skip` an occurrence that is late by more is not called."""
        return SKIPPED_IF_LATE_BY_MS if timer in self._skipped else 0

    def _spec_of(self, timer: str, schedule: Schedule) -> TimerSpec:
        return TimerSpec(
            namespace=self.namespace,
            timer_id=timer,
            schedule=schedule,
            callback_url=self._random_url(),
            payload=self._new_value()[1],
        )

    # --- timers that are changed ------------------------------------------------------------------

    async def _change(self, timer: str) -> None:
        rng = self.cluster.rng
        dice = rng.random()
        paused_ms = self._paused_ms.get(timer)
        if paused_ms is not None and dice < 0.63:
            self.cluster.pauses.append(Pause(self._name(timer), paused_ms, self.cluster.now_ms()))
            del self._paused_ms[timer]
        if dice < 0.35:
            spec = self._spec_of(timer, self._schedule()[0])
            await self._send_put(timer, lambda service: service.create(spec), value_of(spec.payload))
        elif dice < 0.45:
            value, payload = self._new_value()
            schedule = self._schedule()[0] if rng.random() < 0.8 else None
            patch = TimerPatch(schedule=schedule, payload=payload, delay_ms=NOT_BY_OLDER_VERSIONS_MS)
            await self._send_put(timer, lambda service: service.update(self._key(timer), patch), value)
        elif dice < 0.52:
            await self.fire_now(timer)
        elif dice < 0.56:
            await self.replay(timer)
        elif dice < 0.63:
            await self._resume(timer)
        elif dice < 0.7:
            value, payload = self._new_value()
            at_ms = self.cluster.now_ms() + rng.randint(-200, 5_000)
            patch = TimerPatch(execute_at_ms=at_ms, payload=payload)
            await self._send_put(timer, lambda service: service.update(self._key(timer), patch), value)
        elif dice < 0.9:
            sent_ms = self.cluster.now_ms()
            result, answer = await self._send(lambda service: service.pause(self._key(timer)))
            if result is not Result.FAIL:
                until_ms = self.cluster.now_ms() + (DISCONNECTED_MS if answer is DISCONNECTED else 0)
                self.cluster.pause_requests.append(PauseRequest(self._name(timer), sent_ms, until_ms))
            if result is Result.OK:
                self._paused_ms.setdefault(timer, self.cluster.now_ms())
        else:
            await self.delete(timer)

    async def _send_put(self, timer: str, call: Any, value: str) -> None:
        """It is due at once at the earliest: when is checked with the timers that nobody changes."""
        sent_at_ms = self.cluster.now_ms()
        result, answer = await self._send(call)
        self._record(timer, Kind.PUT, sent_at_ms, result, value, 0, repeats=True, answer=answer)

    async def _resume(self, timer: str) -> bool:
        result, _ = await self._send(lambda service: service.resume(self._key(timer)))
        return result is not Result.INFO

    async def _resume_all(self, timers: list[str]) -> None:
        await asyncio.sleep(_SETTLED_SECONDS)
        for timer in timers:
            if timer in self._paused_ms:
                pause = Pause(self._name(timer), self._paused_ms.pop(timer), self.cluster.now_ms())
                self.cluster.pauses.append(pause)
            for _ in range(60):
                if await self._resume(timer):
                    break
                await asyncio.sleep(1)
