"""Rows that cannot be decoded: what all adapters share, and the two adapters that have no server in the tests."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from duetime.domain.timer import BEFORE_ALL, Extras, Namespace, RetryPolicy, Timer, TimerKey
from duetime.errors import MemberDead, OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Fence, Found, ListQuery, Member, PageRequest, open_store
from duetime.stores.fencing import reading, writing
from duetime.stores.oracle import listing as oracle_listing
from duetime.stores.oracle import rows as oracle_rows
from duetime.stores.oracle import statements as oracle_statements
from duetime.stores.rows import (
    ERROR_CHARS_MAX,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    RowReader,
    page_of,
    reached_of,
    reached_values,
    timer_of,
    timer_values,
)
from duetime.stores.sqlserver import listing as sqlserver_listing
from duetime.stores.sqlserver import rows as sqlserver_rows
from duetime.stores.sqlserver import statements as sqlserver_statements
from duetime.testing import make_reached, make_timer


def full_timer(timer_id: str = "timer", execute_at_ms: int = 100, generation: int = 1) -> Timer:
    return make_timer(
        timer_id,
        execute_at_ms,
        generation=generation,
        payload='{"secret":"content"}',
        retry_policy=RetryPolicy(max_retries=3),
        extras=Extras(tags=("red",)),
    )


def spoilt(values: Sequence[Any], column: str, value: object) -> tuple[Any, ...]:
    row = list(values)
    row[REACHED_COLUMNS.index(column)] = value
    return tuple(row)


# --- what a row may be -----------------------------------------------------------------------------

WRONG: tuple[tuple[str, object], ...] = (
    ("timer_options", '{"t": 5}'),
    ("timer_options", "{no JSON"),
    ("timer_options", b'{"e":"\xff"}'),
    ("timer_retry_policy", '{"maxRetries":"x"}'),
    ("timer_retry_policy", "null"),
    ("timer_namespace", None),
    ("timer_id", None),
    ("timer_generation", None),
    ("timer_scheduled_at", None),
    ("timer_created_at", None),
    ("timer_attempts", None),
    ("timer_callback_url", None),
)


@pytest.mark.parametrize(("column", "value"), WRONG)
def test_a_row_with_one_wrong_value_is_reported_and_its_neighbours_are_read(column: str, value: object) -> None:
    timers = [full_timer(f"t-{number}") for number in range(3)]
    rows = [timer_values(timer) for timer in timers]
    rows[1] = spoilt(rows[1], column, value)
    page = page_of(rows, timers[2].position)
    assert (page.timers, page.next) == ([timers[0], timers[2]], timers[2].position)
    [found] = page.unreadable
    assert found.position == timers[1].position
    assert found.namespace == ("" if column == "timer_namespace" else "test")
    assert found.timer_id == ("" if column == "timer_id" else "t-1")
    assert 0 < len(found.error) <= ERROR_CHARS_MAX
    assert "content" not in found.error


@pytest.mark.parametrize(
    ("column", "value"),
    [*WRONG, *((name, None) for name in REACHED_COLUMNS[len(TIMER_COLUMNS) :]), ("timer_outcome", "lost")],
)
def test_a_reached_row_with_one_wrong_value_is_an_error(column: str, value: object) -> None:
    row = reached_values(make_reached(full_timer()))
    assert reached_of(row) == make_reached(full_timer())
    with pytest.raises(Exception, match=r"."):
        reached_of(spoilt(row, column, value))


def test_an_error_is_one_short_line() -> None:
    def read(_: object) -> Timer:
        raise ValueError("first\nsecond " + "x" * 1_000)

    [found] = page_of([timer_values(full_timer())], None, _reading_with(read)).unreadable
    assert found.error.startswith("ValueError: first second x")
    assert len(found.error) == ERROR_CHARS_MAX


def _reading_with(read: Callable[[Any], Timer]) -> RowReader:
    return RowReader(timer=read)


def test_without_errors_no_row_is_decoded_twice() -> None:
    calls: list[object] = []

    def read(row: Any) -> Timer:
        calls.append(row)
        return timer_of(row)

    rows = [timer_values(full_timer(f"t-{number}")) for number in range(3)]
    page_of(rows, None, _reading_with(read))
    assert calls == rows


# --- every error of a call is one of the store ------------------------------------------------------


async def test_an_unexpected_error_is_unavailable_on_a_read_and_unknown_on_a_write() -> None:
    async def fails(error: Exception) -> None:
        raise error

    for error in (ValueError("a"), KeyError("b"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "c"), IndexError()):
        with pytest.raises(StoreUnavailable, match=type(error).__name__):
            await reading(fails)(error)
        with pytest.raises(OutcomeUnknown, match=type(error).__name__):
            await writing(fails)(error)
    for known in (MemberDead("d"), StoreUnavailable("e")):
        for kind in (reading, writing):
            with pytest.raises(type(known)) as met:
                await kind(fails)(known)
            assert met.value is known


class Nonsense:
    """An open store whose database returns results that cannot be decoded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    async def __call__(self, *args: Any, **_: Any) -> Any:
        if args and inspect.iscoroutine(args[0]):
            return await args[0]
        return [["?"]]


