"""PostgresStore: one database for any number of instances.

Every call is one statement in one round trip, and every write carries its fence in it. postgres_sql.py and
postgres_list.py are what is said to the database, postgres_rows.py what its rows are, postgres_link.py the connections
and their errors, postgres_schema.py the tables; sql_store.py says which session does what.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores import postgres_link, postgres_list, postgres_schema, postgres_sql
from duetime.stores.sql_store import SqlStore

__all__ = ["PostgresStore", "wipe"]


class PostgresStore(SqlStore):
    # One lane: measured, one big commit at a time costs an instance less than several smaller ones.
    capabilities = Capabilities(name="postgresql", batch_max=2_000, payload_bytes_max=16 * 1024 * 1024, lanes=1)
    link = postgres_link
    schema = postgres_schema
    words = reads = postgres_sql
    lists = postgres_list


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await postgres_schema.wipe(postgres_link.address_of(url))
