"""OracleStore: one database for any number of instances.

It has never run against a server: none could be had. What can be known without one is tested; the conformance suite
runs on whatever DUETIME_TEST_STORE names (docs/operating/oracle.md).

statements.py and listing.py are what is said to the database, rows.py what its rows are,
connection.py the connections and their errors, schema.py the tables; sql_store.py says which session does
what.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from duetime.store import Capabilities
from duetime.stores.oracle import connection, listing, schema, statements
from duetime.stores.sql_store import SqlStore

__all__ = ["OracleStore", "place_of", "wipe"]


class OracleStore(SqlStore):
    # One lane, as for PostgreSQL; nobody could measure it.
    capabilities = Capabilities(name="oracle", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1)
    link = connection
    schema = schema
    words = reads = statements
    lists = listing


def place_of(url: str) -> str:
    """For tests: what is wiped is a user's, not a database."""
    return urlsplit(url).username or ""


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(connection.address_of(url))
