"""The statements for Oracle, as far as they can be tested without a server: binds, columns, encoding of values."""

from __future__ import annotations

import re
from datetime import datetime

import oracledb
import pytest

from duetime.domain.timer import Extras, RetryPolicy
from duetime.stores.oracle import listing as oracle_listing
from duetime.stores.oracle import rows as oracle_rows
from duetime.stores.oracle import schema as oracle_schema
from duetime.stores.oracle import statements as oracle_statements
from duetime.stores.oracle.rows import (
    INSERT,
    INSERT_TYPES,
    at,
    decode_text,
    encode_text,
    ms,
    reached_at,
    reached_row,
    timer_at,
)
from duetime.stores.rows import FIRST_MS, LAST_MS, REACHED_COLUMNS, TIMER_COLUMNS
from duetime.testing import make_reached, make_timer

STATEMENTS: dict[str, str] = {
    **{
        name: sql
        for name, sql in vars(oracle_statements).items()
        if name.isupper() and isinstance(sql, str) and ":" in sql
    },
    "get": oracle_statements.get_sql(oracle_statements.KEYS_AT_ONCE, 1),
    **{f"insert into {table}": sql for table, sql in INSERT.items()},
    **{f"scans {key}": sql for key, sql in oracle_listing.SCANS.items()},
    "next namespace": oracle_listing.NEXT_NAMESPACE,
}
# A bind of such a name is ORA-01745.
RESERVED = set(
    re.findall(
        r"\w+",
        """
    access add all alter and any as asc audit between by char check cluster column comment compress connect create
    current date decimal default delete desc distinct drop else exclusive exists file float for from grant group
    having identified immediate in increment index initial insert integer intersect into is level like lock long
    maxextents minus mode modify noaudit nocompress not nowait null number of offline on online option or order
    pctfree prior public raw rename resource revoke row rowid rownum rows select session set share size smallint
    start successful synonym sysdate table then to trigger uid union unique update user validate values varchar
    varchar2 view whenever where with
    """,
    )
)


def _binds(sql: str) -> set[str]:
    return set(re.findall(r":(\w+)", re.sub(r"'[^']*'", "", sql)))


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_bind_has_the_name_of_a_reserved_word(name: str) -> None:
    assert STATEMENTS[name].count("(") == STATEMENTS[name].count(")")
    assert _binds(STATEMENTS[name])
    assert not _binds(STATEMENTS[name]) & RESERVED
    assert "MERGE" not in STATEMENTS[name]


def test_no_statement_exceeds_the_limit_of_binds() -> None:
    assert len(STATEMENTS) > 12
    assert max(len(_binds(sql)) for sql in STATEMENTS.values()) <= 150  # 65,535; and 1,000 in a list
    assert (
        oracle_statements.get_sql(oracle_statements.KEYS_AT_ONCE, 1).count("(:shard_")
        == 2 * oracle_statements.KEYS_AT_ONCE
        <= 1_000
    )


def test_every_fence_checks_version_nonce_and_owner_of_a_row_that_it_changes() -> None:
    for sql in (oracle_statements.FENCE, oracle_statements.RELEASE):
        assert sql.startswith("UPDATE shards SET ")
        assert {"shard_id", "version", "nonce"} <= _binds(sql)
        assert "shard_owner_id IS NOT NULL" in sql.partition(" WHERE ")[2]


def test_the_next_namespace_is_searched_by_the_indexes_from_their_begin_too() -> None:
    sql = oracle_listing.NEXT_NAMESPACE
    for table in ("timers", "reached"):
        assert f"FROM {table} WHERE timer_correlation_id = :correlation_id AND timer_namespace > " in sql
    assert sql.count("NVL(:after, CHR(0))") == 2, "an empty text is NULL"
    assert sql.count("ROWNUM <= 1") == 2


def test_a_migration_is_statements_without_the_comments_between_them() -> None:
    made = [
        statement.partition(" (")[0].split()[:4]
        for text in oracle_schema._MIGRATIONS.texts
        for statement in oracle_schema.statements(text)
    ]
    assert ["CREATE", "TABLE", "timers"] in made
    assert ["CREATE", "UNIQUE", "INDEX", "timers_by_id"] in made
    assert all(words[0] == "CREATE" for words in made)
    assert {"timers", "reached"} <= {words[2] for words in made}


def test_the_tables_have_every_column_that_is_written() -> None:
    text = oracle_schema._MIGRATIONS.texts[0]
    for table, names in oracle_rows.COLUMNS.items():
        definition = text[text.index(f"CREATE TABLE {table} (") :].partition("\n)\n")[0]
        assert set(re.findall(r"^    (\w+) +[A-Z]", definition, re.MULTILINE)) - {"CONSTRAINT"} == {
            "shard_id",
            "row_format",
            *names,
        }
        assert "VARCHAR2(255)" not in definition, "lengths are bytes, said so"


@pytest.mark.parametrize("text", [None, "", "\0", "\0\0", "\0x", "x", " ", "x\0", "null", "ü😀"])
def test_a_text_is_read_back_and_never_stored_as_empty(text: str | None) -> None:
    stored = encode_text(text)
    assert decode_text(stored) == text
    assert stored != ""
    assert (stored is None) == (text is None)


def test_texts_that_differ_are_stored_as_texts_that_differ() -> None:
    texts = ["", "\0", "\0\0", "\0x", "x", "\0\0x"]
    assert len({encode_text(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("time_ms", [FIRST_MS, 0, 1, 999, 1_800_000_000_123, LAST_MS - 1, LAST_MS])
def test_times_are_exact_to_the_millisecond(time_ms: int) -> None:
    assert ms(at(time_ms)) == time_ms
    assert at(time_ms).microsecond % 1_000 == 0


@pytest.mark.parametrize("empty", [False, True])
def test_rows_are_decoded_to_timers_and_reached_timers(empty: bool) -> None:
    timer = make_timer(
        payload="" if empty else '{"a":"ü\\u0000"}',
        correlation_id="" if empty else "r",
        retry_policy=None if empty else RetryPolicy(max_retries=3),
        extras=Extras() if empty else Extras(tags=("red",), later={"x": [1]}),
    )
    row = oracle_rows.timer_row(7, timer)
    assert row[0] == 7
    assert len(row) == 1 + len(TIMER_COLUMNS) == len(INSERT_TYPES["timers"])
    assert "" not in row
    assert timer_at(row[1:]) == timer
    reached = make_reached(timer)
    ended = reached_row(7, reached)
    assert len(ended) == 1 + len(REACHED_COLUMNS) == len(INSERT_TYPES["reached"])
    assert reached_at(ended[1:]) == reached


def test_every_time_of_an_insert_is_bound_as_a_timestamp() -> None:
    """Otherwise the driver would bind it as DATE, which has no milliseconds."""
    for table, row in (
        ("timers", oracle_rows.timer_row(0, make_timer())),
        ("reached", reached_row(0, make_reached(make_timer()))),
    ):
        for value, kind in zip(row, INSERT_TYPES[table], strict=True):
            assert isinstance(value, datetime) == (kind is oracledb.DB_TYPE_TIMESTAMP)
