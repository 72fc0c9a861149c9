"""PostgresStore: one database for any number of instances.

Every call is one statement in one round trip, and every write checks its fence in that statement.

statements.py and listing.py have the SQL, rows.py the columns, connection.py the connections, errors.py the meaning of
errors, schema.py the tables. sql_store.py chooses the session for each call.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.postgres import connection, listing, schema, statements
from duetime.stores.postgres.connection import Address
from duetime.stores.postgres.statements import Run
from duetime.stores.sql_store import SqlDatabase, SqlStore

__all__ = ["PostgresStore", "wipe"]


class PostgresStore(SqlStore[Address, Run, Run]):
    # One commit at a time: a measurement showed that one large commit costs an instance less than several small ones.
    capabilities = Capabilities(
        name="postgresql", batch_max=2_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1
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
