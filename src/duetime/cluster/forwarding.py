"""PORT: what an instance asks of another one: above all to carry out a command for a shard that the other one owns.
One hop, never two.

A Forward names the version of the shard that its sender knows, so that a former owner, or an owner that has claimed the
shard again since, refuses it. It has an id, so that a command that the network repeats is carried out once.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, Struct

from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowStatus
from duetime.domain.status import InstanceStatus
from duetime.domain.timer import (
    NOT_BY_OLDER_VERSIONS_MS,
    CommandPosition,
    Created,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.errors import NotOwner, Unserved

__all__ = [
    "Command",
    "CommandAnswer",
    "CreateCommand",
    "DeleteCommand",
    "FireNowCommand",
    "Forward",
    "NoPeers",
    "Peer",
    "Peers",
    "ReplayCommand",
    "UpdateCommand",
    "is_for_newer_versions",
    "key_of",
    "payload_chars",
]


class CreateCommand(Struct, frozen=True, tag="create"):
    spec: TimerSpec


class UpdateCommand(Struct, frozen=True, tag="update"):
    key: TimerKey
    patch: TimerPatch


class DeleteCommand(Struct, frozen=True, tag="delete", omit_defaults=True):
    key: TimerKey
    command: CommandPosition | None = None
    if_stored: bool = False  # a timer that was never created is not found, also by the command of a broker


class FireNowCommand(Struct, frozen=True, tag="fireNow"):
    key: TimerKey


class ReplayCommand(Struct, frozen=True, tag="replay"):
    key: TimerKey


Command = CreateCommand | UpdateCommand | DeleteCommand | FireNowCommand | ReplayCommand
CommandAnswer = Created | Updated | Verdict | TimerView


def key_of(command: Command) -> TimerKey:
    if isinstance(command, CreateCommand):
        return TimerKey(command.spec.namespace, command.spec.timer_id)
    return command.key


def is_for_newer_versions(command: Command) -> bool:
    """Does it need a version that knows schedules and pauses? Others refuse it, because they find no valid time."""
    match command:
        case CreateCommand(spec):
            return spec.schedule is not None
        case UpdateCommand(_, patch):
            return patch.delay_ms == NOT_BY_OLDER_VERSIONS_MS
        case _:
            return False


def payload_chars(command: Command) -> int:
    """The size of a command. Everything but the payload is small and is not counted."""
    match command:
        case CreateCommand(spec):
            payload = spec.payload
        case UpdateCommand(_, patch):
            payload = None if patch.payload is UNSET else patch.payload
        case _:
            payload = None
    return 0 if payload is None else len(payload)


class Forward(Struct, frozen=True, rename={"command_id": "order_id", "command": "order"}):
    """A command that is sent to the owner of a shard. The encoded names are those of version 0.1."""

    command_id: str
    shard_id: int
    version: int
    command: Command


class Peer(Struct, frozen=True):
    """Another instance, as its member row describes it. Requests to it are signed with `secret`."""

    instance_id: str
    address: str
    secret: str


class Peers(Protocol):
    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        """The other instance's answer; raises the error that the other instance raised. NotOwner: certainly not
        applied, because that instance does not own the shard. OutcomeUnknown: it may have been applied."""
        ...

    async def status(self, peer: Peer) -> InstanceStatus:
        """The status of the other instance. Raises Unserved, with the reason, if it does not answer."""
        ...

    async def flows(self, peer: Peer, query: FlowQuery) -> list[FlowStatus]:
        """The flows that the other instance has in memory. Raises Unserved as `status`."""
        ...

    async def flow_allowances(self, peer: Peer, reports: list[FlowReport]) -> list[FlowAllowance]:
        """The allowance of this instance in each of these flows, whose home is the other instance. Raises Unserved if
        there is no answer, NotFound if the other instance is of a version that divides no limits."""
        ...

    async def close(self) -> None: ...


class NoPeers:
    """For an instance without peers."""

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        raise NotOwner

    async def status(self, peer: Peer) -> InstanceStatus:
        raise Unserved("this instance has no connections to other instances")

    async def flows(self, peer: Peer, query: FlowQuery) -> list[FlowStatus]:
        raise Unserved("this instance has no connections to other instances")

    async def flow_allowances(self, peer: Peer, reports: list[FlowReport]) -> list[FlowAllowance]:
        raise Unserved("this instance has no connections to other instances")

    async def close(self) -> None: ...
