"""The tables of DynamoStore: create, migrate, recognise, diagnose.

The service refuses to create a table that exists, so any number of instances may start at the same time: the later ones
wait until the table is ready. The schema version is an item of the cluster's table. It is written when both tables are
ready, and it only grows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Danger, Diagnosis
from duetime.stores.dynamodb import rows as items
from duetime.stores.dynamodb.address import Address
from duetime.stores.dynamodb.connection import ConnectionPool, DynamoClient
from duetime.stores.dynamodb.errors import setup_error
from duetime.stores.dynamodb.rows import number
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

SCHEMA_VERSION = 1
READY_SECONDS = 120.0  # creating a table takes 5 to 30 s
_POLL_SECONDS = 0.25
_CALL_SECONDS = 10.0
_VERSION_KEY: Final = items.cluster_key(items.SCHEMA, "version")
_AMAZON: Final = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

T = TypeVar("T")


def _definition(address: Address, table: str) -> dict[str, Any]:
    keys, types = _table_keys(address)[table]
    created: dict[str, Any] = {
        "TableName": table,
        "KeySchema": _key_schema(keys),
        "AttributeDefinitions": [{"AttributeName": name, "AttributeType": kind} for name, kind in types.items()],
        "BillingMode": "PAY_PER_REQUEST",
    }
    if address.units is not None:
        created["BillingMode"] = "PROVISIONED"
        created["ProvisionedThroughput"] = dict(
            zip(("ReadCapacityUnits", "WriteCapacityUnits"), address.units, strict=True)
        )
    if table == address.timers:
        created["LocalSecondaryIndexes"] = [
            {
                "IndexName": items.POSITIONS,
                "KeySchema": _key_schema(("shard_id", "row_at")),
                "Projection": {"ProjectionType": "ALL"},  # a load reads whole timers, and is charged by size
            }
        ]
    return created


def _table_keys(address: Address) -> dict[str, tuple[tuple[str, str], dict[str, str]]]:
    return {
        address.timers: (items.TIMERS_KEY, {"shard_id": "N", "row_key": "B", "row_at": "B"}),
        address.cluster: (items.CLUSTER_KEY, {"item_kind": "S", "item_name": "S"}),
    }


def _key_schema(keys: tuple[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in zip(keys, ("HASH", "RANGE"), strict=True)]


# --- at the start --------------------------------------------------------------------------------


async def migrate(address: Address) -> None:
    """Create the tables, or migrate them to this version."""
    async with _opened(address) as pool:
        for table in _table_keys(address):
            if await _described(pool, table) is None:
                await _create(address, pool, table)
        await asyncio.gather(*(_until_ready(address, pool, table) for table in _table_keys(address)))
        found = await _version(address, pool)
        if found < SCHEMA_VERSION:
            # Later versions will run their migrations here, one by one; the first was to create the tables.
            await _record_version(pool, address, found)


async def check(address: Address) -> None:
    """Raise an error for tables that cannot be used, and log warnings about settings that may lose timers."""
    async with _opened(address) as pool:
        described = {table: await _described(pool, table) for table in _table_keys(address)}
        if None in described.values():
            raise SchemaMismatch(f"{address.label} has no tables yet; `duetime serve` creates them")
        for table, description in described.items():
            _recognise(address, table, description or {})
        found = await _version(address, pool)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` creates them")
        await _check_permissions(address, pool)
        for danger in _dangers(address, [d for d in described.values() if d]):
            log.warning("%s: %s", address.label, danger)


@contextlib.asynccontextmanager
async def _opened(address: Address) -> AsyncIterator[ConnectionPool]:
    """A connection pool of its own. Errors are raised as errors that say what to do."""
    client = DynamoClient(address)
    try:
        pool = await client.open_pool(4, _CALL_SECONDS, _CALL_SECONDS)
        yield pool
    except (ClientError, BotoCoreError, ResponseParserError, TimeoutError) as error:
        raise setup_error(address.label, error) from error
    finally:
        await client.close()


async def _described(pool: ConnectionPool, table: str) -> Mapping[str, Any] | None:
    try:
        description: Mapping[str, Any] = (await pool.call_once("describe_table", TableName=table))["Table"]
    except ClientError as error:
        if error.response["Error"]["Code"] == "ResourceNotFoundException":
            return None
        raise
    return description


async def _create(address: Address, pool: ConnectionPool, table: str) -> None:
    try:
        await pool.call_once("create_table", **_definition(address, table))
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceInUseException":  # another instance is creating it
            raise
        return
    log.info("%s: creating the table %s", address.label, table)


async def _until_ready(address: Address, pool: ConnectionPool, table: str) -> None:
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + READY_SECONDS
    while True:
        description = await _described(pool, table)
        if description is not None and description["TableStatus"] in ("ACTIVE", "UPDATING"):
            _recognise(address, table, description)
            return
        if loop.time() > ends_at:
            state = "missing" if description is None else description["TableStatus"]
            raise StoreUnavailable(f"dynamodb: the table {table} is still {state} after {READY_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


def _recognise(address: Address, table: str, description: Mapping[str, Any]) -> None:
    keys, types = _table_keys(address)[table]
    found = {entry["AttributeName"]: entry["AttributeType"] for entry in description["AttributeDefinitions"]}
    ordered = sorted(description["KeySchema"], key=lambda entry: str(entry["KeyType"]))
    indexes = [index["IndexName"] for index in description.get("LocalSecondaryIndexes") or ()]
    is_ours = tuple(entry["AttributeName"] for entry in ordered) == keys and found.items() >= types.items()
    if not is_ours or (table == address.timers and items.POSITIONS not in indexes):
        raise SetupError(
            f"store.url: {address.label}: the table {table} is another program's, or was created by hand with"
            " other keys; use a prefix of its own",
            field="store.url",
        )
    if description["TableStatus"] not in ("ACTIVE", "UPDATING"):
        raise StoreUnavailable(f"dynamodb: the table {table} is {description['TableStatus']}")


async def _version(address: Address, pool: ConnectionPool) -> int:
    answer = await pool.call_once("get_item", TableName=address.cluster, Key=_VERSION_KEY, ConsistentRead=True)
    version = int(answer["Item"]["schema_version"]["N"]) if "Item" in answer else 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _record_version(pool: ConnectionPool, address: Address, found: int) -> None:
    try:
        await pool.call_once(
            "update_item",
            TableName=address.cluster,
            Key=_VERSION_KEY,
            UpdateExpression="SET schema_version = :new",
            ConditionExpression="attribute_not_exists(schema_version) OR schema_version = :found",
            ExpressionAttributeValues={":new": number(SCHEMA_VERSION), ":found": number(found)},
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "ConditionalCheckFailedException":  # another instance was first
            raise


async def _check_permissions(address: Address, pool: ConnectionPool) -> None:
    """The service checks permissions before conditions: this requests all needed operations, and changes nothing."""
    timers, cluster = {"TableName": address.timers}, {"TableName": address.cluster}
    rows = [items.row_key(0, name) for name in (b"nobody", b"nobody else")]
    unused_keys = [items.cluster_key(items.MEMBER, f"nobody {number_}") for number_ in range(3)]
    never_met = {"ConditionExpression": "schema_version < :none", "ExpressionAttributeValues": {":none": number(0)}}
    actions: list[dict[str, Any]] = [
        {"ConditionCheck": {**cluster, "Key": _VERSION_KEY, **never_met}},
        {"Put": {**cluster, "Item": unused_keys[0]}},
        {"Update": {**cluster, "Key": unused_keys[1], "UpdateExpression": "REMOVE nothing"}},
        {"Delete": {**cluster, "Key": unused_keys[2]}},
        {"Put": {**timers, "Item": rows[0]}},
        {"Delete": {**timers, "Key": rows[1]}},
    ]
    try:
        await pool.call_once("transact_write_items", TransactItems=actions)
    except ClientError as error:
        if error.response["Error"]["Code"] != "TransactionCanceledException":
            raise
    for index in ({}, {"IndexName": items.POSITIONS}):
        condition = {"KeyConditionExpression": "shard_id = :shard", "ExpressionAttributeValues": {":shard": number(0)}}
        await pool.call_once("query", **timers, **index, **condition, ConsistentRead=True, Limit=1)


def _dangers(address: Address, described: Iterable[Mapping[str, Any]]) -> list[Danger]:
    dangers = []
    if address.endpoint is not None and not (urlsplit(address.endpoint).hostname or "").endswith(_AMAZON):
        dangers.append(Danger(f"{address.endpoint} is not Amazon's", "an emulator may lose acknowledged timers"))
    for description in described:
        replicas = [replica["RegionName"] for replica in description.get("Replicas") or ()]
        if replicas:
            dangers.append(
                Danger(
                    f"{description['TableName']} is replicated to {', '.join(replicas)}",
                    "a region that takes over may lack acknowledged timers, and all instances must use the same region",
                )
            )
    return dangers


# --- for tests and for the doctor ----------------------------------------------------------------


async def wipe(address: Address) -> None:
    """For tests: delete everything except the schema version."""
    async with _opened(address) as pool:
        for table, (keys, _) in _table_keys(address).items():
            if await _described(pool, table) is not None:
                await _wipe_table(pool, table, keys)


async def _wipe_table(pool: ConnectionPool, table: str, keys: tuple[str, str]) -> None:
    request: dict[str, Any] = {"TableName": table, "ConsistentRead": True, "ProjectionExpression": ", ".join(keys)}
    while True:
        answer = await pool.call_once("scan", **request)
        deleted = [item for item in answer["Items"] if item != _VERSION_KEY]
        await asyncio.gather(*(_delete(pool, table, some) for some in _chunks(deleted, 25)))
        if "LastEvaluatedKey" not in answer:
            return
        request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


async def _delete(pool: ConnectionPool, table: str, keys: list[Any]) -> None:
    left: Mapping[str, Any] = {table: [{"DeleteRequest": {"Key": key}} for key in keys]}
    while left:
        left = (await pool.call_once("batch_write_item", RequestItems=left))["UnprocessedItems"]


def _chunks(things: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(things)
    while piece := list(islice(rest, size)):
        yield piece


async def diagnose(address: Address) -> Diagnosis:
    """Facts about the tables, and which of the settings can lose acknowledged timers."""
    async with _opened(address) as pool:
        described = {table: await _described(pool, table) for table in _table_keys(address)}
        sentences = [_table_sentence(table, description) for table, description in described.items()]
        existing = [description for description in described.values() if description is not None]
        found = await _version(address, pool) if described[address.cluster] is not None else 0
        sentences.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return Diagnosis(sentences, _dangers(address, existing))


def _table_sentence(table: str, description: Mapping[str, Any] | None) -> str:
    if description is None:
        return f"the table {table} does not exist yet"
    mode = (description.get("BillingModeSummary") or {}).get("BillingMode", "PROVISIONED")
    units = description.get("ProvisionedThroughput") or {}
    paid = "on demand"
    if mode == "PROVISIONED":
        paid = f"for {units.get('ReadCapacityUnits')} read and {units.get('WriteCapacityUnits')} write units"
    protected = (
        "protected from deletion" if description.get("DeletionProtectionEnabled") else "not protected from deletion"
    )
    return (
        f"the table {table} is {description['TableStatus']}, paid {paid}, {protected}, with"
        f" {description.get('ItemCount', 0)} items in {description.get('TableSizeBytes', 0)} bytes when last counted"
    )
