"""OracleStore: one database for any number of instances.

It has never run against a server: none was available to the project. What needs no server is tested; the conformance
suite runs on the store that DUETIME_TEST_STORE names (docs/operating/oracle.md).

statements.py and listing.py have the SQL, rows.py the columns, connection.py the connections, errors.py the meaning of
errors, schema.py the tables. sql_store.py chooses the session for each call.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from duetime.store import Capabilities
from duetime.stores.oracle import connection, listing, schema, statements
from duetime.stores.oracle.connection import Address, Run
from duetime.stores.sql_store import SqlDatabase, SqlStore

__all__ = ["OracleStore", "place_of", "wipe"]


class OracleStore(SqlStore[Address, Run, Run]):
    # One commit at a time, as for PostgreSQL. Not measured.
    capabilities = Capabilities(name="oracle", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1)
    database = SqlDatabase(
        address_of=connection.address_of,
        session_pool=connection.SessionPool,
        schema=schema,
        statements=statements,
        reads=statements,
        lists=listing,
    )


def place_of(url: str) -> str:
    """For tests: the name of what `wipe` empties. That is a user, not a database."""
    return urlsplit(url).username or ""


async def wipe(url: str) -> None:
    """For tests: deletes all rows."""
    await schema.wipe(connection.address_of(url))
