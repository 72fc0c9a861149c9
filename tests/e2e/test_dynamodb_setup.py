"""DynamoDB as it is found: missing, forbidden, foreign, not it at all, old and new tables, TLS; what a doctor says.

On Ministack, an imitation. It knows no permissions: their refusals are played, in the words of the service.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest
from aiobotocore.session import AioSession
from scripts.servers import Server

from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, Store, open_store
from duetime.stores.dynamodb import schema as dynamodb_schema
from duetime.stores.dynamodb.schema import SCHEMA_VERSION
from duetime.stores.dynamodb.store import DynamoStore, wipe
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers, take
from dynamodb_way import DynamoWay, cut, described_as, refused
from servers import at_port, fresh_database, own, port_of, require


@pytest.fixture
def database_url() -> str:
    return fresh_database(require("ministack"))


def prefix_of(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


async def ready(url: str) -> DynamoStore:
    store = DynamoStore.from_url(url)
    await store.migrate()
    await store.open()
    return store


async def said_directly(url: str, operation: str, **request: object) -> dict[str, object]:
    """To the service, past the store."""
    made = AioSession().create_client(
        "dynamodb",
        region_name="us-east-1",
        endpoint_url=f"http://127.0.0.1:{port_of(url)}",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    async with made as client:
        answer: dict[str, object] = await getattr(client, operation)(**request)
        return answer


async def set_version(url: str, version: int | None) -> None:
    key = {"item_kind": {"S": "schema"}, "item_name": {"S": "version"}}
    table = f"{prefix_of(url)}-cluster"
    if version is None:
        await said_directly(url, "delete_item", TableName=table, Key=key)
    else:
        await said_directly(url, "put_item", TableName=table, Item=key | {"schema_version": {"N": str(version)}})


# --- tables --------------------------------------------------------------------------------------


async def test_many_instances_that_start_at_once_make_the_tables_once(database_url: str) -> None:
    stores = [open_store(database_url) for _ in range(8)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.ensure_shards(5) for store in stores))
    assert len(await stores[7].shards()) == 5
    await asyncio.gather(*(store.close() for store in stores))


async def test_tables_that_take_a_while_are_waited_for(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb_schema, "_POLL_SECONDS", 0.01)
    async with DynamoWay(port_of(database_url)) as way:
        store = open_store(at_port(database_url, way.port))
        way.next("DescribeTable", refused("ResourceNotFoundException"), times=2)
        way.next("DescribeTable", refused("ResourceNotFoundException"), times=2)  # made, and not seen yet
        way.next("DescribeTable", described_as(TableStatus="CREATING"), times=6)
        await store.migrate()
        assert way.seen["CreateTable"] == 2
        assert way.seen["DescribeTable"] > 10


async def test_tables_that_are_never_ready_are_given_up_on(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb_schema, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(dynamodb_schema, "READY_SECONDS", 0.1)
    async with DynamoWay(port_of(database_url)) as way:
        way.always("DescribeTable", described_as(TableStatus="CREATING"))
        with pytest.raises(StoreUnavailable, match="still CREATING"):
            await open_store(at_port(database_url, way.port)).migrate()


async def test_two_prefixes_share_nothing(database_url: str) -> None:
    prefix = prefix_of(database_url)
    stores = [await ready(database_url.replace(prefix, f"{prefix}.{name}")) for name in ("one", "two")]
    for store in stores:
        await store.ensure_shards(1)
    await stores[0].commit([Batch(await take(stores[0], 0), [make_timer()])])
    assert [len(await all_timers(store)) for store in stores] == [1, 0]
    for store in stores:
        await store.close()


async def test_a_prefix_without_tables_and_one_of_a_newer_version_are_not_opened(database_url: str) -> None:
    store = open_store(database_url)
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await store.open()
    await store.migrate()
    await set_version(database_url, SCHEMA_VERSION + 1)
    for act in (store.open, store.migrate):
        with pytest.raises(SchemaMismatch, match="a newer Duetime"):
            await act()


@pytest.mark.parametrize("version", [None, 0])
async def test_an_older_version_is_brought_up(database_url: str, version: int | None) -> None:
    """There is one version so far: before it is what an instance leaves that dies between tables and record."""
    store = open_store(database_url)
    await store.migrate()
    await set_version(database_url, version)
    with pytest.raises(SchemaMismatch, match="`duetime serve` creates them"):
        await store.open()
    await asyncio.gather(*(open_store(database_url).migrate() for _ in range(4)))
    await store.open()
    await store.close()


async def test_a_table_of_another_program_is_left_alone(database_url: str) -> None:
    await said_directly(
        database_url,
        "create_table",
        TableName=f"{prefix_of(database_url)}-timers",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "mine", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "mine", "AttributeType": "S"}],
    )
    for act in (open_store(database_url).migrate, open_store(database_url).migrate):
        with pytest.raises(SetupError, match="another program's"):
            await act()


async def test_units_may_be_provisioned(database_url: str) -> None:
    await (await ready(f"{database_url}&billing=provisioned&read_units=7&write_units=9")).close()
    diagnosis = await DynamoStore.from_url(database_url).diagnose()
    assert "paid for 7 read and 9 write units" in diagnosis.facts[0]


async def test_wiping_takes_all_but_the_tables(database_url: str) -> None:
    await wipe(database_url)  # nothing there: nothing to do
    store = await ready(database_url)
    await store.ensure_shards(2)
    fence = await take(store, 0)
    for start in range(0, 90, 30):
        await store.commit([Batch(fence, [make_timer(f"n-{number}") for number in range(start, start + 30)])])
    await wipe(database_url)
    assert await store.shards() == []
    assert await all_timers(store) == []
    await store.close()
    await store.open()
    await store.close()


# --- what is refused -----------------------------------------------------------------------------


async def test_a_service_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("dynamodb://test:test@us-east-1/test?endpoint=http://127.0.0.1:1").open()


async def test_one_that_breaks_off_is_unavailable(database_url: str) -> None:
    async with DynamoWay(port_of(database_url)) as way:
        way.always("DescribeTable", cut)
        with pytest.raises(StoreUnavailable):
            await open_store(at_port(database_url, way.port)).open()


async def test_credentials_that_nobody_knows_are_refused_without_being_told() -> None:
    with own("ministack", settings={"AUTH": "true"}) as server:
        url = server.url("test").replace("test:test", "AKIAIOSFODNN7EXAMPLE:hunter2")
        for act in (open_store(url).migrate, open_store(url).open):
            with pytest.raises(SetupError, match="does not accept these credentials") as caught:
                await act()
            assert "hunter2" not in caught.value.detail


async def test_no_credentials_at_all_and_an_unknown_profile_are_named(
    database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    bare = database_url.replace("test:test@", "")
    with pytest.raises(SetupError, match="no credentials"):
        await open_store(bare).open()
    with pytest.raises(SetupError, match="shop"):
        await open_store(f"{bare}&profile=shop").open()
    (tmp_path / "credentials").write_text("[shop]\naws_access_key_id = test\naws_secret_access_key = test\n")
    await (await ready(f"{bare}&profile=shop")).close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    await (await ready(bare)).close()


@pytest.mark.parametrize(
    "operation", ["DescribeTable", "CreateTable", "GetItem", "UpdateItem", "TransactWriteItems", "Query"]
)
async def test_a_permission_that_is_missing_is_told_at_the_start(database_url: str, operation: str) -> None:
    async with DynamoWay(port_of(database_url)) as way:
        said = f"User: arn:aws:iam::1:user/x is not authorized to perform: dynamodb:{operation}"
        way.always(operation, refused("AccessDeniedException", message=said))
        store = open_store(at_port(database_url, way.port))
        with pytest.raises(SetupError, match=f"permissions.*dynamodb:{operation}"):
            await _started(store)


async def _started(store: Store) -> None:
    await store.migrate()
    await store.open()


async def test_what_is_asked_at_the_start_to_see_permissions_changes_nothing(database_url: str) -> None:
    store = await ready(database_url)
    tables = [f"{prefix_of(database_url)}-{name}" for name in ("timers", "cluster")]
    counts = [(await said_directly(database_url, "scan", TableName=table))["Count"] for table in tables]
    assert counts == [0, 1], "the version, and nothing else"
    await store.close()


async def test_what_is_not_dynamodb_is_recognised(database_url: str) -> None:
    async with DynamoWay(port_of(database_url)) as way:
        for act in (refused("UnknownOperationException"), refused("NotFound", 404)):
            way.always("DescribeTable", act)
            with pytest.raises(SetupError, match="is not DynamoDB"):
                await open_store(at_port(database_url, way.port)).open()


# --- what is said of it --------------------------------------------------------------------------


async def test_a_stand_in_and_replicas_are_said_to_endanger_the_promise(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = await ready(database_url)
    await store.close()
    assert "is not Amazon's" in caplog.text
    diagnosis = await store.diagnose()
    assert "ACTIVE, paid on demand" in diagnosis.facts[0]
    assert f"schema version {SCHEMA_VERSION}, this Duetime knows {SCHEMA_VERSION}" in diagnosis.facts
    assert any("is not Amazon's" in danger.problem for danger in diagnosis.dangers)
    async with DynamoWay(port_of(database_url)) as way:
        way.always(
            "DescribeTable", described_as(DeletionProtectionEnabled=True, Replicas=[{"RegionName": "eu-west-1"}])
        )
        diagnosis = await DynamoStore.from_url(at_port(database_url, way.port)).diagnose()
    assert ", protected from deletion" in diagnosis.facts[0]
    assert any("replicated to eu-west-1" in danger.problem for danger in diagnosis.dangers)


async def test_a_doctor_also_looks_where_nothing_is_yet(database_url: str) -> None:
    diagnosis = await DynamoStore.from_url(database_url).diagnose()
    assert "does not exist yet" in diagnosis.facts[0]
    assert any("schema version none yet" in fact for fact in diagnosis.facts)


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture
def certificate(certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


def by_tls(server: Server, host: str, port: int, options: str) -> str:
    return f"dynamodb://test:test@us-east-1/{fresh_prefix(server)}?endpoint=https://{host}:{port}&{options}"


def fresh_prefix(server: Server) -> str:
    return prefix_of(fresh_database(server))


async def test_a_service_with_the_right_certificate_and_name_is_trusted(
    certificate: ssl.SSLContext, certificates: Path
) -> None:
    server = require("ministack")
    async with DynamoWay(server.port, certificate) as way:
        store = await ready(by_tls(server, "localhost", way.port, f"ca_file={certificates}/ca.pem"))
        await store.ensure_shards(1)
        await store.close()
        assert way.seen["PutItem"] == 1


@pytest.mark.parametrize(
    ("host", "authority"), [("127.0.0.1", "ca.pem"), ("localhost", "other.pem"), ("localhost", None)]
)
async def test_one_with_another_name_or_an_unknown_authority_is_not(
    certificate: ssl.SSLContext, certificates: Path, host: str, authority: str | None
) -> None:
    server = require("ministack")
    async with DynamoWay(server.port, certificate) as way:
        options = "" if authority is None else f"ca_file={certificates}/{authority}"
        with pytest.raises(SetupError, match="TLS"):
            await open_store(by_tls(server, host, way.port, options).rstrip("&")).open()


async def test_an_authority_that_cannot_be_read_is_named() -> None:
    url = "dynamodb://test:test@us-east-1/test?endpoint=https://localhost:1&ca_file=/nowhere.pem"
    with pytest.raises(SetupError, match=r"nowhere\.pem"):
        await open_store(url).open()
