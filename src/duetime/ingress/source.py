"""PORT: where commands come from that do not come by HTTP: the stream of a message broker.

An adapter (nats.py, kafka.py) receives messages and acknowledges them. It does not look into their bodies: `intake.py`
decodes them, carries the commands out, and says what becomes of each message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from duetime.brokers.envelopes import encode_dead_letter
from duetime.domain.timer import CommandPosition

__all__ = ["Backlog", "CommandSource", "Message", "Refusal", "dead_letter"]


class Message(Struct, frozen=True, eq=False):
    """A message with a command, as the broker has delivered it."""

    subject: str  # where it was published: the subject of NATS, the topic of Kafka
    tenant: str | None  # from the subject; None: the subject is the same for all tenants
    body: bytes
    position: CommandPosition
    deliveries: int  # how often it was delivered, this time included
    handle: Any  # what the adapter needs to acknowledge it


class Refusal(Struct, frozen=True):
    """Why a command can never succeed."""

    reason: str
    field: str | None
    command_id: str | None


class Backlog(Struct, frozen=True):
    """Of the stream, for all instances."""

    waiting: int  # commands that no instance has received
    unacknowledged: int | None = None  # received and not acknowledged, or waiting for a retry. None: not known
    remark: str | None = None  # what an operator should know, although it is no failure


def dead_letter(message: Message, refusal: Refusal, bytes_max: int) -> bytes:
    return encode_dead_letter(
        message.body,
        subject=message.subject,
        reason=refusal.reason,
        field=refusal.field,
        command_id=refusal.command_id,
        received_at_ms=message.position.at_ms,
        bytes_max=bytes_max,
    )


class CommandSource(Protocol):
    """Errors: BrokerAway if there is no connection; SetupError, which says what to do, if this instance can never read
    the commands (a stream is missing and must not be created, no permission)."""

    name: str  # of the broker: "nats", "kafka"

    async def open(self) -> None:
        """Connect, and create what is missing, if allowed. Called again after BrokerAway."""
        ...

    async def receive(self, limit: int, bytes_max: int) -> Sequence[Message]:
        """Messages that were not received before, or that are due for a retry: at most `limit`, with bodies of about
        `bytes_max` bytes. Waits about a second for the first one; without any it returns an empty list."""
        ...

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        """They are done, and will not be delivered again. If the acknowledgement is lost, they are delivered again."""
        ...

    async def retry(self, message: Message, delay_ms: int) -> None:
        """Deliver it again, to any instance, after this time."""
        ...

    def holds_others_up(self, message: Message) -> bool:
        """Is nothing more received, also of other tenants, before this command is done, which was retried for long?"""
        ...

    async def refuse(self, message: Message, refusal: Refusal) -> None:
        """Publish it as a dead letter, and acknowledge it once the broker has stored that."""
        ...

    async def extend(self, messages: Sequence[Message]) -> None:
        """They are still being worked on: the broker must not deliver them to another instance yet."""
        ...

    async def backlog(self) -> Backlog | None:
        """None: not known."""
        ...

    async def close(self) -> None: ...
