"""Duetime: a durable timer service. `from duetime import Client` is how a program talks to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duetime.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The clients, when asked for: whoever imports another part does not pay for them."""
    if name in ("AsyncClient", "Client"):
        from duetime import client

        return getattr(client, name)
    raise AttributeError(f"module 'duetime' has no attribute {name!r}")
