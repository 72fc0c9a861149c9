"""The tables under DynamoStore: made, brought up to date, recognised; and what a doctor wants to know.

Making a table that is there is refused by the service, so any number of instances may start at once: who comes second
waits until it is ready. The version is an item of the cluster's table, written when both are; it only ever grows.
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
from duetime.stores.dynamodb.connection import Address, Line, Link
from duetime.stores.dynamodb.errors import setup_error
from duetime.stores.dynamodb.rows import number
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

SCHEMA_VERSION = 1
READY_SECONDS = 120.0  # a table takes 5 to 30 s to be made
_POLL_SECONDS = 0.25
_CALL_SECONDS = 10.0
_VERSION_KEY: Final = items.cluster_key(items.SCHEMA, "version")
_AMAZON: Final = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

T = TypeVar("T")


def _definition(address: Address, table: str) -> dict[str, Any]:
    keys, types = _shapes(address)[table]
    made: dict[str, Any] = {
        "TableName": table,
        "KeySchema": _key_schema(keys),
        "AttributeDefinitions": [{"AttributeName": name, "AttributeType": kind} for name, kind in types.items()],
        "BillingMode": "PAY_PER_REQUEST",
    }
    if address.units is not None:
        made["BillingMode"] = "PROVISIONED"
        made["ProvisionedThroughput"] = dict(
            zip(("ReadCapacityUnits", "WriteCapacityUnits"), address.units, strict=True)
        )
    if table == address.timers:
        made["LocalSecondaryIndexes"] = [
            {
                "IndexName": items.POSITIONS,
                "KeySchema": _key_schema(("shard_id", "row_at")),
                "Projection": {
                    "ProjectionType": "ALL"
                },  # a load reads whole timers, and by the kilobyte, not the piece
            }
        ]
    return made


def _shapes(address: Address) -> dict[str, tuple[tuple[str, str], dict[str, str]]]:
    return {
        address.timers: (items.TIMERS_KEY, {"shard_id": "N", "row_key": "B", "row_at": "B"}),
        address.cluster: (items.CLUSTER_KEY, {"item_kind": "S", "item_name": "S"}),
    }


def _key_schema(keys: tuple[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in zip(keys, ("HASH", "RANGE"), strict=True)]


# --- at the start --------------------------------------------------------------------------------


async def migrate(address: Address) -> None:
    """Make the tables, or bring them up to this version."""
    async with _opened(address) as line:
        for table in _shapes(address):
            if await _described(line, table) is None:
                await _make(address, line, table)
        await asyncio.gather(*(_until_ready(address, line, table) for table in _shapes(address)))
        found = await _version(address, line)
        if found < SCHEMA_VERSION:
            # Later versions will do here, one by one, what each step is; the first was to make the tables.
            await _record_version(line, address, found)


async def check(address: Address) -> None:
    """Refuse what cannot be used, and say loudly what endangers the promise."""
    async with _opened(address) as line:
        described = {table: await _described(line, table) for table in _shapes(address)}
        if None in described.values():
            raise SchemaMismatch(f"{address.label} has no tables yet; `duetime serve` makes them")
        for table, description in described.items():
            _recognise(address, table, description or {})
        found = await _version(address, line)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
        await _try_rights(address, line)
        for danger in _dangers(address, [d for d in described.values() if d]):
            log.warning("%s: %s", address.label, danger)


@contextlib.asynccontextmanager
async def _opened(address: Address) -> AsyncIterator[Line]:
    """A line of its own. What goes wrong becomes an error that says what to do."""
    link = Link(address)
    try:
        line = await link.line(4, _CALL_SECONDS, _CALL_SECONDS)
        yield line
    except (ClientError, BotoCoreError, ResponseParserError, TimeoutError) as error:
        raise setup_error(address.label, error) from error
    finally:
        await link.close()


async def _described(line: Line, table: str) -> Mapping[str, Any] | None:
    try:
        description: Mapping[str, Any] = (await line.once("describe_table", TableName=table))["Table"]
    except ClientError as error:
        if error.response["Error"]["Code"] == "ResourceNotFoundException":
            return None
        raise
    return description


async def _make(address: Address, line: Line, table: str) -> None:
    try:
        await line.once("create_table", **_definition(address, table))
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceInUseException":  # another instance is at it
            raise
        return
    log.info("%s: making the table %s", address.label, table)


async def _until_ready(address: Address, line: Line, table: str) -> None:
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + READY_SECONDS
    while True:
        description = await _described(line, table)
        if description is not None and description["TableStatus"] in ("ACTIVE", "UPDATING"):
            _recognise(address, table, description)
            return
        if loop.time() > ends_at:
            state = "missing" if description is None else description["TableStatus"]
            raise StoreUnavailable(f"dynamodb: the table {table} is still {state} after {READY_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


def _recognise(address: Address, table: str, description: Mapping[str, Any]) -> None:
    keys, types = _shapes(address)[table]
    found = {entry["AttributeName"]: entry["AttributeType"] for entry in description["AttributeDefinitions"]}
    ordered = sorted(description["KeySchema"], key=lambda entry: str(entry["KeyType"]))
    indexes = [index["IndexName"] for index in description.get("LocalSecondaryIndexes") or ()]
    is_ours = tuple(entry["AttributeName"] for entry in ordered) == keys and found.items() >= types.items()
    if not is_ours or (table == address.timers and items.POSITIONS not in indexes):
        raise SetupError(
            f"store.url: {address.label}: the table {table} is another program's, or was made by hand in another way;"
            " name a prefix of its own",
            field="store.url",
        )
    if description["TableStatus"] not in ("ACTIVE", "UPDATING"):
        raise StoreUnavailable(f"dynamodb: the table {table} is {description['TableStatus']}")


async def _version(address: Address, line: Line) -> int:
    answer = await line.once("get_item", TableName=address.cluster, Key=_VERSION_KEY, ConsistentRead=True)
    version = int(answer["Item"]["schema_version"]["N"]) if "Item" in answer else 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _record_version(line: Line, address: Address, found: int) -> None:
    try:
        await line.once(
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


async def _try_rights(address: Address, line: Line) -> None:
    """Rights are looked at before conditions: this asks for all that is needed, and changes nothing."""
    timers, cluster = {"TableName": address.timers}, {"TableName": address.cluster}
    rows = [items.row_key(0, name) for name in (b"nobody", b"nobody else")]
    nobodies = [items.cluster_key(items.MEMBER, f"nobody {number_}") for number_ in range(3)]
    never = {"ConditionExpression": "schema_version < :none", "ExpressionAttributeValues": {":none": number(0)}}
    actions: list[dict[str, Any]] = [
        {"ConditionCheck": {**cluster, "Key": _VERSION_KEY, **never}},
        {"Put": {**cluster, "Item": nobodies[0]}},
        {"Update": {**cluster, "Key": nobodies[1], "UpdateExpression": "REMOVE nothing"}},
        {"Delete": {**cluster, "Key": nobodies[2]}},
        {"Put": {**timers, "Item": rows[0]}},
        {"Delete": {**timers, "Key": rows[1]}},
    ]
    try:
        await line.once("transact_write_items", TransactItems=actions)
    except ClientError as error:
        if error.response["Error"]["Code"] != "TransactionCanceledException":
            raise
    for index in ({}, {"IndexName": items.POSITIONS}):
        condition = {"KeyConditionExpression": "shard_id = :shard", "ExpressionAttributeValues": {":shard": number(0)}}
        await line.once("query", **timers, **index, **condition, ConsistentRead=True, Limit=1)


def _dangers(address: Address, described: Iterable[Mapping[str, Any]]) -> list[Danger]:
    dangers = []
    if address.endpoint is not None and not (urlsplit(address.endpoint).hostname or "").endswith(_AMAZON):
        dangers.append(Danger(f"{address.endpoint} is not Amazon's", "a stand-in may lose what it has acknowledged"))
    for description in described:
        replicas = [replica["RegionName"] for replica in description.get("Replicas") or ()]
        if replicas:
            dangers.append(
                Danger(
                    f"{description['TableName']} is replicated to {', '.join(replicas)}",
                    "a region that takes over may lack what was acknowledged, and instances must all use the same"
                    " region",
                )
            )
    return dangers


# --- for tests and for the doctor ----------------------------------------------------------------


async def wipe(address: Address) -> None:
    """For tests: everything but the schema's version."""
    async with _opened(address) as line:
        for table, (keys, _) in _shapes(address).items():
            if await _described(line, table) is not None:
                await _wipe_table(line, table, keys)


