"""The client a command talks through, and its results as JSON, in the names of the HTTP API."""

from __future__ import annotations

from argparse import Namespace as Arguments
from typing import Any

import msgspec

from duetime.client import AsyncClient

__all__ = ["client_of", "print_json"]

RETRIES = 3  # a person is waiting


def client_of(arguments: Arguments) -> AsyncClient:
    return AsyncClient(arguments.url, arguments.token, timeout=arguments.timeout, retries=RETRIES)


def print_json(value: Any) -> None:
    print(msgspec.json.encode(_without_none(msgspec.to_builtins(value))).decode())


def _without_none(value: Any) -> Any:
    """As the server writes it: what has no value is left out (but a payload is the user's own)."""
    if isinstance(value, dict):
        return {k: v if k == "payload" else _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
