"""Signing secrets of namespaces: their format, how they are shown, and what an update asks for. Pure.

A secret is `whsec_` and the base64 of 24 to 64 random bytes, as in Standard Webhooks. The functions that check raise a
ValueError whose text continues after the name of the field, and never shows a secret.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Sequence

__all__ = [
    "SECRETS_MAX",
    "SECRET_PREFIX",
    "check_secret",
    "check_secrets",
    "is_redacted_secret",
    "kept_secrets",
    "redacted_secret",
]

SECRETS_MAX = 5
SECRET_PREFIX = "whsec_"  # noqa: S105 (a prefix, not a password)
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64
_REDACTED = (SECRET_PREFIX + "…", SECRET_PREFIX + "...")


def check_secret(text: str) -> bytes:
    """The key in a secret."""
    if not text.startswith(SECRET_PREFIX):
        raise ValueError(f'must start with "{SECRET_PREFIX}"')
    try:
        key = b64decode(text.removeprefix(SECRET_PREFIX).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError(f'must be base64 after "{SECRET_PREFIX}"') from None
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"must hold {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes, not {len(key)}")
    return key


def check_secrets(given: Sequence[str]) -> None:
    """The secrets of a request: a few, each a secret or the redacted form of a stored one."""
    if len(given) > SECRETS_MAX:
        raise ValueError(f"must be at most {SECRETS_MAX}")
    for secret in given:
        if not is_redacted_secret(secret):
            check_secret(secret)


def redacted_secret(secret: str) -> str:
    """A secret as answers show it: enough to tell it from the others of its namespace, not enough to sign with."""
    return f"{SECRET_PREFIX}…{secret[-4:]}"


def is_redacted_secret(text: str) -> bool:
    return text.startswith(_REDACTED)


def kept_secrets(given: Sequence[str], stored: Sequence[str]) -> tuple[str, ...]:
    """The secrets that an update asks for. A redacted one means the stored secret that is shown so.

    So a namespace can be read, changed and sent back, and a secret replaced without knowing the old one.
    """
    secrets: list[str] = []
    for secret in given:
        if is_redacted_secret(secret):
            matching = [known for known in stored if redacted_secret(known)[-4:] == secret[-4:]]
            if len(matching) != 1:
                raise ValueError(f"has {secret!r}, which matches {len(matching)} of the stored secrets instead of one")
            secret = matching[0]
        if secret not in secrets:
            secrets.append(secret)
    return tuple(secrets)
