"""Commands that other instances forward to this one, because it owns their shard. Each is carried out once.

The answer to a command is remembered under the command's id. A repeated command gets the remembered answer, also if
that was a refusal: it must not be carried out twice, and must not be carried out after it was refused.
"""

from __future__ import annotations

import asyncio

from duetime.cluster.forwarding import CommandAnswer, CreateCommand, Forward, payload_chars
from duetime.domain.timer import Created
from duetime.engine.pending_write import WriteResult
from duetime.engine.shard import Shard
from duetime.errors import DuetimeError, NotOwner, OutcomeUnknown
from duetime.service.commands import Commands, StartedCreate
from duetime.single_flight import retrieved

__all__ = ["ForwardedCommands"]

_REMEMBERED_MAX = 10_000
_REMEMBERED_CHARS_MAX = 16 * 1024 * 1024  # of the payloads of these commands
# Answers removed after each command: more than one, so that their number goes down; few, so that none takes long.
_REMOVED_AT_ONCE = 8


class ForwardedCommands:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        # By command id: the size of its payload, and its answer. The oldest first.
        self._remembered: dict[str, tuple[int, asyncio.Future[CommandAnswer]]] = {}
        self._remembered_chars = 0

    def receive(self, forward: Forward) -> asyncio.Future[CommandAnswer]:
        """Start a command, or return the answer to the same command received earlier.

        Several callers may wait for one answer: a caller that stops waiting must not cancel it.
        """
        remembered = self._remembered.get(forward.command_id)
        if remembered is not None:
            return remembered[1]
        answer = self._start(forward)
        answer.add_done_callback(retrieved)
        chars = payload_chars(forward.command)
        self._remembered[forward.command_id] = (chars, answer)
        self._remembered_chars += chars
        self._remove_oldest()
        return answer

    def answer_to(self, command_id: str) -> asyncio.Future[CommandAnswer]:
        """The answer to a command that was received earlier."""
        remembered = self._remembered.get(command_id)
        if remembered is not None:
            return remembered[1]
        answer: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        answer.set_exception(OutcomeUnknown("the answer to this command is no longer in memory"))
        return answer

    def _remove_oldest(self) -> None:
        """Remove the oldest answers above the limits. A command that is not decided yet will be asked for again by its
        id, so it is kept, and moved to the end."""
        for _ in range(_REMOVED_AT_ONCE):
            if len(self._remembered) <= _REMEMBERED_MAX and self._remembered_chars <= _REMEMBERED_CHARS_MAX:
                return
            oldest = next(iter(self._remembered))
            chars, answer = self._remembered.pop(oldest)
            if answer.done():
                self._remembered_chars -= chars
            else:
                self._remembered[oldest] = (chars, answer)

    def _start(self, forward: Forward) -> asyncio.Future[CommandAnswer]:
        """Most creates are started here, without a task for each. Any other command gets a task."""
        command, shard = forward.command, self._shard_of(forward)
        if shard is not None and isinstance(command, CreateCommand):
            try:
                started = self._commands.start_create(shard, command.spec)
            except DuetimeError:
                started = None  # the task raises the same error
            if started is not None:
                return self._answer_of(started)
        return asyncio.ensure_future(self._carry_out(forward))

    async def _carry_out(self, forward: Forward) -> CommandAnswer:
        shard = self._shard_of(forward)
        if shard is None:
            raise NotOwner
        return await self._commands.carry_out(shard, forward.command)

    def _shard_of(self, forward: Forward) -> Shard | None:
        """The shard of a command, if this instance still owns it in the version that the sender knows."""
        shard = self._commands.local_shard(forward.shard_id)
        return None if shard is None or shard.fence.version != forward.version else shard

    def _answer_of(self, started: StartedCreate) -> asyncio.Future[CommandAnswer]:
        """`finish_create` with callbacks instead of a task. It needs a task only if the namespace must be read."""
        answer: asyncio.Future[CommandAnswer] = started.writing.get_loop().create_future()

        def written(writing: asyncio.Future[WriteResult]) -> None:
            error = writing.exception()
            if error is not None:
                answer.set_exception(error)
            elif (created := self._commands.acknowledge(started.timer, writing.result()[1])) is not None:
                answer.set_result(created)
            else:
                asyncio.ensure_future(self._commands.finish_create(started)).add_done_callback(finished)

        def finished(finishing: asyncio.Future[Created]) -> None:
            error = finishing.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(finishing.result())

        started.writing.add_done_callback(written)
        return answer
