"""The headers of a timer: their form, and which ones an HTTP callback may have. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["HEADERS_BYTES_MAX", "HEADERS_MAX", "check_header_form", "check_http_headers", "is_header_value"]

HEADERS_MAX = 32
HEADERS_BYTES_MAX = 8 * 1024  # as they are sent: "name: value" and a line end each

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", re.ASCII)
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?", re.ASCII)

# Headers that Duetime sets in every callback, and `accept`, which the answer's format does not depend on.
_SET_BY_DUETIME = frozenset(
    {"accept", "accept-encoding", "content-length", "content-type", "host", "idempotency-key", "traceparent"}
    | {"user-agent"}
)
_DUETIME_PREFIXES = ("webhook-", "duetime-")
# Headers of one connection (hop by hop), and those that change how a message is read.
_CONNECTION_HEADERS = frozenset(
    {"connection", "content-encoding", "expect", "http2-settings", "keep-alive", "proxy-authenticate"}
    | {"proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


def check_header_form(headers: Mapping[str, str]) -> None:
    """Raise a ValueError for headers that no timer may have, whatever its target. Its text continues after the name of
    the field."""
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"must be at most {HEADERS_MAX}")
    if sum(len(name) + len(value) + 4 for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise ValueError(f"must have at most {HEADERS_BYTES_MAX} bytes together, with 4 bytes more for each header")
    seen: set[str] = set()
    for name, value in headers.items():
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"must not have the name {_shown(name)}: not a header name of 1 to 128 characters")
        lower = name.lower()
        if not is_header_value(value):
            raise ValueError(f'must have a value for "{name}" of visible ASCII, with spaces only inside it')
        if lower in seen:
            raise ValueError(f'must not have "{name}" twice; upper and lower case are the same')
        seen.add(lower)


def check_http_headers(headers: Mapping[str, str]) -> None:
    """The same for the headers of an HTTP callback."""
    check_header_form(headers)
    for name in headers:
        lower = name.lower()
        if lower in _CONNECTION_HEADERS:
            raise ValueError(f'must not have "{name}", which belongs to the connection')
        if lower in _SET_BY_DUETIME or lower.startswith(_DUETIME_PREFIXES):
            raise ValueError(f'must not have "{name}", which is reserved for Duetime')


def is_header_value(text: str) -> bool:
    """Visible ASCII, at least one character, with spaces only inside."""
    return _VALUE.fullmatch(text) is not None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:40] + "…")
