"""The checks of single fields: each returns the value as the domain has it, or raises an error that names the field."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from itertools import accumulate

from msgspec import UNSET, Raw, UnsetType

from duetime import wire
from duetime.config import Limits
from duetime.domain.headers import check_header_form
from duetime.domain.instants import format_duration, parse_duration, parse_instant
from duetime.domain.secrets import check_secrets
from duetime.domain.timer import DAY_MS, ID_BYTES_MAX, MINUTE_MS, Missed, RetryPolicy
from duetime.errors import InvalidField, TooLarge
from duetime.wire import URL_BYTES_MAX

TAGS_MAX = 20
TAG_BYTES_MAX = 64
YEAR_MS = 366 * DAY_MS


def checked_id(field: str, text: str, bytes_max: int = ID_BYTES_MAX) -> str:
    """A timer id, a name, a correlation id or a flow key. Its bytes are limited because databases limit them."""
    if not 1 <= len(text) <= bytes_max or (not text.isascii() and byte_length(field, text) > bytes_max):
        raise InvalidField(field, f"{field} must have 1 to {bytes_max} bytes")
    if "\0" in text:
        raise InvalidField(field, f"{field} must not contain NUL")
    return text


def checked_flow_key(text: str) -> str:
    check_not_url_with_query(text)
    return checked_id("flowKey", text)


def check_not_url_with_query(flow_key: str) -> None:
    """The flow of a URL is the URL without its query: with one it would be another flow than the one that is meant."""
    url, question_mark, _ = flow_key.partition("?")
    if question_mark and url[:8].lower().startswith(("http://", "https://")):
        raise InvalidField("flowKey", f"flowKey must not be a URL with a query: the flow of this URL is {url[:200]!r}")


def byte_length(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidField(field, f"{field} must not contain half of a surrogate pair") from None


def checked_instant(field: str, text: str) -> int:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise InvalidField(field, f"{field} {error}") from None


def checked_duration(field: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidField(field, f"{field} {error}") from None


def _bounded(field: str, text: str, least_ms: int, most_ms: int) -> int:
    milliseconds = checked_duration(field, text)
    if not least_ms <= milliseconds <= most_ms:
        raise InvalidField(field, f"{field} must be between {format_duration(least_ms)} and {format_duration(most_ms)}")
    return milliseconds


def checked_retention(field: str, text: str | UnsetType | None, default_ms: int) -> int | UnsetType:
    if text is None or text is UNSET:
        return default_ms if text is None else UNSET
    return _bounded(field, text, 0, 10 * YEAR_MS)


def checked_url(text: str) -> str:
    """Checks only the size. The deliverer checks whether the URL may be called."""
    size = len(text) if text.isascii() else byte_length("callbackUrl", text)
    if not 1 <= size <= URL_BYTES_MAX:
        raise InvalidField("callbackUrl", f"callbackUrl must have 1 to {URL_BYTES_MAX} bytes")
    return text


@lru_cache(maxsize=1_024)
def checked_retry_policy(given: wire.RetryPolicyJson) -> RetryPolicy:
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
def checked_missed(given: wire.MissedJson) -> Missed:
    skip, fail = given.skip_if_late_by, given.fail_if_late_by
    if (skip is None) == (fail is None):
        raise InvalidField("missed", "missed must have exactly one of skipIfLateBy and failIfLateBy")
    return Missed(
        skip_if_late_by_ms=None if skip is None else checked_duration("missed.skipIfLateBy", skip),
        fail_if_late_by_ms=None if fail is None else checked_duration("missed.failIfLateBy", fail),
    )


def checked_tags(tags: list[str]) -> tuple[str, ...]:
    if len(tags) > TAGS_MAX:
        raise InvalidField("tags", f"tags must have at most {TAGS_MAX} items")
    for tag in tags:
        if not 1 <= byte_length("tags", tag) <= TAG_BYTES_MAX or "\0" in tag:
            raise InvalidField("tags", f"tags must have 1 to {TAG_BYTES_MAX} bytes each and no NUL")
    return tuple(dict.fromkeys(tags))


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    try:
        check_header_form(headers)
    except ValueError as error:
        raise InvalidField("headers", f"headers {error}") from None
    return headers


def checked_secrets(secrets: list[str]) -> tuple[str, ...]:
    try:
        check_secrets(secrets)
    except ValueError as error:
        raise InvalidField("signingSecrets", f"signingSecrets {error}") from None
    return tuple(secrets)


# --- the payload ---------------------------------------------------------------------------------

# A number that a double cannot hold has at least 200 digits, or an exponent of at least three digits. The first two
# patterns find all such numbers, and some other text; only then are the strings removed and the numbers checked. All
# run in linear time.
_HUGE_EXPONENT = re.compile(rb"[eE][+]?0*[0-9]{3}")
_HUGE_NUMBER = re.compile(rb"(?<![0-9])[0-9]{200}")
_NOT_NUMBERS = bytes(byte if byte in b"0123456789+-.eE" else 0x20 for byte in range(256))
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_DEEPER_OR_LESS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: 1 and -1


def checked_payload(raw: Raw | bytes, limits: Limits) -> str | None:
    """The text of the payload, unchanged; None for null. The decoder of the request has checked that it is JSON."""
    payload = bytes(raw)
    if payload == b"null":
        return None
    if len(payload) > limits.payload_bytes_max:
        raise payload_too_large(len(payload), limits)
    if payload.count(b"[") + payload.count(b"{") > limits.json_depth_max and _deeper_than(
        limits.json_depth_max, payload
    ):
        raise InvalidField("payload", f"payload must be nested at most {limits.json_depth_max} deep")
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise InvalidField("payload", "payload is not UTF-8") from None
    if _HUGE_EXPONENT.search(payload) or (len(payload) >= 200 and _HUGE_NUMBER.search(payload)):
        for number in set(_JSON_STRING.sub(b" ", payload).translate(_NOT_NUMBERS).split()):
            if len(number) >= 5 and (len(number) >= 200 or _HUGE_EXPONENT.search(number)):
                _check_finite(number.decode())
    return text


def payload_too_large(size: int, limits: Limits) -> TooLarge:
    return TooLarge(f"payload must have at most {limits.payload_bytes_max} bytes, not {size}", field="payload")


def _deeper_than(depth_max: int, payload: bytes) -> bool:
    steps = _JSON_STRING.sub(b"", payload).translate(_ONE_DEEPER_OR_LESS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > depth_max


def _check_finite(number: str) -> None:
    if not math.isfinite(float(number)):
        shown = number if len(number) <= 20 else f"{number[:20]}…"
        raise InvalidField("payload", f"payload has the number {shown}, which a double cannot hold")
