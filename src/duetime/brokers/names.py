"""Names of subjects and topics: the place of the tenant in them, and which ones the timers of a namespace may target.

Pure. A name is made of tokens with dots between them. In a pattern of the configuration `{tenant}` is one token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from duetime.domain.timer import Namespace, Timer

__all__ = ["TENANT", "filled", "is_allowed", "is_token", "message_id", "tenant_of"]

TENANT = "{tenant}"
# A tenant that can be a token of a subject and a part of a topic: no dots, wildcards, spaces or control characters.
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_token(name: str) -> bool:
    return _TOKEN.fullmatch(name) is not None


def filled(pattern: str, tenant: str) -> str:
    """The name for this tenant. The caller has checked that the tenant is a token."""
    return pattern.replace(TENANT, tenant)


def tenant_of(pattern: str, name: str) -> str | None:
    """The token of the name at the place of `{tenant}` or `*` in the pattern. None: the pattern has no such place, or
    the name does not match."""
    tenant: str | None = None
    wanted, tokens = pattern.split("."), name.split(".")
    if len(wanted) != len(tokens):
        return None
    for want, token in zip(wanted, tokens, strict=True):
        if want in (TENANT, "*"):
            tenant = token
        elif want != token:
            return None
    return tenant


def is_allowed(patterns: Sequence[str], name: str, namespace: str) -> bool:
    """May timers of this namespace have this name as target? `*` stands for one token, `>` at the end for the rest."""
    return any(_matches(pattern.split("."), name.split("."), namespace) for pattern in patterns)


def _matches(wanted: list[str], tokens: list[str], namespace: str) -> bool:
    for index, want in enumerate(wanted):
        if want == ">":
            return len(tokens) > index
        if index >= len(tokens):
            return False
        if want == TENANT:
            if not is_token(namespace) or tokens[index] != namespace:
                return False
        elif want != "*" and want != tokens[index]:
            return False
    return len(wanted) == len(tokens)


def message_id(timer: Timer, namespace: Namespace) -> str:
    """The same for all attempts of one occurrence, so that a stream can drop what was published twice. It is the
    webhook-id and the time at which the namespace was created: a second database, whose timers may have the same ids,
    has another time there."""
    return f"{timer.delivery_id}.{namespace.created_at_ms:x}"
