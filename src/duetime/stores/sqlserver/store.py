"""SqlServerStore: one database for any number of instances.

No Microsoft SQL Server has been available to the project. What needs no server is tested; the conformance
suite runs on whatever DUETIME_TEST_STORE names. docs/operating/sqlserver.md says what it was run on.

statements.py and listing.py are what is said to the database, rows.py what its rows are,
connection.py the connections and their errors, schema.py the tables; sql_store.py says which session does
what.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.sql_store import SqlStore
from duetime.stores.sqlserver import connection, listing, schema, statements

__all__ = ["SqlServerStore", "wipe"]


class SqlServerStore(SqlStore):
    # Few enough for a batch to stay under the 5,000 locks at which a table is locked as a whole, if that were allowed:
    # each row is in the table and in at most three of its indexes.
    # One lane, as for PostgreSQL; nobody could measure it.
    capabilities = Capabilities(
        name="sqlserver", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1
    )
    link = connection
    schema = schema
    words = reads = statements
    lists = listing


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(connection.address_of(url))