FENCE = Fence(0, 1, 2)
READS: dict[str, tuple[Any, ...]] = {
    "members": (),
    "shards": (),
    "load": ([PageRequest(0, BEFORE_ALL, 5, 5)],),
    "get_many": ([(0, TimerKey("test", "a"))],),
    "list_timers": (ListQuery(namespace="test", num_shards=2),),
    "next_namespace": ("c", ""),
    "namespaces": (),
}
WRITES: dict[str, tuple[Any, ...]] = {
    "join": (Member("a", "host:1", 0, True, 17),),
    "heartbeat": ("a", 1),
    "mark_dead": ("a", 1),
    "forget_member": ("a",),
    "ensure_shards": (2,),
    "claim": ([Claim(0, 0, 1, "a", "host:1", 1)],),
    "release": ([FENCE],),
    "commit": ([Batch(FENCE, [make_timer()])],),
    "purge_reached": ([FENCE], 5, 5),
    "put_namespace": (Namespace(name="n", num_shards=1, created_at_ms=1), None),
}
URLS = {
    "postgresql": "postgresql://u@localhost/db",
    "mysql": "mysql://u@localhost/db",
    "mongodb": "mongodb://localhost/db",
    "cassandra": "cassandra://localhost/keyspace?datacenter=datacenter1",
    "dynamodb": "dynamodb://a:b@eu-central-1/prefix",
    "oracle": "oracle://u:p@localhost/db",
    "sqlserver": "sqlserver://u:p@localhost/db",
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("name", URLS)
async def test_a_result_that_cannot_be_decoded_is_a_store_error(name: str) -> None:
    store: Any = open_store(URLS[name])
    for attribute in ("_sessions", "_opened"):
        if hasattr(store, attribute):
            setattr(store, attribute, nonsense_for(name))
    answers = {call: await answered(getattr(store, call)(*args)) for call, args in (READS | WRITES).items()}
    refused = {call: answer for call, answer in answers.items() if isinstance(answer, Exception)}
    assert {"shards", "members"} <= refused.keys()
    assert {type(error) for call, error in refused.items() if call in READS} == {StoreUnavailable}
    unexpected = [error for error in refused.values() if not isinstance(error, StoreError)]
    assert not unexpected


def nonsense_for(name: str) -> Any:
    if name == "cassandra":  # where more than the connections is made when the store is opened
        from duetime.stores.cassandra import store as cassandra

        nothing: Any = Nonsense()
        return cassandra._Open(nothing, nothing, nothing, nothing)
    return Nonsense()


async def answered(call: Awaitable[object]) -> object:
    try:
        return await call
    except Exception as error:
        return error


# --- Oracle and SQL Server ---------------------------------------------------------------------------

Dialect = tuple[Any, Any, Callable[[int, Any], list[Any]], Callable[[int, Any], list[Any]]]
ORACLE: Dialect = (oracle_statements, oracle_listing, oracle_rows.timer_row, oracle_rows.reached_row)
SQLSERVER: Dialect = (sqlserver_statements, sqlserver_listing, sqlserver_rows.timer_row, sqlserver_rows.reached_row)
both = pytest.mark.parametrize("dialect", [ORACLE, SQLSERVER], ids=["oracle", "sqlserver"])


def rows_of(dialect: Dialect, timers: Sequence[Timer], wrong: int) -> list[tuple[Any, ...]]:
    """Rows as the driver returns them. One of them has options that cannot be decoded."""
    rows = [tuple(dialect[2](0, timer)[1:]) for timer in timers]
    text: Any = '{"t": 5}'
    rows[wrong] = spoilt(rows[wrong], "timer_options", text.encode() if dialect is ORACLE else text)
    return rows


def ends_of(dialect: Dialect, generations: Sequence[int], wrong: int) -> list[tuple[Any, ...]]:
    rows = [tuple(dialect[3](0, make_reached(full_timer(generation=number)))[1:]) for number in generations]
    rows[wrong] = spoilt(rows[wrong], "timer_outcome", "lost")
    return rows


def answering(monkeypatch: pytest.MonkeyPatch, dialect: Dialect, answer: Callable[[str], Any]) -> Any:
    """Runs work with `answer` in place of the driver: it returns the rows of a statement."""
    if dialect is ORACLE:

        async def fetched(db: Any, sql: str, values: Any, enough: Any = None) -> Any:
            return answer(sql)

        async def run(work: Callable[[Any], Awaitable[Any]]) -> Any:
            return await work(None)

        for module in dialect[:2]:
            monkeypatch.setattr(module, "fetch", fetched)
        return run
    for module in dialect[:2]:
        monkeypatch.setattr(module, "execute", lambda link, sql, said=None: answer(sql))
    monkeypatch.setattr(sqlserver_statements, "fetch_until", lambda link, sql, said, enough: answer(sql))

    async def run_here(work: Callable[[Any], Any]) -> Any:
        return work(None)

    return run_here


@both
@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_a_page_continues_after_an_unreadable_row(
    monkeypatch: pytest.MonkeyPatch, dialect: Dialect, wrong: int
) -> None:
    timers = [full_timer(f"t-{number}", 100 + number) for number in range(4)]
    run = answering(monkeypatch, dialect, lambda sql: rows_of(dialect, timers, wrong))
    [page] = await dialect[0].load(run, [PageRequest(0, BEFORE_ALL, 500, 3)])
    assert page.timers == [timer for number, timer in enumerate(timers[:3]) if number != wrong]
    assert [(item.position, item.timer_id) for item in page.unreadable] == [(timers[wrong].position, f"t-{wrong}")]
    assert page.next == timers[2].position


@both
async def test_a_get_reports_an_unreadable_timer_and_reads_older_reached_rows(
    monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    keys = [(0, TimerKey("test", "timer")), (0, TimerKey("test", "none"))]
    timer = [rows_of(dialect, [full_timer()], 0)[0]]
    asked: list[str] = []

    def answer(sql: str) -> Any:
        asked.append(sql)
        ends = ends_of(dialect, [3] if len(asked) == 1 else [3, 1, 2], 0)
        if dialect is ORACLE:
            return [(*row, *[None] * (20 - len(row)), 0) for row in (*timer, *ends)]
        return [[(*row, 0) for row in timer], [(*row, 0) for row in ends]]

    run = answering(monkeypatch, dialect, answer)
    bad, none = await dialect[0].get_many(run, keys)
    assert none == Found()
    assert (bad.timer, bad.reached) == (None, make_reached(full_timer(generation=2)))
    assert bad.unreadable
    assert len(asked) == 2
    assert asked[0] != asked[1]


@both
async def test_a_list_counts_unreadable_rows(monkeypatch: pytest.MonkeyPatch, dialect: Dialect) -> None:
    timers = [full_timer(f"t-{number}", 100 + number) for number in range(3)]
    rows = [(*row, 20, 0) for row in rows_of(dialect, timers, 1)]
    run = answering(monkeypatch, dialect, lambda sql: rows if dialect is ORACLE else [rows])
    query = ListQuery(namespace="test", num_shards=1, limit=50)
    listing = await dialect[1].list_timers(run, query)
    assert (listing.timers, listing.unreadable, listing.next) == ([timers[0], timers[2]], 1, None)
    other = await dialect[1].list_timers(run, ListQuery(namespace="other", num_shards=1, limit=50))
    assert (other.timers, other.unreadable) == ([], 0)


@both
async def test_an_unreadable_namespace_is_left_out(monkeypatch: pytest.MonkeyPatch, dialect: Dialect) -> None:
    rows = [("a", '{"name":"a","numShards":1,"createdAtMs":1}'), ("b", '{"name":5}')]
    run = answering(monkeypatch, dialect, lambda sql: rows if dialect is ORACLE else [rows])
    assert await dialect[0].namespaces(run) == [Namespace(name="a", num_shards=1, created_at_ms=1)]


@both
async def test_a_page_ends_after_the_timer_with_which_it_exceeds_chars_max(
    monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    timers = [make_timer(f"t-{number}", 100 + number, payload="x" * 100) for number in range(4)]
    rows = [tuple(dialect[2](0, timer)[1:]) for timer in timers]
    run = answering(monkeypatch, dialect, lambda sql: list(rows))
    for chars_max, count in ((0, 1), (99, 1), (100, 2), (250, 3), (399, 4), (1 << 62, 4)):
        [page] = await dialect[0].load(run, [PageRequest(0, BEFORE_ALL, 500, 4, chars_max)])
        assert list(page.timers) == timers[:count]
        assert page.next == (None if count == 4 else timers[count - 1].position)


@both
async def test_a_list_reads_again_what_the_server_left_out(monkeypatch: pytest.MonkeyPatch, dialect: Dialect) -> None:
    timers = [make_timer(f"t-{number}", 100 + number, payload="x" * 5_000) for number in range(3)]
    whole = [tuple(dialect[2](0, timer)[1:]) for timer in timers]
    answers = [[(*spoilt(row, "timer_payload", None), 5_000, 0) for row in whole], [(*row, 5_000, 0) for row in whole]]
    run = answering(monkeypatch, dialect, lambda sql: answers.pop(0) if dialect is ORACLE else [answers.pop(0)])
    listing = await dialect[1].list_timers(run, ListQuery(namespace="test", num_shards=1, limit=50, chars_max=12_000))
    assert (listing.timers, listing.next, answers) == (timers, None, [])
