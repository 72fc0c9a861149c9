"""A strict parser for URLs to call, and the head of a request to one. Pure.

A URL that two parsers could read differently is refused, not corrected: the host that was checked must be the host that
is called. For the same reason international names are accepted only in their xn-- form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv6Address

from msgspec import Struct

from duetime.wire import URL_BYTES_MAX

__all__ = ["Target", "is_path", "parse_target", "request_head"]


class Target(Struct, frozen=True, gc=False):
    """A parsed URL. Callers keep it, so that a URL is not parsed for every call."""

    origin: str  # "scheme://host:port", lower case: URLs of one origin share connections
    tls: bool
    host: str  # lower case; an IPv6 address without brackets
    port: int
    host_header: str
    path: str  # with the query


_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<host>[a-z0-9._-]{1,254}))(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>[/?][!-~]*)?",
    re.ASCII | re.IGNORECASE,
)


def parse_target(url: str) -> Target:
    """Raises a ValueError whose text continues after the name of the field."""
    if len(url) > URL_BYTES_MAX:
        raise ValueError(f"must be at most {URL_BYTES_MAX} bytes long")
    match = _URL.fullmatch(url)
    if match is None or "#" in url:
        raise ValueError(_problem(url))
    scheme = match["scheme"].lower()
    tls = scheme == "https"
    host = _ipv6(match["v6"]) if match["v6"] else _host(match["host"].lower())
    default_port = 443 if tls else 80
    port = int(match["port"] or default_port)
    if not 1 <= port <= 65_535:
        raise ValueError("must have a port from 1 to 65535")
    path = match["path"] or "/"
    shown = f"[{host}]" if match["v6"] else host
    return Target(
        origin=f"{scheme}://{shown}:{port}",
        tls=tls,
        host=host,
        port=port,
        host_header=shown if port == default_port else f"{shown}:{port}",
        path=path if path[0] == "/" else "/" + path,
    )


def is_path(text: str) -> bool:
    """Is it a path with or without a query, as `parse_target` accepts it? In it nothing can end the first line of a
    request. Faster than a pattern: it is called for every callback."""
    return text.isascii() and text.isprintable() and " " not in text and "#" not in text and text[:1] == "/"


def _host(host: str) -> str:
    if not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise ValueError("must have a host whose labels have 1 to 63 characters each")
    return host


def _ipv6(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise ValueError("must have a valid IPv6 address between the brackets") from None


def _problem(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    if not url.isascii():
        return "must be ASCII; write an international host in its xn-- form and percent-encode the path"
    if any(character <= " " or character == "\x7f" for character in url):
        return "must not contain spaces or control characters"
    if not separator or scheme.lower() not in ("http", "https"):
        return "must be an absolute URL that starts with http:// or https://"
    if "@" in authority:
        return "must not contain a user name or password"
    if "#" in url:
        return "must not contain a fragment (#…)"
    if not authority or authority.startswith(":"):
        return "must have a host"
    return "must have a valid host name or address, and a port from 1 to 65535 if it has one"


_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_VALUE = re.compile(r"[\t -~]*", re.ASCII)


def request_head(method: str, target: Target, headers: Mapping[str, str]) -> bytes:
    """The start of a request. Only content-length is missing, which ends the headers: see `HttpClient.request`."""
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.host_header}\r\naccept-encoding: identity\r\n"]
    for name, value in headers.items():
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise ValueError(f"header {name!r} must have a valid name and a value of visible ASCII")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("ascii")
