"""Makes stored rows undecodable, by the driver of each database: for tests of what a store does with such rows.

The written values are ones that the database accepts: invalid JSON where it does not check, otherwise JSON that is not
that of a timer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import apsw

from duetime.domain.timer import Position, Reached, Timer

__all__ = ["Spoiling"]

NO_JSON = "{no JSON"
WRONG_OPTIONS = '{"t": 5}'
WRONG_NAMESPACE = '{"name": 5}'

Values = dict[str, Any]


class Spoiling:
    """For the test class of an adapter, which says where its database is."""

    straight_url = ""

    async def spoil_timer(self, shard_id: int, timer: Timer) -> None:
        async with _spoiler(self.straight_url) as spoiler:
            await spoiler.timer(shard_id, timer)

    async def spoil_reached(self, shard_id: int, reached: Reached) -> None:
        async with _spoiler(self.straight_url) as spoiler:
            await spoiler.reached(shard_id, reached)

    async def spoil_namespace(self, name: str) -> None:
        async with _spoiler(self.straight_url) as spoiler:
            await spoiler.namespace(name)


@contextlib.asynccontextmanager
async def _spoiler(url: str) -> AsyncIterator[Any]:
    kind = _SPOILERS[urlsplit(url).scheme]
    spoiler = await kind.connected(url)
    try:
        yield spoiler
    finally:
        await spoiler.close()


class _Sqlite:
    """Uses the SQLite library of the store: a second one in the same process would break the locks of the first."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    @classmethod
    async def connected(cls, url: str) -> _Sqlite:
        db = apsw.Connection(url.removeprefix("sqlite:///"))
        db.set_busy_timeout(5_000)
        return cls(db)

    async def close(self) -> None:
        self._db.close()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        self._row(2, shard_id, timer.position)

    async def reached(self, shard_id: int, reached: Reached) -> None:
        self._row(3, shard_id, reached.position)

    async def namespace(self, name: str) -> None:
        self._db.execute("UPDATE namespaces SET body = ? WHERE name = ?", (WRONG_NAMESPACE, name))
        assert self._db.changes() == 1

    def _row(self, row_type: int, shard_id: int, place: Position) -> None:
        self._db.execute(
            "UPDATE timers SET timer_options = ? WHERE row_type = ? AND shard_id = ?"
            " AND (timer_execute_at, timer_uuid_high, timer_uuid_low) = (?, ?, ?)",
            (NO_JSON, row_type, shard_id, *place),
        )
        assert self._db.changes() == 1


class _Postgres:
    def __init__(self, db: Any) -> None:
        self._db = db

    @classmethod
    async def connected(cls, url: str) -> _Postgres:
        from duetime.stores.postgres import connection as postgres_connection

        return cls(await postgres_connection.connect(postgres_connection.address_of(url)))

    async def close(self) -> None:
        await self._db.close()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        await self._row(2, shard_id, timer.position)

    async def reached(self, shard_id: int, reached: Reached) -> None:
        await self._row(3, shard_id, reached.position)

    async def namespace(self, name: str) -> None:
        done = await self._db.execute("UPDATE namespaces SET body = $1 WHERE name = $2", WRONG_NAMESPACE, name)
        assert done == "UPDATE 1"

    async def _row(self, row_type: int, shard_id: int, place: Position) -> None:
        done = await self._db.execute(
            "UPDATE timers SET timer_options = $1, timer_created_at = 'infinity' WHERE row_type = $2 AND shard_id = $3"
            " AND timer_uuid_high = $4 AND timer_uuid_low = $5",
            WRONG_OPTIONS,
            row_type,
            shard_id,
            place.uuid_high,
            place.uuid_low,
        )
        assert done == "UPDATE 1"


class _MySql:
    def __init__(self, db: Any) -> None:
        self._db = db

    @classmethod
    async def connected(cls, url: str) -> _MySql:
        from duetime.stores.mysql import connection as mysql_connection

        return cls(await mysql_connection.connect(mysql_connection.address_of(url)))

    async def close(self) -> None:
        await self._db.ensure_closed()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        await self._row("timers", shard_id, timer.position)

    async def reached(self, shard_id: int, reached: Reached) -> None:
        await self._row("reached", shard_id, reached.position)

    async def namespace(self, name: str) -> None:
        await self._change(f"UPDATE namespaces SET body = '{WRONG_NAMESPACE}' WHERE name = '{name}'")

    async def _row(self, table: str, shard_id: int, place: Position) -> None:
        await self._change(
            f"UPDATE {table} SET timer_options = '{NO_JSON}' WHERE shard_id = {shard_id}"
            f" AND timer_uuid_high = {place.uuid_high} AND timer_uuid_low = {place.uuid_low}"
        )

    async def _change(self, sql: str) -> None:
        from duetime.stores.mysql import connection as mysql_connection

        assert await mysql_connection.execute(self._db, (sql,)) == [1]