async def _wipe_table(line: Line, table: str, keys: tuple[str, str]) -> None:
    request: dict[str, Any] = {"TableName": table, "ConsistentRead": True, "ProjectionExpression": ", ".join(keys)}
    while True:
        answer = await line.once("scan", **request)
        doomed = [item for item in answer["Items"] if item != _VERSION_KEY]
        await asyncio.gather(*(_delete(line, table, some) for some in _in_pieces(doomed, 25)))
        if "LastEvaluatedKey" not in answer:
            return
        request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


async def _delete(line: Line, table: str, keys: list[Any]) -> None:
    left: Mapping[str, Any] = {table: [{"DeleteRequest": {"Key": key}} for key in keys]}
    while left:
        left = (await line.once("batch_write_item", RequestItems=left))["UnprocessedItems"]


def _in_pieces(things: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(things)
    while piece := list(islice(rest, size)):
        yield piece


async def diagnose(address: Address) -> Diagnosis:
    """What the tables are, and which of their settings can lose acknowledged timers."""
    async with _opened(address) as line:
        described = {table: await _described(line, table) for table in _shapes(address)}
        said = [_in_a_sentence(table, description) for table, description in described.items()]
        there = [description for description in described.values() if description is not None]
        found = await _version(address, line) if described[address.cluster] is not None else 0
        said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return Diagnosis(said, _dangers(address, there))


def _in_a_sentence(table: str, description: Mapping[str, Any] | None) -> str:
    if description is None:
        return f"the table {table} is not there yet"
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
