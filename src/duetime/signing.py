"""Standard Webhooks signatures: Duetime signs every callback, receivers verify them.

`domain/secrets.py` describes secrets. The signed text is `id.timestamp.body`; the header `webhook-signature` has one
`v1,<base64 of HMAC-SHA256>` for each secret, so that a secret can be replaced while the old and the new one are valid.
"""

from __future__ import annotations

import binascii
import hmac
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache

from duetime.domain.secrets import SECRET_PREFIX, check_secret
from duetime.errors import SignatureError

__all__ = ["SignatureError", "check_secret", "new_secret", "sign", "verify"]


def new_secret() -> str:
    return SECRET_PREFIX + b64encode(os.urandom(32)).decode("ascii")


def sign(delivery_id: str, timestamp_s: int, body: bytes, keys: Sequence[bytes]) -> str:
    """The value of webhook-signature: a signature for each key (`check_secret` returns the key of a secret)."""
    signed = b"%s.%d.%s" % (delivery_id.encode("ascii"), timestamp_s, body)
    return " ".join([_signature(key, signed) for key in keys])


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str],
    *,
    now_s: float,
    tolerance_s: int = 300,
) -> str:
    """The webhook-id of a callback that was signed recently with one of the secrets; otherwise a SignatureError.

    Receivers use the id to find duplicates. Header names may have any case.
    """
    by_name = {name.lower(): value for name, value in headers.items()}
    delivery_id = _header(by_name, "webhook-id")
    timestamp = _header(by_name, "webhook-timestamp")
    signatures = _header(by_name, "webhook-signature")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise SignatureError("webhook-timestamp must be a number of seconds")
    if not secrets:
        raise ValueError("no secrets to verify with")
    age_s = now_s - int(timestamp)
    if age_s > tolerance_s:
        raise SignatureError(f"webhook-timestamp is {age_s:.0f} s old, at most {tolerance_s} s are accepted")
    if age_s < -tolerance_s:
        raise SignatureError(f"webhook-timestamp is {-age_s:.0f} s in the future: check the clock of this machine")
    # The text of the timestamp is signed, not its value: "007" and "7" are different.
    signed = b"%s.%s.%s" % (delivery_id.encode("utf-8", "replace"), timestamp.encode("ascii"), body)
    offered = [text.encode("utf-8", "replace") for text in signatures.split(" ") if text.startswith("v1,")]
    matched = False
    for secret in secrets:  # always all of them, so that the time taken reveals nothing
        expected = _signature(check_secret(secret), signed).encode("ascii")
        for signature in offered:
            matched |= hmac.compare_digest(expected, signature)
    if not matched:
        raise SignatureError(
            "no signature in webhook-signature matches" if offered else "webhook-signature has no v1 signature"
        )
    return delivery_id


def _header(by_name: Mapping[str, str], name: str) -> str:
    value = by_name.get(name)
    if not value:
        raise SignatureError(f"the header {name} is missing")
    return value


def _signature(key: bytes, signed: bytes) -> str:
    mac = _keyed(key).copy()
    mac.update(signed)
    return "v1," + binascii.b2a_base64(mac.digest(), newline=False).decode("ascii")


@lru_cache(1024)
def _keyed(key: bytes) -> hmac.HMAC:
    """HMAC initialized with the key: copying it costs a third less than initializing it again."""
    return hmac.new(key, digestmod="sha256")
