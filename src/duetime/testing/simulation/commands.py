"""A message broker of the simulated cluster, and its consumer: commands with positions, which are delivered late,
several times, and out of order. A command that arrives after a later one was acknowledged must change nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from duetime.domain.timer import CommandPosition, Created, State, TimerSpec
from duetime.testing.checker import Kind, Result, Violation
from duetime.testing.simulation.clients import SimClient

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import SimulatedCluster

__all__ = ["CommandClient"]

_RECENT = 6  # commands of a timer that may be delivered again
_COMMANDS_PER_TIMER = 12


class _Command(Struct):
    """A command in the stream. `spec` is None: it cancels the timer."""

    timer: str
    position: CommandPosition
    spec: TimerSpec | None
    unknown: bool = False  # a delivery had an unknown outcome: it may have been carried out
    acknowledged: bool = False


class CommandClient(SimClient):
    """Publishes commands for timers of its own, which nobody else writes, and delivers them."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        super().__init__(cluster, name)
        self._sequence = 0
        self._commands: dict[str, list[_Command]] = {}
        self._acknowledged_until: dict[str, int] = {}  # by timer, the last sequence that was carried out

    async def work(self) -> None:
        rng, cluster = self.cluster.rng, self.cluster
        number = 0
        while cluster.faults_on:
            await asyncio.sleep(rng.expovariate(4.0 * cluster.settings.rate))
            timer = f"{self.name}-{number}"
            if len(self._commands.get(timer, ())) >= _COMMANDS_PER_TIMER:
                number += 1
            elif rng.random() < 0.5:
                await self._deliver(self._publish(timer))
            elif rng.random() < 0.3:
                self._publish(timer)  # delivered later, perhaps after its successors
            elif recent := self._commands.get(timer, [])[-_RECENT:]:
                await self._deliver(rng.choice(recent))

    def _publish(self, timer: str) -> _Command:
        rng = self.cluster.rng
        self._sequence += 1
        position = CommandPosition("commands", self._sequence, self.cluster.now_ms())
        spec, dice = None, rng.random()
        former = self._commands[timer][-1].spec if timer in self._commands else None
        if dice > 0.9 and former is not None:
            spec = replace(former, command=position)  # the publisher repeats it
        elif dice > 0.1:
            spec = self._spec(timer, self._random_url(), rng.randint(0, 15_000))
            spec = replace(spec, ignore_reached=True, command=position, flow_key=None, headers=None)
        command = _Command(timer, position, spec)
        self._commands.setdefault(timer, []).append(command)
        return command

    async def _deliver(self, command: _Command) -> None:
        timer, sequence = command.timer, command.position.sequence
        is_over = command.acknowledged or sequence < self._acknowledged_until.get(timer, 0)
        sent_at_ms, spec = self.cluster.now_ms(), command.spec
        if spec is not None:
            result, answer = await self._send(lambda service: service.create(spec))
        else:
            result, answer = await self._send(lambda service: service.delete(self._key(timer), command.position))
        existed = isinstance(answer, Created) and answer.existed
        if result is Result.OK:
            command.acknowledged = True
            self._acknowledged_until[timer] = max(sequence, self._acknowledged_until.get(timer, 0))
        if existed and answer.view.state not in (State.SCHEDULED, State.IN_FLIGHT):
            self._record(timer, Kind.OVER, sent_at_ms, result, answer=answer)
        if is_over:
            if result is Result.OK and not existed:
                what = f"command {sequence} was carried out although it or a later one had been acknowledged"
                self.cluster.violations.append(Violation("O", self._name(timer), what, ""))
            return
        if existed:
            result = Result.FAIL  # of the command that is stored, that of a later one, or of none: not carried out now
        if result is Result.FAIL and command.unknown:
            return  # this delivery has changed nothing, an earlier one may have
        command.unknown |= result is Result.INFO
        if spec is not None:
            self._record_put(spec, sent_at_ms, result, answer=answer)
        else:
            self._record(timer, Kind.DELETE, sent_at_ms, result, answer=answer)
