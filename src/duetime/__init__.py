"""Duetime: a durable timer service. A program uses it with `from duetime import Client`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duetime.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the clients when they are first used, so that importing another part of the package is fast."""
    if name in ("AsyncClient", "Client"):
        from duetime import client

        return getattr(client, name)
    raise AttributeError(f"module 'duetime' has no attribute {name!r}")
