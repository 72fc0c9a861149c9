"""The client a command talks through, what is asked of it, and its results as JSON, in the names of the HTTP API."""

from __future__ import annotations

import sys
from argparse import Namespace as Arguments
from datetime import datetime
from typing import Any, TextIO

import msgspec

from duetime.client import AsyncClient, RetryPolicy
from duetime.domain.instants import format_instant

__all__ = ["client_of", "print_json", "retry_policy_of"]

RETRIES = 3  # a person is waiting


def client_of(arguments: Arguments) -> AsyncClient:
    return AsyncClient(arguments.url, arguments.token, timeout=arguments.timeout, retries=RETRIES)


def retry_policy_of(arguments: Arguments) -> RetryPolicy | None:
    given = {
        "max_retries": arguments.max_retries,
        "initial_interval": arguments.retry_from,
        "max_interval": arguments.retry_up_to,
        "max_duration": arguments.retry_for,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return RetryPolicy(**given) if given else None


def print_json(value: Any, *, file: TextIO | None = None) -> None:
    plain = _as_served(msgspec.to_builtins(value, builtin_types=(datetime,)))
    print(msgspec.json.encode(plain).decode(), file=file or sys.stdout)


def _as_served(value: Any) -> Any:
    """As the server writes it: instants in milliseconds, what has no value left out (a payload is the user's own)."""
    if isinstance(value, dict):
        return {k: v if k == "payload" else _as_served(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_as_served(item) for item in value]
    if isinstance(value, datetime):
        return format_instant(round(value.timestamp() * 1_000))
    return value
