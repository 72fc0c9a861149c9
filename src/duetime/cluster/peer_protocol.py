"""The messages between instances: commands and their answers as MessagePack, signed with HMAC.

A request names the instance that it is for, and is signed with that instance's secret, which is in its member row: only
who can read the database can send commands, and nothing has to be configured. An instance that has taken over the
address of another has a different id and secret, and refuses. Requests are numbered, so that a recorded request cannot
be sent again. The signature is that of the bytes of the body: it is verified before anything is decoded.

The answer is signed with the same secret, together with the signature of the request, so that it cannot be the answer
to another request (docs/adr/0029).

Structs are encoded as maps, so that a version can add fields and an older version ignores them.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from duetime import errors
from duetime.cluster.forwarding import CommandAnswer, Forward
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowStatus
from duetime.domain.status import InstanceStatus
from duetime.domain.timer import Created, TimerView, Updated, Verdict
from duetime.errors import DuetimeError, OutcomeUnknown

__all__ = [
    "ALLOWANCES_PATH",
    "ANSWER_SIGNATURE",
    "COMMANDS_PATH",
    "FLOWS_PATH",
    "FLOWS_PER_REQUEST_MAX",
    "FROM",
    "MSGPACK",
    "REFUSED",
    "SIGNATURE",
    "STATUS_PATH",
    "TO",
    "CommandBatch",
    "FlowAllowanceBatch",
    "FlowReportBatch",
    "FlowsRequest",
    "Reply",
    "ReplyBatch",
    "StatusRequest",
    "decode_commands",
    "decode_flow_allowances",
    "decode_flow_reports",
    "decode_flows",
    "decode_flows_request",
    "decode_replies",
    "decode_status",
    "decode_status_request",
    "encode",
    "is_signed",
    "new_secret",
    "read_reply",
    "reply_of",
    "sign",
    "sign_answer",
    "signs_answers",
    "uses_tls",
]

COMMANDS_PATH: Final = "/peer/v1/orders"
STATUS_PATH: Final = "/peer/v1/status"
FLOWS_PATH: Final = "/peer/v1/flows"
ALLOWANCES_PATH: Final = "/peer/v1/allowances"
FLOWS_PER_REQUEST_MAX: Final = 500  # the home decides on all of them without a pause
SIGNATURE: Final = "duetime-signature"
REFUSED: Final = (
    "duetime-refused"  # header of an answer: the instance refused the request before it carried out any of it
)
# The ids of sender and receiver, as in the body: for the log, before the body is decoded. Older versions do not send
# them.
FROM: Final = "duetime-from"
TO: Final = "duetime-to"
ANSWER_SIGNATURE: Final = "duetime-answer-signature"
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


class FlowsRequest(Struct, frozen=True):
    """A request for flows that the instance has in memory."""

    to: str
    sender: str
    number: int
    query: FlowQuery


class FlowReportBatch(Struct, frozen=True):
    """What an instance reports of flows to their home."""

    to: str
    sender: str
    number: int
    flows: Annotated[list[FlowReport], Meta(max_length=FLOWS_PER_REQUEST_MAX)]


class FlowAllowanceBatch(Struct, frozen=True):
    """One allowance for each report."""

    flows: list[FlowAllowance]


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
decode_flow_reports = msgspec.msgpack.Decoder(FlowReportBatch).decode
decode_flow_allowances = msgspec.msgpack.Decoder(FlowAllowanceBatch).decode
decode_replies = msgspec.msgpack.Decoder(ReplyBatch).decode
decode_status = msgspec.msgpack.Decoder(InstanceStatus).decode
decode_flows_request = msgspec.msgpack.Decoder(FlowsRequest).decode
decode_flows = msgspec.msgpack.Decoder(list[FlowStatus]).decode


# --- secrets and signatures ----------------------------------------------------------------------

# A secret begins with what its instance can do, and all of it is the key. So the sender of a request knows from the
# member row, which nobody on the network can change, what to expect. Secrets of older versions are hex digits only.
_SIGNS: Final = "signs."
_SIGNS_TLS: Final = "signs-tls."
_SLICE: Final = 256 * 1024  # hashed without a pause


def new_secret(random_bits: int, *, tls: bool) -> str:
    """The secret of an instance that signs its answers, and that is reached with https if `tls`."""
    return f"{_SIGNS_TLS if tls else _SIGNS}{random_bits:064x}"


def signs_answers(secret: str) -> bool:
    return secret.startswith((_SIGNS, _SIGNS_TLS))


def uses_tls(secret: str) -> bool:
    return secret.startswith(_SIGNS_TLS)


def sign(secret: str, body: bytes) -> str:
    return hmac.digest(secret.encode(), body, "sha256").hex()


async def is_signed(secret: str, body: bytes, signature: str) -> bool:
    """Is it the signature of this body? Anyone can send a large one: it is hashed in slices, with pauses."""
    if len(signature) != 64:
        return False
    if len(body) <= _SLICE:
        expected = sign(secret, body)
    else:
        mac = hmac.new(secret.encode(), digestmod="sha256")
        view = memoryview(body)
        for start in range(0, len(body), _SLICE):
            mac.update(view[start : start + _SLICE])
            await asyncio.sleep(0)
        expected = mac.hexdigest()
    return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))


def sign_answer(secret: str, request_signature: str, body: bytes) -> str:
    return hmac.digest(secret.encode(), b"answer\n%s\n%s" % (request_signature.encode(), body), "sha256").hex()


# --- replies -------------------------------------------------------------------------------------


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
