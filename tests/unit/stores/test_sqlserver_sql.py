"""The statements for SQL Server, as far as they can be tested without a server: parameters, transactions, locks."""

from __future__ import annotations

import re

import msgspec
import pytest

from duetime.domain.timer import Extras, Position, RetryPolicy
from duetime.store import Batch, Fence
from duetime.stores.rows import FIRST_MS, LAST_MS, REACHED_COLUMNS, TIMER_COLUMNS
from duetime.stores.sqlserver import listing as sqlserver_listing
from duetime.stores.sqlserver import schema as sqlserver_schema
from duetime.stores.sqlserver import statements as sqlserver_statements
from duetime.stores.sqlserver.rows import at, document, ms, reached_at, reached_row, timer_at, timer_row
from duetime.stores.sqlserver.store import SqlServerStore
from duetime.testing import make_reached, make_timer

BATCHES: dict[str, str] = {
    **{
        name: sql
        for name, sql in vars(sqlserver_statements).items()
        if name.isupper() and isinstance(sql, str) and "?" in sql
    },
    "GET": sqlserver_statements.get_sql(1),
    **{f"list {key}": sql for key, sql in sqlserver_listing.LIST.items()},
    "next namespace": sqlserver_listing.NEXT_NAMESPACE,
}
WRITES = ("COMMIT", "CLAIM", "RELEASE", "ENSURE_SHARDS", "PURGE", "JOIN", "HEARTBEAT", "MARK_DEAD", "FORGET",
          "NEW_NAMESPACE", "PUT_NAMESPACE")  # fmt: skip
FENCED = ("COMMIT", "RELEASE", "PURGE")
LOCKED = "shards AS s WITH (UPDLOCK, HOLDLOCK, ROWLOCK, INDEX(shards_key))"


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_has_one_parameter_whatever_is_in_it(name: str) -> None:
    """The limit is 2,100 parameters."""
    sql = BATCHES[name]
    assert sql.count("?") == 1
    assert "%(" not in sql, "which the driver would take for parameters too"
    assert sql.count("(") == sql.count(")")
    assert "MERGE" not in sql


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_one_transaction_that_ends_with_its_commit(name: str) -> None:
    """So an error always comes before the commit, and a client that freezes leaves no locks."""
    sql = BATCHES[name]
    assert "SET XACT_ABORT ON;" in sql.partition("BEGIN TRANSACTION;")[0]
    assert sql.count("BEGIN TRANSACTION;") == sql.count("COMMIT TRANSACTION;") == 1
    assert sql.endswith("\nCOMMIT TRANSACTION;")
    assert re.search(r"IF @@TRANCOUNT > 0 THROW \d+, '[^']+', 1;", sql), "or its COMMIT would not commit"


@pytest.mark.parametrize("name", FENCED)
def test_a_fence_is_read_under_a_lock_that_is_kept(name: str) -> None:
    sql = BATCHES[name]
    fence = sql[sql.index("'$.fences'") :].partition(";")[0]
    assert LOCKED in fence
    assert "s.shard_version = f.version AND s.shard_nonce = f.nonce AND s.shard_owner_id IS NOT NULL" in fence
    first = min(sql.index(word) for word in ("DELETE t", "INSERT INTO timers", "UPDATE s") if word in sql)
    assert sql.index("'$.fences'") < first or name == "RELEASE"


def test_a_commit_writes_only_if_all_fences_are_valid() -> None:
    sql = BATCHES["COMMIT"]
    condition = "IF (SELECT COUNT(*) FROM @held) = (SELECT COUNT(*) FROM OPENJSON(@doc, '$.fences'))\nBEGIN"
    inside = sql.partition(condition)[2].partition("\nEND;")[0]
    for write in ("DELETE t OUTPUT", "INSERT INTO timers", "UPDATE s SET shard_low_water"):
        assert sql.count(write) == inside.count(write) > 0
    assert inside.index("DELETE t") < inside.index("INSERT INTO timers"), "two timers may change places"


def test_a_batch_stays_under_the_locks_at_which_a_table_would_be_locked_as_a_whole() -> None:
    text = sqlserver_schema._MIGRATIONS.texts[0]
    indexes_of_a_row = 1 + len(re.findall(r"CREATE (?:UNIQUE )?INDEX \w+ ON timers", text))
    assert SqlServerStore.capabilities.batch_max * indexes_of_a_row < 5_000
    assert "LOCK_ESCALATION = DISABLE" in text


