"""OracleStore: one database for any number of instances.

It has never run against a server: none could be had. What can be known without one is tested; the conformance suite
runs on whatever DUETIME_TEST_STORE names (docs/operating/oracle.md).

oracle_sql.py and oracle_list.py are what is said to the database, oracle_rows.py what its rows are,
oracle_link.py the connections and their errors, oracle_schema.py the tables; sql_store.py says which session does
what.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from duetime.store import Capabilities
from duetime.stores import oracle_link, oracle_list, oracle_schema, oracle_sql
from duetime.stores.sql_store import SqlStore

__all__ = ["OracleStore", "place_of", "wipe"]


class OracleStore(SqlStore):
    # One lane, as for PostgreSQL; nobody could measure it.
    capabilities = Capabilities(name="oracle", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, lanes=1)
    link = oracle_link
    schema = oracle_schema
    words = reads = oracle_sql
    lists = oracle_list


def place_of(url: str) -> str:
    """For tests: what is wiped is a user's, not a database."""
    return urlsplit(url).username or ""


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await oracle_schema.wipe(oracle_link.address_of(url))
