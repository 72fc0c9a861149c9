"""From bytes to the structs of `wire`: limits of size, and errors that name the wrong field."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from duetime import wire
from duetime.api.fields import payload_too_large
from duetime.config import Limits
from duetime.domain.flow_status import FlowState
from duetime.domain.json_kinds import described
from duetime.domain.timer import State
from duetime.errors import InvalidField, TooLarge

__all__ = ["STEP_BYTES", "WHOLE_BYTES_MAX", "Body", "check_large_body", "decoded", "decoded_whole"]

# Decoding blocks the event loop. A document of this size takes at most a few milliseconds, whatever it contains; what
# is larger is refused, or is decoded in parts. Only payloads make a valid request larger.
WHOLE_BYTES_MAX = 256 * 1024
STEP_BYTES = 32 * 1024  # of a longer document, handled between two pauses
_NAMED_SURROGATE_BYTES_MAX = 64 * 1024

S = TypeVar("S")
Body = bytes | bytearray | Raw


def decoded(decoder: msgspec.json.Decoder[S], body: Body) -> S:
    if len(body) > WHOLE_BYTES_MAX:
        raise TooLarge(f"the body must have at most {WHOLE_BYTES_MAX} bytes, not {len(body)}")
    return decoded_whole(decoder, body)


def check_large_body(body: Body, limits: Limits) -> None:
    """A request that may have a payload. Without it, it has at most WHOLE_BYTES_MAX: a map of headers or a list of tags
    must not be decoded first and found too long afterwards."""
    size = len(body)
    if size > limits.payload_bytes_max + WHOLE_BYTES_MAX:
        raise TooLarge(
            f"payload must have at most {limits.payload_bytes_max} bytes: the timer has {size}", field="payload"
        )
    payload = decoded_whole(_only_payload, body).payload
    payload_bytes = 0 if payload is UNSET else len(payload)
    if payload_bytes > limits.payload_bytes_max:
        raise payload_too_large(payload_bytes, limits)
    if size - payload_bytes > WHOLE_BYTES_MAX:
        raise TooLarge(f"a timer without its payload must have at most {WHOLE_BYTES_MAX} bytes")


class _OnlyPayload(msgspec.Struct):
    """Finds the payload without creating any object for the other fields."""

    payload: Raw | UnsetType = UNSET


_only_payload = msgspec.json.Decoder(_OnlyPayload)


def decoded_whole(decoder: msgspec.json.Decoder[S], body: Body) -> S:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _with_field(str(error), FlowState if decoder.type is wire.ListFlowsJson else State) from None
    except msgspec.DecodeError as error:
        raise _malformed(bytes(body), str(error)) from None
    except UnicodeDecodeError:
        raise InvalidField(None, "the body is not UTF-8") from None
    except RecursionError:
        raise InvalidField(None, "the body is nested too deeply") from None


_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def _with_field(message: str, states: type[State] | type[FlowState]) -> InvalidField:
    """msgspec's "Expected `int`, got `str` - at `$.retryPolicy.maxRetries`" as an error that names the field."""
    fault, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if match := _NAMED.fullmatch(fault):
        which, name = match.groups()
        field = f"{path}.{name}" if path else name
        if which == "missing required":
            return InvalidField(field, f"{field} is required")
        if field == "schedule":
            return InvalidField(field, "schedule is not supported by this version: use executeAt or delay")
        return InvalidField(field, f"{field} is not a field of this request")
    field, of_values, _ = path.partition("[...]")  # msgspec does not say which entry of a map is wrong
    subject = f"every value of {field}" if of_values else field or "the body"
    return InvalidField(field or None, f"{subject} {_described(fault, states)}")


def _described(fault: str, states: type[State] | type[FlowState]) -> str:
    if fault.startswith("Invalid enum value "):  # the only enum of a request is `state`
        return f"must be one of {', '.join(states)}, not {fault.removeprefix('Invalid enum value ')}"
    return described(fault)


_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u....)\\u[dD][c-fC-F]")


def _malformed(body: bytes, message: str) -> InvalidField:
    if len(body) <= STEP_BYTES and not body.strip():
        return InvalidField(None, "the body is empty: send a JSON object")
    if len(body) > _NAMED_SURROGATE_BYTES_MAX:  # to find the field takes too long
        field = "" if _LONE_SURROGATE.search(body) else None
    else:
        field = _field_with_lone_surrogate(body)
    if field is not None:
        return InvalidField(field or None, f"{field or 'the body'} must not contain half of a surrogate pair")
    return InvalidField(None, f"the body is not valid JSON: {message.removeprefix('JSON is malformed: ')}")


def _field_with_lone_surrogate(body: bytes) -> str | None:
    """The top-level field that contains half of a surrogate pair; "" if another place does, None if none does."""
    if re.search(rb"\\u[dD][89a-fA-F]", body) is None:
        return None
    try:
        # Objects as lists of pairs: if a name occurs twice, either of the two may be the wrong one.
        document = json.loads(body, object_pairs_hook=list)
        for name, value in document if body.lstrip().startswith(b"{") else ():
            if _has_surrogate(value):
                return str(name)
        return "" if _has_surrogate(document) else None
    except (ValueError, RecursionError):
        return None


def _has_surrogate(value: Any) -> bool:
    return re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)) is not None
