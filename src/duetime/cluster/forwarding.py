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
    "CreateOrder",
    "DeleteOrder",
    "FireNowOrder",
    "Forward",
    "NoPeers",
    "Order",
    "OrderAnswer",
    "Peer",
    "Peers",
    "ReplayOrder",
    "UpdateOrder",
    "key_of",
    "payload_chars",
]


class CreateOrder(Struct, frozen=True, tag="create"):
    spec: TimerSpec


class UpdateOrder(Struct, frozen=True, tag="update"):
    key: TimerKey
    patch: TimerPatch


class DeleteOrder(Struct, frozen=True, tag="delete"):
    key: TimerKey


class FireNowOrder(Struct, frozen=True, tag="fireNow"):
    key: TimerKey


class ReplayOrder(Struct, frozen=True, tag="replay"):
    key: TimerKey


Order = CreateOrder | UpdateOrder | DeleteOrder | FireNowOrder | ReplayOrder
OrderAnswer = Created | Updated | Verdict | TimerView


def key_of(order: Order) -> TimerKey:
    if isinstance(order, CreateOrder):
        return TimerKey(order.spec.namespace, order.spec.timer_id)
    return order.key


def payload_chars(order: Order) -> int:
    """How large an order is, as far as it is worth counting."""
    wish = order.spec if isinstance(order, CreateOrder) else order.patch if isinstance(order, UpdateOrder) else None
    payload = None if wish is None else wish.payload
    return len(payload) if isinstance(payload, str) else 0


class Forward(Struct, frozen=True):
    """An order on its way to the owner of a shard."""

    order_id: str
    shard_id: int
    version: int
    order: Order


class Peer(Struct, frozen=True):
    """Another instance, as its member row describes it. `secret` is what it knows its peers by."""

    instance_id: str
    address: str
    secret: str


class Peers(Protocol):
    async def forward(self, peer: Peer, forward: Forward) -> OrderAnswer:
        """The other instance's answer, or the error it raised. NotOwner: certainly not applied, the shard is
        not there. OutcomeUnknown: nobody knows whether it arrived."""
        ...

    async def status(self, peer: Peer) -> InstanceStatus:
        """How the other instance is doing; Unserved, with the reason, if it does not say."""
        ...

    async def close(self) -> None: ...


class NoPeers:
    """An instance that is alone."""

    async def forward(self, peer: Peer, forward: Forward) -> OrderAnswer:
        raise NotOwner

    async def status(self, peer: Peer) -> InstanceStatus:
        raise Unserved("this instance speaks to no other")

    async def close(self) -> None: ...
