"""How many bytes of answers that clients do not read a server holds at a time, over all connections.

If there are too many, the connection that waits longest is closed, of the tenant with most such bytes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duetime.http.server_connection import Connection

__all__ = ["UnreadAnswers"]

log = logging.getLogger("duetime.http")

LOG_EVERY_SWEEPS = 60


class UnreadAnswers:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        # The bytes of each connection. The one that waits longest is first.
        self.connections: dict[Connection, int] = {}
        self._logged_at = -LOG_EVERY_SWEEPS

    def add(self, connection: Connection, size: int, sweeps: int) -> None:
        """The client does not read this answer. `sweeps`: those of the server so far, which measure time."""
        self.remove(connection)
        self.connections[connection] = size
        self.bytes += size
        if self.bytes > self.bytes_max:
            self._close_slowest(sweeps)

    def remove(self, connection: Connection) -> None:
        """Its answer was read, or it was closed."""
        self.bytes -= self.connections.pop(connection, 0)

    def _close_slowest(self, sweeps: int) -> None:
        for connection in self.connections:  # a part may have been read meanwhile
            self.connections[connection] = connection.unsent_bytes()
        self.bytes = sum(self.connections.values())
        while self.bytes > self.bytes_max and len(self.connections) > 1:
            by_tenant: dict[str, int] = {}
            for connection, size in self.connections.items():
                by_tenant[connection.tenant] = by_tenant.get(connection.tenant, 0) + size
            most = max(by_tenant, key=by_tenant.__getitem__)
            slowest = next(connection for connection in self.connections if connection.tenant == most)
            if sweeps - self._logged_at >= LOG_EVERY_SWEEPS:
                self._logged_at = sweeps
                log.warning(
                    "closed a connection of %r: answers that clients do not read have more than %d bytes "
                    "(server.buffered_bytes_max)",
                    most,
                    self.bytes_max,
                )
            self.remove(slowest)
            slowest.abort_soon()
