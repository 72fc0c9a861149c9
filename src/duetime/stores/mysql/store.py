"""MySqlStore: MySQL, MariaDB or TiDB for any number of instances.

Every read is one message. Every fenced write is a transaction of two messages: the first locks and reads, the second
writes and commits.

statements.py and reads.py have the SQL, rows.py the columns, connection.py the connections, errors.py the meaning of
errors, schema.py the tables. sql_store.py chooses the session for each call.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.mysql import connection, reads, schema, statements
from duetime.stores.mysql.connection import Address, Read, Write
from duetime.stores.sql_store import SqlDatabase, SqlStore

__all__ = ["MySqlStore", "wipe"]


class MySqlStore(SqlStore[Address, Read, Write]):
    # A payload may be twice as long in a statement, which has to fit into a packet of 16 MiB (the default of MariaDB);
    # a row has to fit into an entry of 6 MiB (TiDB). One commit at a time: on two cores several were sometimes faster
    # and sometimes slower, and with one the commits are larger.
    capabilities = Capabilities(name="mysql", batch_max=1_000, payload_bytes_max=4 * 1024 * 1024, parallel_commits=1)
    database = SqlDatabase(
        address_of=connection.address_of,
        session_pool=connection.SessionPool,
        schema=schema,
        statements=statements,
        reads=reads,
        lists=reads,
    )


async def wipe(url: str) -> None:
    """For tests: deletes all rows."""
    await schema.wipe(connection.address_of(url))