class _Mongo:
    def __init__(self, client: Any, database: str) -> None:
        self._client = client
        self._db = client[database]

    @classmethod
    async def connected(cls, url: str) -> _Mongo:
        from duetime.stores.mongodb.address import address_of
        from duetime.stores.mongodb.connection import connect

        address = address_of(url)
        return cls(connect(address, 1), address.database)

    async def close(self) -> None:
        await self._client.close()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        """A field that is missing, and one of another type: the collection takes anything."""
        await self._row(2, shard_id, timer.position, {"$set": {"timer_payload": 5}, "$unset": {"timer_attempts": 1}})

    async def reached(self, shard_id: int, reached: Reached) -> None:
        await self._row(3, shard_id, reached.position, {"$set": {"timer_options": NO_JSON}})

    async def namespace(self, name: str) -> None:
        done = await self._db["namespaces"].update_one({"_id": name}, {"$unset": {"body": 1}})
        assert done.modified_count == 1

    async def _row(self, row_type: int, shard_id: int, place: Position, change: Values) -> None:
        those = {
            "row_type": row_type,
            "shard_id": shard_id,
            "timer_uuid_high": place.uuid_high,
            "timer_uuid_low": place.uuid_low,
        }
        assert (await self._db["timers"].update_one(those, change)).modified_count == 1


class _Cassandra:
    """By conditional writes: others have timestamps of their own, and could outlive what the store writes next."""

    def __init__(self, link: Any, keyspace: str) -> None:
        self._link = link
        self._keyspace = keyspace

    @classmethod
    async def connected(cls, url: str) -> _Cassandra:
        from duetime.stores.cassandra import address as cassandra_address
        from duetime.stores.cassandra import connection as cassandra_connection

        address = cassandra_address.address_of(url)
        return cls(await cassandra_connection.connect(address, without_metadata=True), address.keyspace)

    async def close(self) -> None:
        await self._link.close()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        await self._row(2, shard_id, timer.position)

    async def reached(self, shard_id: int, reached: Reached) -> None:
        await self._row(3, shard_id, reached.position)

    async def namespace(self, name: str) -> None:
        text = f'UPDATE "{self._keyspace}".namespaces SET document = %s WHERE name = %s IF EXISTS'
        assert (await self._link.execute(text, WRONG_NAMESPACE, name))[0][0]

    async def _row(self, row_type: int, shard_id: int, place: Position) -> None:
        text = (
            f'UPDATE "{self._keyspace}".timers SET timer_options = %s, timer_attempts = null'
            f" WHERE shard_id = {shard_id} AND row_type = {row_type} AND timer_execute_at = {place.execute_at_ms}"
            f" AND timer_uuid_high = {place.uuid_high} AND timer_uuid_low = {place.uuid_low} AND row_order = 0x"
            " IF EXISTS"
        )
        assert (await self._link.execute(text, NO_JSON))[0][0]


class _Dynamo:
    def __init__(self, client: Any, pool: Any) -> None:
        self._client = client
        self._pool = pool

    @classmethod
    async def connected(cls, url: str) -> _Dynamo:
        from duetime.stores.dynamodb.address import address_of
        from duetime.stores.dynamodb.connection import DynamoClient

        client = DynamoClient(address_of(url))
        return cls(client, await client.open_pool(1, 10, 5))

    async def close(self) -> None:
        await self._client.close()

    async def timer(self, shard_id: int, timer: Timer) -> None:
        from duetime.stores.dynamodb import rows as items

        key = items.row_key(shard_id, items.timer_key(timer.key))
        await self._change(self._client.address.timers, key, "REMOVE timer_row", {})

    async def reached(self, shard_id: int, reached: Reached) -> None:
        from duetime.stores.dynamodb import rows as items

        key = items.row_key(shard_id, items.reached_key(reached))
        await self._change(self._client.address.timers, key, "SET timer_row = :row", {":row": {"S": NO_JSON}})

    async def namespace(self, name: str) -> None:
        from duetime.stores.dynamodb import rows as items

        key = items.cluster_key(items.NAMESPACE, name)
        values = {":body": {"S": WRONG_NAMESPACE}}
        await self._change(self._client.address.cluster, key, "SET namespace_body = :body", values)

    async def _change(self, table: str, key: Values, change: str, values: Values) -> None:
        more = {"ExpressionAttributeValues": values} if values else {}
        [name] = [part for part in key if part != "shard_id" and part != "item_kind"]
        is_there = f"attribute_exists({name})"
        await self._pool.write(
            "update_item", TableName=table, Key=key, UpdateExpression=change, ConditionExpression=is_there, **more
        )


_SPOILERS: dict[str, Any] = {
    "sqlite": _Sqlite,
    "postgresql": _Postgres,
    "mysql": _MySql,
    "mariadb": _MySql,
    "tidb": _MySql,
    "mongodb": _Mongo,
    "cassandra": _Cassandra,
    "dynamodb": _Dynamo,
}