def test_a_read_by_correlation_id_can_use_the_index_of_timers_that_have_one() -> None:
    """Without IS NOT NULL the hint is an error: a filtered index does not have all rows."""
    batches = [sql for name, sql in BATCHES.items() if "timers_by_correlation" in sql]
    assert len(batches) == 3
    for sql in batches:
        assert "t.timer_correlation_id IS NOT NULL AND t.timer_correlation_id = CAST(@correlation_id AS " in sql


def test_a_timer_is_unique_among_timers_only() -> None:
    text = sqlserver_schema._MIGRATIONS.texts[0]
    index = "CREATE UNIQUE INDEX timers_by_id ON timers (shard_id, timer_namespace, timer_id) WHERE row_type = 2;"
    assert index in text
    definition = text[text.index("CREATE TABLE timers (") :].partition("\n);\n")[0]
    for name in ("timer_namespace", "timer_id", "timer_correlation_id"):
        assert re.search(rf"\n    {name} +varbinary\(510\)", definition), "no collation tells 'a' from 'a '"
    columns = set(re.findall(r"^    (\w+) +[a-z]", definition, re.MULTILINE)) - {"CONSTRAINT"}
    assert columns == {"shard_id", "row_type", "row_format", *REACHED_COLUMNS}


def test_a_commit_document_has_its_values_in_the_order_of_the_statement() -> None:
    put, gone = make_timer("put", 5), make_timer("gone")
    ended = make_reached(make_timer("over"))
    batches = [
        Batch(Fence(3, 4, -5), [put], [gone.key], [ended, ended], Position(1, 2, 3)),
        Batch(Fence(4, 1, 1), [make_timer("other")]),
    ]
    said = msgspec.json.decode(sqlserver_statements.commit_document(batches))
    assert said["fences"] == [[3, 4, -5], [4, 1, 1]]
    assert said["waters"] == [[3, "[1,2,3]"]]
    assert said["keys"] == [[0, 3, "test", "put"], [1, 4, "test", "other"], [2, 3, "test", "gone"]]
    assert [row[0] for row in said["puts"]] == [3, 4]
    assert said["puts"][0][1] == "1970-01-01T00:00:00.005000"
    assert len(said["reached"]) == 1, "the same one again changes nothing"
    for path, names in (("puts", TIMER_COLUMNS), ("reached", REACHED_COLUMNS)):
        given = BATCHES["COMMIT"].partition(f"OPENJSON(@doc, '$.{path}') WITH (")[2].partition(") AS v")[0]
        read = re.findall(r"(\w+) \w+(?:\(\w+\))? '\$\[(\d+)\]'", given)
        assert [(name, int(place)) for name, place in read] == [
            (name, place) for place, name in enumerate(("shard_id", *names))
        ]
        assert len(said[path][0]) == 1 + len(names)


def test_a_document_keeps_64_bit_numbers_and_every_character() -> None:
    values = [-(1 << 63), (1 << 63) - 1, "😀\u0001\uffff\"\\'", None, "", True]
    assert msgspec.json.decode(document([values])) == [values]
    assert "\u0001" not in document(values), "control characters are written as \\u0001"


@pytest.mark.parametrize("time_ms", [FIRST_MS, 0, 1, 999, 1_800_000_000_123, LAST_MS - 1, LAST_MS])
def test_times_are_exact_to_the_millisecond(time_ms: int) -> None:
    assert ms(at(time_ms)) == time_ms
    assert re.fullmatch(r'"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}000)?"', document(at(time_ms)))


@pytest.mark.parametrize("empty", [False, True])
def test_rows_are_decoded_to_timers_and_reached_timers(empty: bool) -> None:
    timer = make_timer(
        payload="" if empty else '{"a":"ü\\u0000"}',
        correlation_id="" if empty else "r",
        retry_policy=None if empty else RetryPolicy(max_retries=3),
        extras=Extras() if empty else Extras(tags=("red",), later={"x": [1]}),
    )
    row = timer_row(7, timer)
    assert row[0] == 7
    assert timer_at(row[1:]) == timer
    reached = make_reached(timer)
    assert reached_at(reached_row(7, reached)[1:]) == reached
