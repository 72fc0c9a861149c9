"""MySqlStore: MySQL, MariaDB or TiDB for any number of instances.

Every read is one message; every fenced write is a transaction of two: lock and look, write and commit.

statements.py and reads.py are what is said to the database, rows.py what its rows are, connection.py the
connections and their errors, schema.py the tables; sql_store.py says which session does what.
"""

from __future__ import annotations

from duetime.store import Capabilities
from duetime.stores.mysql import connection, reads, schema, statements
from duetime.stores.sql_store import SqlStore

__all__ = ["MySqlStore", "wipe"]


class MySqlStore(SqlStore):
    # A payload may be twice as long in a statement, which has to fit into a packet of 16 MiB (MariaDB's default);
    # and a row into an entry of 6 MiB (TiDB's). One lane: on two cores more of them were sometimes better and sometimes
    # worse, and one gathers the larger commits.
    capabilities = Capabilities(name="mysql", batch_max=1_000, payload_bytes_max=4 * 1024 * 1024, parallel_commits=1)
    link = connection
    schema = schema
    words = statements
    reads = lists = reads


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(connection.address_of(url))
