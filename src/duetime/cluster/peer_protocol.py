"""The messages between instances: commands and their answers as MessagePack, signed with HMAC.

A request names the instance that it is for, and is signed with that instance's secret, which is in its member row: only
who can read the database can send commands, and nothing has to be configured. An instance that has taken over the
address of another has a different id and secret, and refuses. Requests are numbered, so that a recorded request cannot
be sent again.

Structs are encoded as maps, so that a version can add fields and an older version ignores them.
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec
from msgspec import Struct

from duetime import errors
from duetime.cluster.forwarding import CommandAnswer, Forward
from duetime.domain.status import InstanceStatus
from duetime.domain.timer import Created, TimerView, Updated, Verdict
from duetime.errors import DuetimeError, OutcomeUnknown

__all__ = [
    "COMMANDS_PATH",
    "MSGPACK",
    "REFUSED",
    "SIGNATURE",
    "STATUS_PATH",
    "CommandBatch",
    "Reply",
    "ReplyBatch",
    "StatusRequest",
    "decode_commands",
    "decode_replies",
    "decode_status",
    "decode_status_request",
    "encode",
    "read_reply",
    "reply_of",
    "sign",
]

COMMANDS_PATH: Final = "/peer/v1/orders"
STATUS_PATH: Final = "/peer/v1/status"
SIGNATURE: Final = "duetime-signature"
REFUSED: Final = (
    "duetime-refused"  # header of an answer: the instance refused the request before it carried out any of it
)
MSGPACK: Final = b"application/msgpack"


class CommandBatch(Struct, frozen=True):
    """A request: new commands, and the ids of commands that were sent earlier and are not answered yet."""

    to: str
    sender: str
    number: int
    new: list[Forward]
    again: list[str] = []


class StatusRequest(Struct, frozen=True):
    """A request for the status of the instance."""

    to: str
    sender: str
    number: int


class Reply(Struct, frozen=True, omit_defaults=True):
    """The answer to one command: one of these is set. None is set: not decided yet, ask again by its id."""

    created: Created | None = None
    updated: Updated | None = None
    verdict: Verdict | None = None
    view: TimerView | None = None
    error: str | None = None  # the name of its class
    detail: str = ""
    field: str | None = None
    code: str = ""


class ReplyBatch(Struct, frozen=True):
    """One reply for each of `new`, then one for each of `again`."""

    replies: list[Reply]


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(CommandBatch).decode
decode_status_request = msgspec.msgpack.Decoder(StatusRequest).decode
decode_replies = msgspec.msgpack.Decoder(ReplyBatch).decode
decode_status = msgspec.msgpack.Decoder(InstanceStatus).decode


def sign(secret: str, body: bytes) -> str:
    return hmac.digest(secret.encode(), body, "sha256").hex()


def reply_of(answer: CommandAnswer | DuetimeError) -> Reply:
    match answer:
        case Created():
            return Reply(created=answer)
        case Updated():
            return Reply(updated=answer)
        case Verdict():
            return Reply(verdict=answer)
        case TimerView():
            return Reply(view=answer)
        case DuetimeError():
            return Reply(error=_name_of(answer), detail=answer.detail, field=answer.field, code=answer.code)


_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DuetimeError)
}


def _name_of(error: DuetimeError) -> str:
    """The name of its class, or of the nearest base class in errors.py: the receiver knows no others, and would take an
    adapter's own subclass of StoreUnavailable, which was not applied, for an unknown outcome."""
    return next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)


def read_reply(reply: Reply) -> CommandAnswer | None:
    """The answer, or None if the command is not decided yet. Raises the error if that was the answer."""
    if reply.error is not None:
        raise _error_of(reply, reply.error)
    return reply.created or reply.updated or reply.verdict or reply.view


def _error_of(reply: Reply, name: str) -> DuetimeError:
    kind = _ERRORS.get(name)
    if kind is None:  # an error of a newer version, which this one does not know
        return OutcomeUnknown(reply.detail)
    error = kind.__new__(kind)
    DuetimeError.__init__(error, reply.detail, field=reply.field, code=reply.code or None)
    return error
