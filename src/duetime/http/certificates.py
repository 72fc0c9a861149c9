"""When a certificate ends. The `ssl` module tells this only of a verified peer, so the file is read here."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["expires_at_ms"]

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_EXPLICIT_VERSION, _SEQUENCE, _UTC_TIME = 0xA0, 0x30, 0x17


def expires_at_ms(path: str) -> int | None:
    """The end of the first certificate in a PEM file, in milliseconds since 1970. None: the file cannot be read."""
    try:
        found = _PEM.search(Path(path).read_text("ascii"))
        return None if found is None else _end_of(base64.b64decode(found[1]))
    except (OSError, ValueError, IndexError):
        return None


def _end_of(certificate: bytes) -> int:
    """RFC 5280: certificate and its signed part, then version (optional), serial number, algorithm, issuer, validity:
    begin, end."""
    _, signed, _ = _element(certificate, 0)
    _, at, _ = _element(certificate, signed)
    tag, _, following = _element(certificate, at)
    at = following if tag == _EXPLICIT_VERSION else at
    for _ in range(3):
        _, _, at = _element(certificate, at)
    tag, begin, _ = _element(certificate, at)
    if tag != _SEQUENCE:
        raise ValueError("the certificate has no period of validity")
    _, _, end = _element(certificate, begin)
    tag, start, stop = _element(certificate, end)
    text = certificate[start:stop].decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if text < "5" else "19") + text
    return round(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp() * 1_000)


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """The tag of an element of DER, and where its content begins and ends."""
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(data[start : start + count], "big")
        start += count
    return tag, start, start + length
