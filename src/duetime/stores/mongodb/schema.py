"""The collections of MongoStore: create, migrate, recognise, diagnose.

There is no lock: every step of a migration may be run by many instances at the same time, and may be repeated. The
document in `duetime_schema`, which is created before anything else, marks a database as Duetime's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pymongo import AsyncMongoClient, errors
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.uri_parser import parse_uri

from duetime.errors import SchemaMismatch, SetupError, StoreError, StoreUnavailable
from duetime.store import Danger, Diagnosis
from duetime.stores.mongodb import connection
from duetime.stores.mongodb.address import Address
from duetime.stores.mongodb.errors import NO_REPLICA_SET, setup_error
from duetime.stores.mongodb.rows import INDEXES, Document
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

Database = AsyncDatabase[Document]

OLDEST_SERVER = 6
SETUP_SECONDS = 60.0  # for all commands of a start together; creating an index over many timers is slow
_COLLECTIONS = ("timers", "members", "namespaces")
_SCHEMA = "duetime_schema"
_EXISTS = 48


async def _create_collections(db: Database) -> None:
    for name in _COLLECTIONS:
        try:
            await db.command({"create": name, "writeConcern": {"w": "majority"}})
        except errors.OperationFailure as error:
            if error.code != _EXISTS:
                raise
    await db.command({"createIndexes": "timers", "indexes": list(INDEXES), "writeConcern": {"w": "majority"}})


_MIGRATIONS: tuple[Callable[[Database], Awaitable[None]], ...] = (_create_collections,)
SCHEMA_VERSION = len(_MIGRATIONS)


async def migrate(address: Address) -> None:
    """Create the collections, or migrate them to this version."""
    async with _database(address) as db:
        await _check_server(address, db)
        found = await _recognise(address, db)
        if found == SCHEMA_VERSION:
            return
        await db[_SCHEMA].update_one({"_id": "schema"}, {"$setOnInsert": {"version": 0}}, upsert=True)
        for number in range(found + 1, SCHEMA_VERSION + 1):
            await _MIGRATIONS[number - 1](db)
            await db[_SCHEMA].update_one({"_id": "schema"}, {"$max": {"version": number}})
        log.info("%s: created the collections of schema %d", address.label, SCHEMA_VERSION)


async def check(address: Address) -> None:
    """Raise an error for a database that cannot be used, and log warnings about settings that may lose timers."""
    async with _database(address) as db:
        await _check_server(address, db)
        found = await _recognise(address, db)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no collections yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` creates them")
        for danger in await _dangers(db):
            log.warning("%s: %s", address.label, danger)


async def wipe(address: Address) -> None:
    """For tests: delete all documents."""
    async with _database(address) as db:
        if await _recognise(address, db):
            for name in _COLLECTIONS:
                await db[name].delete_many({})


# --- what is found -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _database(address: Address) -> AsyncIterator[Database]:
    """The database, with a client of its own. Errors are raised as errors that say what to do."""
    client = connection.connect(address, connections=2)
    try:
        # Not pymongo.timeout: with that the driver would wait just as long for servers that cannot be reached.
        async with asyncio.timeout(SETUP_SECONDS):
            yield client[address.database]
    except (StoreError, SetupError):
        raise
    except errors.ServerSelectionTimeoutError as error:
        raise await _no_primary(address) or setup_error(address, error) from error
    except TimeoutError as error:
        raise StoreUnavailable(f"mongodb: {address.label} is not ready within {SETUP_SECONDS:g} s") from error
    except Exception as error:
        raise setup_error(address, error) from error
    finally:
        await connection.close(client)


async def _check_server(address: Address, db: Database) -> Document:
    hello: Document = await db.client.admin.command("hello")
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise _unusable(address, "is a replica set that is not initiated" if hello.get("isreplicaset") else "")
    if not hello["isWritablePrimary"]:
        raise _unusable(address, "is a secondary; name the primary, or leave out directConnection")
    version = (await db.client.admin.command("buildInfo"))["version"]
    if int(version.partition(".")[0]) < OLDEST_SERVER:
        raise _unusable(address, f"is MongoDB {version}; {OLDEST_SERVER}.0 or later is needed")
    return hello


def _unusable(address: Address, why: str) -> SetupError:
    return SetupError(f"store.url: {address.label} {why or NO_REPLICA_SET}", field="store.url")


_INSECURE = ("tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames", "tlsDisableOCSPEndpointCheck")


async def _no_primary(address: Address) -> SetupError | None:
    """Why no primary was found, if one of the hosts reports something that an operator has to change."""
    if address.uri.startswith("mongodb+srv"):
        return None
    parsed = parse_uri(address.uri)
    attempts = {name: value for name, value in parsed["options"].items() if name.lower().startswith("tls")}
    if "tlsInsecure" in attempts:  # the parser adds the options that it implies, and the client refuses both together
        attempts = {name: value for name, value in attempts.items() if name not in _INSECURE}
    wanted = parsed["options"].get("replicaSet")
    for host, port in parsed["nodelist"]:
        single: connection.Client = AsyncMongoClient(
            host, port, directConnection=True, serverSelectionTimeoutMS=1_000, connectTimeoutMS=1_000, **attempts
        )
        try:
            hello = await single.admin.command("hello")
        except errors.PyMongoError:
            continue
        finally:
            await connection.close(single)
        if hello.get("isreplicaset"):
            return _unusable(address, "is a replica set that is not initiated: call rs.initiate() once")
        if "setName" not in hello:
            return _unusable(address, NO_REPLICA_SET)
        if wanted is not None and hello["setName"] != wanted:
            return _unusable(address, f"is the replica set {hello['setName']!r}, not {wanted!r}")
    return None


async def _recognise(address: Address, db: Database) -> int:
    """The schema version, 0 if there are no collections of Duetime."""
    found = await db[_SCHEMA].find_one({"_id": "schema"})
    if found is None and "timers" in await db.list_collection_names(filter={"name": "timers"}):
        found = await db[_SCHEMA].find_one({"_id": "schema"})  # another instance may have created it just now
        if found is None:
            raise _unusable(address, "has a collection 'timers' of another program; use a database of its own")
    version = int(found["version"]) if found else 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _dangers(db: Database) -> list[Danger]:
    engine = await _status_field(db, "serverStatus", "storageEngine")
    if engine is not None and not engine.get("persistent", True):
        return [Danger(f"the storage engine {engine['name']} keeps everything in memory", "a restart loses all timers")]
    return []


async def _status_field(db: Database, command: str, name: str) -> Any:
    """One field of the answer to a command. None: the user is not allowed to run it."""
    try:
        return (await db.client.admin.command(command)).get(name)
    except errors.OperationFailure:
        return None


# --- diagnose ------------------------------------------------------------------------------------


async def diagnose(address: Address) -> Diagnosis:
    """Facts about the server, and which of the settings can lose acknowledged timers."""
    async with _database(address) as db:
        hello = await _check_server(address, db)
        found = await _recognise(address, db)
        version = (await db.client.admin.command("buildInfo"))["version"]
        sentences = [f"MongoDB {version}", _kind(hello)]
        engine = await _status_field(db, "serverStatus", "storageEngine")
        if engine is not None:
            sentences.append(f"storage engine {engine['name']}")
        connections = await _status_field(db, "serverStatus", "connections")
        if connections is not None:
            free, used = connections["available"], connections["current"]
            sentences.append(f"{free} of {free + used} of its connections are free")
        sentences.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return Diagnosis(sentences, await _dangers(db))


def _kind(hello: Document) -> str:
    if "setName" not in hello:
        return "it is a router (mongos) of a sharded cluster"
    count, arbiters = len(hello["hosts"]), len(hello.get("arbiters", ()))
    made_of = f"{count} member{'s' * (count > 1)}" + (
        f" and {arbiters} arbiter{'s' * (arbiters > 1)}" if arbiters else ""
    )
    return f"it is the primary of the replica set {hello['setName']!r} with {made_of}"
