"""PORT: how an instance hands a wish to the owner of its shard on another instance. One hop, never two.

A Forward names the version of the shard it is meant for, so that an ex-owner (or the owner after a
re-claim) refuses it, and carries an id of its own, so that one the network repeats happens once.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from duetime.domain.status import InstanceStatus
from duetime.domain.timer import Created, TimerKey, TimerPatch, TimerSpec, TimerView, Updated, Verdict
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
    "key_of",
    "payload_chars",
]


class CreateCommand(Struct, frozen=True, tag="create"):
    spec: TimerSpec


class UpdateCommand(Struct, frozen=True, tag="update"):
    key: TimerKey
    patch: TimerPatch


class DeleteCommand(Struct, frozen=True, tag="delete"):
    key: TimerKey


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


def payload_chars(command: Command) -> int:
    """How large an order is, as far as it is worth counting."""
    wish = (
        command.spec
        if isinstance(command, CreateCommand)
        else command.patch
        if isinstance(command, UpdateCommand)
        else None
    )
    payload = None if wish is None else wish.payload
    return len(payload) if isinstance(payload, str) else 0


class Forward(Struct, frozen=True, rename={"command_id": "order_id", "command": "order"}):
    """A command on its way to the owner of a shard. The encoded names are those of version 0.1."""

    command_id: str
    shard_id: int
    version: int
    command: Command


class Peer(Struct, frozen=True):
    """Another instance, as its member row describes it. `secret` is what it knows its peers by."""

    instance_id: str
    address: str
    secret: str


class Peers(Protocol):
    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        """The other instance's answer, or the error it raised. NotOwner: certainly not applied, the shard is
        not there. OutcomeUnknown: nobody knows whether it arrived."""
        ...

    async def status(self, peer: Peer) -> InstanceStatus:
        """How the other instance is doing; Unserved, with the reason, if it does not say."""
        ...

    async def close(self) -> None: ...


class NoPeers:
    """An instance that is alone."""

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        raise NotOwner

    async def status(self, peer: Peer) -> InstanceStatus:
        raise Unserved("this instance speaks to no other")

    async def close(self) -> None: ...
