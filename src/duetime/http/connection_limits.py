"""How many connections a server has, in all and from one address, and which one it closes when there are too many."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from duetime.http.server_connection import Connection

__all__ = ["HEALTH_CONNECTIONS_MAX", "ConnectionLimits", "address_of"]

# Connections above the limit, which may only ask for health.
HEALTH_CONNECTIONS_MAX: Final = 64


class ConnectionLimits:
    def __init__(self, connections_max: int) -> None:
        self.connections: set[Connection] = set()
        self.connections_max = connections_max
        self.per_address_max = 0  # 0: no limit
        # Connections without any admitted request, the oldest first: closed first when there are too many.
        self.strangers: dict[Connection, None] = {}
        # Connections above the limit, which may only ask for health, the oldest first.
        self.for_health: dict[Connection, None] = {}
        self._by_address: dict[str, int] = {}

    def add(self, connection: Connection) -> None:
        """Count a new connection. If there are too many, close one that is not used, or else let this one only ask for
        health."""
        address = connection.address
        from_address = self._by_address.get(address, 0)
        may_open = True
        if self.per_address_max and from_address >= self.per_address_max and address:
            may_open = self._close_unused(address)
        if may_open and len(self.connections) - len(self.for_health) >= self.connections_max:
            may_open = self._close_unused()
        self.connections.add(connection)
        self._by_address[address] = self._by_address.get(address, 0) + 1
        if may_open:
            self.strangers[connection] = None
            return
        connection.only_health = True
        if len(self.for_health) >= HEALTH_CONNECTIONS_MAX:
            next(iter(self.for_health)).evict()
        self.for_health[connection] = None

    def remove(self, connection: Connection) -> None:
        """Also called for one that was removed already."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        self.strangers.pop(connection, None)
        self.for_health.pop(connection, None)
        left = self._by_address[connection.address] - 1
        if left:
            self._by_address[connection.address] = left
        else:
            del self._by_address[connection.address]

    def _close_unused(self, address: str | None = None) -> bool:
        """Close a connection on which no request was admitted, the oldest, or else the one that is idle for longest.
        With an address: only one from there."""
        for connection in self.strangers:
            if not connection.busy and (address is None or connection.address == address):
                connection.evict()
                return True
        idle = self._idle_connections(address)
        longest = min(idle, key=lambda connection: connection.since, default=None)
        if longest is None:
            return False
        longest.evict()
        return True

    def _idle_connections(self, address: str | None) -> Iterable[Connection]:
        return (
            connection
            for connection in self.connections
            if connection.idle and not connection.only_health and (address is None or connection.address == address)
        )


def address_of(peer: tuple[Any, ...] | None) -> str:
    """The address whose connections are counted together: an IPv4 address, or the first half of an IPv6 address,
    because one client has all addresses of the other half. Loopback is "": a proxy, or a local program."""
    if not peer:
        return ""
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return str(peer[0])
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address.packed[:8] + bytes(8), 64)))
