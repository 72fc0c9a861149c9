"""The messages: commands that come in (ScheduleTimer, CancelTimer), events that go out (DueTimeReached), and dead
letters: commands that can never succeed. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from hashlib import blake2b

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from duetime.domain.instants import EARLIEST_MS, LATEST_MS, format_instant, parse_instant
from duetime.domain.json_kinds import described
from duetime.domain.timer import ID_BYTES_MAX, Timer

__all__ = [
    "BadCommand",
    "CancelTimer",
    "ScheduleTimer",
    "decode_command",
    "encode_dead_letter",
    "encode_event",
    "event_id",
]


class ScheduleTimer(Struct, frozen=True):
    command_id: str
    tenant: str
    timer_id: str
    due_at_ms: int
    correlation_id: str | None


class CancelTimer(Struct, frozen=True):
    command_id: str
    tenant: str
    timer_id: str


class BadCommand(Exception):
    """A message that can never become a command. `field` is the path of the field at fault, `command_id` as far as it
    can be read."""

    def __init__(self, reason: str, field: str | None = None, command_id: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field
        self.command_id = command_id


# Unknown fields are ignored: an envelope may carry more for other readers.


class _Payload(Struct, rename="camel"):
    tenant_id: str
    service_call_id: str


class _SchedulePayload(_Payload):
    due_at: str


class _Envelope(Struct, rename="camel"):
    id: str
    type: str
    tenant_id: str
    timestamp_ms: int
    payload: Raw
    correlation_id: str | None = None


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_schedule = msgspec.json.Decoder(_SchedulePayload).decode
_decode_cancel = msgspec.json.Decoder(_Payload).decode


def decode_command(body: bytes, tenant: str | None) -> ScheduleTimer | CancelTimer:
    """`tenant`: the one of the message's subject. None: the subject is the same for all tenants."""
    try:
        envelope = _decode_envelope(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_as_expected(error, "", None) from None
    command_id = envelope.id
    _check_id("id", command_id, None)
    decode: Callable[[Raw], _Payload]
    if envelope.type == "ScheduleTimer":
        decode = _decode_schedule
    elif envelope.type == "CancelTimer":
        decode = _decode_cancel
    else:
        raise BadCommand("type must be ScheduleTimer or CancelTimer", "type", command_id)
    try:
        payload = decode(envelope.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_as_expected(error, "payload.", command_id) from None
    _check_id("tenantId", envelope.tenant_id, command_id)
    _check_id("payload.serviceCallId", payload.service_call_id, command_id)
    if tenant is not None and envelope.tenant_id != tenant:
        raise BadCommand("tenantId is not the tenant of the subject", "tenantId", command_id)
    if payload.tenant_id != envelope.tenant_id:
        raise BadCommand("payload.tenantId is not the same as tenantId", "payload.tenantId", command_id)
    if envelope.correlation_id is not None:
        _check_id("correlationId", envelope.correlation_id, command_id)
    if not isinstance(payload, _SchedulePayload):
        return CancelTimer(command_id, envelope.tenant_id, payload.service_call_id)
    try:
        due_at_ms = parse_instant(payload.due_at)
    except ValueError as error:
        raise BadCommand(f"payload.dueAt {error}", "payload.dueAt", command_id) from None
    return ScheduleTimer(command_id, envelope.tenant_id, payload.service_call_id, due_at_ms, envelope.correlation_id)


def _not_as_expected(error: Exception, prefix: str, command_id: str | None) -> BadCommand:
    if not isinstance(error, msgspec.ValidationError):
        return BadCommand("the message is not JSON", prefix.rstrip(".") or None, command_id)
    # "Object missing required field `dueAt` - at `$.payload`", "Expected `str`, got `int` - at `$.id`"
    what, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if what.startswith("Object missing required field"):
        missing = what.split("`")[1]
        field = f"{field}.{missing}" if field else missing
        return BadCommand(f"{prefix}{field} is required", prefix + field, command_id)
    named = (prefix + field).rstrip(".") or None
    return BadCommand(f"{named or 'the message'} {described(what)}", named, command_id)


def _check_id(field: str, value: str, command_id: str | None) -> None:
    if not 1 <= len(value.encode()) <= ID_BYTES_MAX or "\0" in value:
        raise BadCommand(f"{field} must have 1 to {ID_BYTES_MAX} bytes and no NUL", field, command_id)


# --- events --------------------------------------------------------------------------------------

_EVENT_KIND = "DueTimeReached"
_encode = msgspec.json.Encoder().encode


def event_id(timer: Timer, message_id: str) -> str:
    """A UUID version 7, computed from the message id: the same for all attempts. Its time is the due time."""
    digest = bytearray(blake2b(message_id.encode(), digest_size=16).digest())
    digest[:6] = min(timer.scheduled_at_ms, 2**48 - 1).to_bytes(6, "big")
    digest[6] = 0x70 | (digest[6] & 0x0F)
    digest[8] = 0x80 | (digest[8] & 0x3F)
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def encode_event(timer: Timer, message_id: str, reached_at_ms: int) -> bytes:
    """`data` is there only for timers with a payload, which no command makes: the payload, byte for byte."""
    correlation = "" if timer.correlation_id is None else f'"correlationId":{_json(timer.correlation_id)},'
    data = "" if timer.payload is None else f',"data":{timer.payload}'
    tenant = _json(timer.namespace)
    return (
        f'{{"id":"{event_id(timer, message_id)}","type":"{_EVENT_KIND}","tenantId":{tenant},{correlation}'
        f'"timestampMs":{reached_at_ms},"payload":{{"tenantId":{tenant},"serviceCallId":{_json(timer.timer_id)},'
        f'"reachedAt":"{format_instant(reached_at_ms)}"{data}}}}}'
    ).encode()


def _json(text: str) -> str:
    return _encode(text).decode()


# --- dead letters --------------------------------------------------------------------------------


class _DeadLetter(Struct, rename="camel", kw_only=True):
    reason: str
    field: str | UnsetType
    command_id: str | UnsetType
    subject: str
    received_at: str | UnsetType
    body: str | UnsetType = UNSET
    body_base64: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET


def encode_dead_letter(
    body: bytes,
    *,
    subject: str,
    reason: str,
    field: str | None = None,
    command_id: str | None = None,
    received_at_ms: int | None = None,
    bytes_max: int,
) -> bytes:
    """A command that can never succeed, with the reason. `body` is the message as text if it is UTF-8, else it is in
    `bodyBase64`. `bytes_max`: of the whole, as much as the broker takes: of a message that is larger in this form,
    `bodyBase64` is the first part and `truncated` is true, because a command is not removed before its dead letter is
    stored."""
    letter = _DeadLetter(
        reason=reason,
        field=UNSET if field is None else field,
        command_id=UNSET if command_id is None else command_id,
        subject=subject,
        # In Kafka publishers set the time of a record, to any number.
        received_at=UNSET
        if received_at_ms is None or not EARLIEST_MS <= received_at_ms < LATEST_MS
        else format_instant(received_at_ms),
    )
    try:
        letter.body = body.decode()
    except UnicodeDecodeError:
        letter.body_base64 = b64encode(body).decode()
    encoded = _encode(letter)
    if len(encoded) <= bytes_max:
        return encoded
    letter.body, letter.body_base64, letter.truncated = UNSET, "", True
    room = max(bytes_max - len(_encode(letter)), 0)
    letter.body_base64 = b64encode(body[: room // 4 * 3]).decode()
    return _encode(letter)
