"""SqlServerStore: one database for any number of instances.

No Microsoft SQL Server was available to the project. What needs no server is tested; the conformance suite runs on the
store that DUETIME_TEST_STORE names. docs/operating/sqlserver.md says what it was run on.

statements.py and listing.py have the SQL, rows.py the columns, connection.py the connections, errors.py the meaning of
errors, schema.py the tables. sql_store.py chooses the session for each call.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.sql_store import SqlDatabase, SqlStore
from duetime.stores.sqlserver import connection, listing, schema, statements
from duetime.stores.sqlserver.connection import Address, Run

__all__ = ["SqlServerStore", "wipe"]


class SqlServerStore(SqlStore[Address, Run, Run]):
    # With this batch_max a batch stays under 5,000 locks, at which SQL Server may lock the whole table: each row is in
    # the table and in at most three of its indexes. One commit at a time, as for PostgreSQL. Not measured.
    capabilities = Capabilities(
        name="sqlserver", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1
    )
    database = SqlDatabase(
        address_of=connection.address_of,
        session_pool=connection.SessionPool,
        schema=schema,
        statements=statements,
        reads=statements,
        lists=listing,
    )


async def wipe(url: str) -> None:
    """For tests: deletes all rows."""
    await schema.wipe(connection.address_of(url))
