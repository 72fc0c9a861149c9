"""PostgresStore: one database for any number of instances.

Every call is one statement in one round trip, and every write carries its fence in it. statements.py and
listing.py are what is said to the database, rows.py what its rows are, connection.py the connections
and their errors, schema.py the tables; sql_store.py says which session does what.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.postgres import connection, listing, schema, statements
from duetime.stores.sql_store import SqlStore

__all__ = ["PostgresStore", "wipe"]


class PostgresStore(SqlStore):
    # One lane: measured, one big commit at a time costs an instance less than several smaller ones.
    capabilities = Capabilities(
        name="postgresql", batch_max=2_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1
    )
    link = connection
    schema = schema
    words = reads = statements
    lists = listing


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(connection.address_of(url))
