"""Requests: from the JSON of `wire.py` to the types of the domain.

A request is checked here completely before anything acts on it, and every error names the wrong field. The payload is
not decoded: it is checked as text and kept byte for byte, because its sender may have signed or hashed it, and because
decoding would change some numbers. Creates are the hot path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from duetime import wire
from duetime.config import Limits
from duetime.domain.headers import check_headers
from duetime.domain.instants import format_duration, parse_duration, parse_instant
from duetime.domain.secrets import check_secrets
from duetime.domain.timer import (
    DAY_MS,
    ID_BYTES_MAX,
    MINUTE_MS,
    Missed,
    Namespace,
    NamespaceSpec,
    RetryPolicy,
    State,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
)
from duetime.errors import InvalidField, TooLarge
from duetime.wire import URL_BYTES_MAX

TAGS_MAX = 20
TAG_BYTES_MAX = 64
YEAR_MS = 366 * DAY_MS

S = TypeVar("S")
T = TypeVar("T")
Body = bytes | bytearray | Raw

# --- requests ------------------------------------------------------------------------------------

_create = msgspec.json.Decoder(wire.CreateTimerJson)
_update = msgspec.json.Decoder(wire.UpdateTimerJson)
_timer_ref = msgspec.json.Decoder(wire.TimerRefJson)
_raw_timers = msgspec.json.Decoder(wire.RawTimersJson)
_list = msgspec.json.Decoder(wire.ListTimersJson)
_namespace_ref = msgspec.json.Decoder(wire.NamespaceRefJson)
_create_namespace = msgspec.json.Decoder(wire.CreateNamespaceJson)
_update_namespace = msgspec.json.Decoder(wire.UpdateNamespaceJson)


def decode_create(body: Body, limits: Limits) -> TimerSpec:
    given = _decoded(_create, body)
    namespace = checked_id("namespace", given.namespace)
    timer_id = checked_id("timerId", given.timer_id)
    execute_at_ms = delay_ms = None
    if given.execute_at is not None:
        if given.delay is not None:
            raise InvalidField("delay", "only one of delay and executeAt is allowed")
        execute_at_ms = _instant("executeAt", given.execute_at)
    elif given.delay is not None:
        delay_ms = _duration("delay", given.delay)
    else:
        raise InvalidField("executeAt", "executeAt or delay is required")
    return TimerSpec(
        namespace=namespace,
        timer_id=timer_id,
        execute_at_ms=execute_at_ms,
        delay_ms=delay_ms,
        callback_url=None if given.callback_url is None else _url(given.callback_url),
        payload=None if given.payload is UNSET else checked_payload(given.payload, limits),
        retry_policy=None if given.retry_policy is None else _retry_policy(given.retry_policy),
        callback_timeout_seconds=given.callback_timeout_seconds,
        correlation_id=None if given.correlation_id is None else checked_id("correlationId", given.correlation_id),
        headers=_headers(given.headers) if given.headers else None,
        tags=_tags(given.tags) if given.tags else (),
        missed=None if given.missed is None else _missed(given.missed),
        if_absent=given.if_absent,
    )


def decode_update(body: Body, limits: Limits) -> tuple[TimerKey, TimerPatch]:
    given = _decoded(_update, body)
    key = TimerKey(checked_id("namespace", given.namespace), checked_id("timerId", given.timer_id))
    if given.execute_at is not UNSET and given.delay is not UNSET:
        raise InvalidField("delay", "only one of delay and executeAt is allowed")
    patch = TimerPatch(
        execute_at_ms=UNSET if given.execute_at is UNSET else _instant("executeAt", given.execute_at),
        delay_ms=UNSET if given.delay is UNSET else _duration("delay", given.delay),
        callback_url=_if_given(given.callback_url, _url),
        payload=UNSET if given.payload is UNSET else checked_payload(given.payload, limits),
        retry_policy=_if_given(given.retry_policy, _retry_policy),
        callback_timeout_seconds=given.callback_timeout_seconds,
        correlation_id=_if_given(given.correlation_id, lambda text: checked_id("correlationId", text)),
        headers=_if_given(given.headers, _headers),
        tags=_if_given(given.tags, _tags),
        missed=_if_given(given.missed, _missed),
    )
    if patch == TimerPatch():
        raise InvalidField(None, "the update has no field to change")
    return key, patch


def _if_given(value: S | UnsetType | None, convert: Callable[[S], T]) -> T | UnsetType | None:
    return value if value is UNSET or value is None else convert(value)


def decode_timer_key(body: Body) -> TimerKey:
    given = _decoded(_timer_ref, body)
    return TimerKey(checked_id("namespace", given.namespace), checked_id("timerId", given.timer_id))


def decode_timers(body: Body, limits: Limits) -> list[Raw]:
    """The items of createMany and deleteMany, not decoded yet: a wrong item must not affect the others."""
    items = _decoded(_raw_timers, body).timers
    if len(items) > limits.batch_timers_max:
        raise InvalidField(
            "timers",
            f"timers must have at most {limits.batch_timers_max} items, not {len(items)}: send several requests",
        )
    return items


def decode_filter(body: Body, limits: Limits) -> TimerFilter:
    given = _decoded(_list, body)
    if given.limit > limits.page_timers_max:
        raise InvalidField("limit", f"limit must be at most {limits.page_timers_max}")
    for field, text in (("tag", given.tag), ("idPrefix", given.id_prefix), ("correlationId", given.correlation_id)):
        if text:
            checked_id(field, text)
    return TimerFilter(
        namespace=checked_id("namespace", given.namespace),
        state=given.state,
        due_from_ms=None if given.due_from is None else _instant("dueFrom", given.due_from),
        due_until_ms=None if given.due_until is None else _instant("dueUntil", given.due_until),
        tag=given.tag,
        id_prefix=given.id_prefix or None,
        correlation_id=given.correlation_id,
        limit=given.limit,
        cursor=given.cursor,
    )


def decode_namespace_name(body: Body) -> str:
    return checked_id("namespace", _decoded(_namespace_ref, body).namespace)


def decode_namespace_create(body: Body, limits: Limits) -> NamespaceSpec:
    given = _decoded(_create_namespace, body)
    return _namespace_spec(given, limits)


def decode_namespace_update(body: Body, limits: Limits) -> NamespaceSpec:
    given = _decoded(_update_namespace, body)
    if given.num_shards is not UNSET:
        raise InvalidField("numShards", "numShards never changes")
    return _namespace_spec(given, limits)


_NAMESPACE_DEFAULTS = Namespace(name="", num_shards=1, created_at_ms=0)


def _namespace_spec(given: wire.CreateNamespaceJson | wire.UpdateNamespaceJson, limits: Limits) -> NamespaceSpec:
    default = _NAMESPACE_DEFAULTS
    size = given.payload_bytes_max
    if size and size > limits.payload_bytes_max:
        raise InvalidField("payloadBytesMax", f"payloadBytesMax must be at most {limits.payload_bytes_max}")
    retry, timeout, secrets = given.retry_policy, given.callback_timeout_seconds, given.signing_secrets
    return NamespaceSpec(
        name=checked_id("namespace", given.namespace),
        num_shards=given.num_shards,
        callback_url=_if_given(given.callback_url, _url),
        retry_policy=default.retry_policy if retry is None else UNSET if retry is UNSET else _retry_policy(retry),
        callback_timeout_seconds=default.callback_timeout_seconds if timeout is None else timeout,
        require_ok=default.require_ok if given.require_ok is None else given.require_ok,
        delivered_retention_ms=_retention(
            "deliveredRetention", given.delivered_retention, default.delivered_retention_ms
        ),
        failed_retention_ms=_retention("failedRetention", given.failed_retention, default.failed_retention_ms),
        payload_bytes_max=size,
        signing_secrets=() if secrets is None else UNSET if secrets is UNSET else _secrets(secrets),
    )


def decode_nothing(body: Body) -> None:
    if body:
        _decoded(_nothing, body)


def decode_cluster_query(body: Body) -> wire.ClusterQueryJson:
    return _decoded(_cluster_query, body) if body else wire.ClusterQueryJson()


_nothing = msgspec.json.Decoder(wire.EmptyJson)
_cluster_query = msgspec.json.Decoder(wire.ClusterQueryJson)

# --- errors of requests --------------------------------------------------------------------------


def _decoded(decoder: msgspec.json.Decoder[S], body: Body) -> S:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _with_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(bytes(body), str(error)) from None
    except UnicodeDecodeError:
        raise InvalidField(None, "the body is not UTF-8") from None
    except RecursionError:
        raise InvalidField(None, "the body is nested too deeply") from None


_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def _with_field(message: str) -> InvalidField:
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
    return InvalidField(field or None, f"{subject} {_described(fault)}")


_EXPECTED = re.compile(r"Expected `([a-z |]+)`(?: ([<>]=) ([0-9.]+))?(?:, got `(\w+)`)?")
_KINDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_KINDS_FOUND = {**_KINDS, "int": "a number", "float": "a decimal number"}


def _described(fault: str) -> str:
    """msgspec names the types of Python; the sender of JSON knows them by other names."""
    if fault.startswith("Invalid enum value "):  # the only enum of a request is `state`
        return f"must be one of {', '.join(State)}, not {fault.removeprefix('Invalid enum value ')}"
    match = _EXPECTED.fullmatch(fault)
    if match is None:
        return f"is not valid: {fault}"
    kinds, relation, bound, found = match.groups()
    words = " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null")
    if relation is not None:
        return f"must be {words} of at {'least' if relation == '>=' else 'most'} {bound.removesuffix('.0')}"
    return f"must be {words}" + (f", not {_KINDS_FOUND.get(found, found)}" if found else "")


def _malformed(body: bytes, message: str) -> InvalidField:
    if not body.strip():
        return InvalidField(None, "the body is empty: send a JSON object")
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


# --- checks of single fields ---------------------------------------------------------------------


def checked_id(field: str, text: str) -> str:
    """A timer id, a name or a correlation id. Its bytes are limited because databases limit them."""
    if not 1 <= len(text) <= ID_BYTES_MAX or (not text.isascii() and _byte_length(field, text) > ID_BYTES_MAX):
        raise InvalidField(field, f"{field} must have 1 to {ID_BYTES_MAX} bytes")
    if "\0" in text:
        raise InvalidField(field, f"{field} must not contain NUL")
    return text


def _byte_length(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidField(field, f"{field} must not contain half of a surrogate pair") from None


def _instant(field: str, text: str) -> int:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise InvalidField(field, f"{field} {error}") from None


def _duration(field: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidField(field, f"{field} {error}") from None


def _bounded(field: str, text: str, least_ms: int, most_ms: int) -> int:
    milliseconds = _duration(field, text)
    if not least_ms <= milliseconds <= most_ms:
        raise InvalidField(field, f"{field} must be between {format_duration(least_ms)} and {format_duration(most_ms)}")
    return milliseconds


def _retention(field: str, text: str | UnsetType | None, default_ms: int) -> int | UnsetType:
    if text is None or text is UNSET:
        return default_ms if text is None else UNSET
    return _bounded(field, text, 0, 10 * YEAR_MS)


def _url(text: str) -> str:
    """Checks only the size. The deliverer checks whether the URL may be called."""
    if not 1 <= _byte_length("callbackUrl", text) <= URL_BYTES_MAX:
        raise InvalidField("callbackUrl", f"callbackUrl must have 1 to {URL_BYTES_MAX} bytes")
    return text


@lru_cache(maxsize=1_024)
def _retry_policy(given: wire.RetryPolicyJson) -> RetryPolicy:
    """Cached: most timers have one of a few policies, which then share one object."""
    initial_ms = _bounded("retryPolicy.initialInterval", given.initial_interval, 1, DAY_MS)
    if given.max_interval is None:
        max_interval_ms = max(10 * MINUTE_MS, initial_ms)
    else:
        max_interval_ms = _bounded("retryPolicy.maxInterval", given.max_interval, 1, YEAR_MS)
    if max_interval_ms < initial_ms:
        raise InvalidField("retryPolicy.maxInterval", "retryPolicy.maxInterval must not be less than initialInterval")
    return RetryPolicy(
        max_retries=given.max_retries,
        initial_interval_ms=initial_ms,
        backoff_multiplier=given.backoff_multiplier,
        max_interval_ms=max_interval_ms,
        max_duration_ms=_bounded("retryPolicy.maxDuration", given.max_duration, 1, YEAR_MS),
    )


@lru_cache(maxsize=1_024)
def _missed(given: wire.MissedJson) -> Missed:
    skip, fail = given.skip_if_late_by, given.fail_if_late_by
    if (skip is None) == (fail is None):
        raise InvalidField("missed", "missed must have exactly one of skipIfLateBy and failIfLateBy")
    return Missed(
        skip_if_late_by_ms=None if skip is None else _duration("missed.skipIfLateBy", skip),
        fail_if_late_by_ms=None if fail is None else _duration("missed.failIfLateBy", fail),
    )


def _tags(tags: list[str]) -> tuple[str, ...]:
    if len(tags) > TAGS_MAX:
        raise InvalidField("tags", f"tags must have at most {TAGS_MAX} items")
    for tag in tags:
        if not 1 <= _byte_length("tags", tag) <= TAG_BYTES_MAX or "\0" in tag:
            raise InvalidField("tags", f"tags must have 1 to {TAG_BYTES_MAX} bytes each and no NUL")
    return tuple(dict.fromkeys(tags))


def _headers(headers: dict[str, str]) -> dict[str, str]:
    try:
        check_headers(headers)
    except ValueError as error:
        raise InvalidField("headers", f"headers {error}") from None
    return headers


def _secrets(secrets: list[str]) -> tuple[str, ...]:
    try:
        check_secrets(secrets)
    except ValueError as error:
        raise InvalidField("signingSecrets", f"signingSecrets {error}") from None
    return tuple(secrets)


# --- the payload ---------------------------------------------------------------------------------

# A number that a double cannot hold has at least 200 digits, or an exponent of at least three digits. These patterns
# find all such numbers, and some other text; only then is the payload parsed. Both run in linear time.
_HUGE_EXPONENT = re.compile(rb"[eE][+]?0*[0-9]{3}")
_HUGE_NUMBER = re.compile(rb"(?<![0-9])[0-9]{200}")
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND_OF_BRACKETS = bytes.maketrans(b"{}", b"[]")


def checked_payload(raw: Raw | bytes, limits: Limits) -> str | None:
    """The text of the payload, unchanged; None for null. The decoder of the request has checked that it is JSON."""
    payload = bytes(raw)
    if payload == b"null":
        return None
    if len(payload) > limits.payload_bytes_max:
        raise TooLarge(
            f"payload must have at most {limits.payload_bytes_max} bytes, not {len(payload)}", field="payload"
        )
    if payload.count(b"[") + payload.count(b"{") > limits.json_depth_max and _deeper_than(
        limits.json_depth_max, payload
    ):
        raise InvalidField("payload", f"payload must be nested at most {limits.json_depth_max} deep")
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise InvalidField("payload", "payload is not UTF-8") from None
    if _HUGE_EXPONENT.search(payload) or (len(payload) >= 200 and _HUGE_NUMBER.search(payload)):
        json.loads(text, parse_int=_finite, parse_float=_finite)
    return text


def _deeper_than(depth_max: int, payload: bytes) -> bool:
    brackets = _JSON_STRING.sub(b"", payload).translate(_ONE_KIND_OF_BRACKETS, _NOT_BRACKETS)
    for _ in range(depth_max):
        if not brackets:
            return False
        # Removes the innermost level; the one around it becomes the innermost.
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _finite(number: str) -> None:
    if not math.isfinite(float(number)):
        shown = number if len(number) <= 20 else f"{number[:20]}…"
        raise InvalidField("payload", f"payload has the number {shown}, which a double cannot hold")
