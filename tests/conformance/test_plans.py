"""How SQLite, PostgreSQL, MySQL and MariaDB find what is due and what belongs to a correlation id: each by one index,
as EXPLAIN says, with no table read whole and nothing sorted.

The statements are those that the stores send: they are recorded while a page is loaded and while timers are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

from duetime.domain.timer import BEFORE_ALL, Outcome
from duetime.store import Batch, ListQuery, PageRequest, Store, open_store
from duetime.stores.mysql import connection as mysql_connection
from duetime.stores.mysql import reads as mysql_reads
from duetime.stores.postgres import connection as postgres_connection
from duetime.stores.postgres import listing as postgres_listing
from duetime.stores.postgres import statements as postgres_statements
from duetime.stores.sqlite import listing as sqlite_listing
from duetime.stores.sqlite import statements as sqlite_statements
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import take
from servers import fresh_database, require

# The next due timers of a shard: what an owner loads up to its horizon, where the seed polls.
DUE: Final = [PageRequest(0, BEFORE_ALL, 1_500, 10)]
IN_RANGE: Final = ListQuery(namespace="test", num_shards=2, limit=5, due_from_ms=1_100, due_until_ms=1_500)
TRACE: Final = ListQuery(namespace="test", num_shards=2, limit=5, correlation_id="c")
REACHED_TRACE: Final = ListQuery(
    namespace="test", num_shards=2, limit=5, correlation_id="c", outcomes=frozenset(Outcome)
)
VIEW: Final = "SELECT * FROM timer_schedules WHERE correlation_id = 'c'"


_filled: dict[str, str] = {}  # by server: the URL of a database with timers, which the tests only read


async def filled(server: str) -> str:
    if server not in _filled:
        url = fresh_database(require(server))
        await fill(open_store(url))
        _filled[server] = url
    return _filled[server]


async def fill(store: Store) -> None:
    await store.migrate()
    await store.open()
    try:
        await store.ensure_shards(2)
        fence = await take(store, 0)
        timers = [make_timer(f"t-{n}", 1_000 + n, correlation_id="c" if n % 50 == 0 else None) for n in range(400)]
        await store.commit([Batch(fence, timers, (), [make_reached(timer) for timer in timers[::10]])])
        await store.commit([Batch(fence, [make_timer("t", namespace="other"), make_timer("t", namespace="unknown")])])
    finally:
        await store.close()


# --- SQLite --------------------------------------------------------------------------------------


@pytest.fixture
async def sqlite(tmp_path: Path) -> apsw.Connection:
    await fill(open_store(f"sqlite:///{tmp_path}/duetime.db"))
    return apsw.Connection(str(tmp_path / "duetime.db"))


def sqlite_plans(db: apsw.Connection, work: Any) -> list[str]:
    sent: list[tuple[str, Any]] = []

    def record(_: Any, sql: str, bindings: Any) -> bool:
        sent.append((sql, bindings))
        return True

    db.exec_trace = record
    work(db)
    db.exec_trace = None
    assert sent
    return [
        "\n".join(str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", bindings)) for sql, bindings in sent
    ]


@pytest.mark.parametrize(
    ("work", "search"),
    [
        (lambda db: sqlite_statements.load(db, DUE), "SEARCH timers USING PRIMARY KEY (shard_id=? AND row_type=? AND"),
        (lambda db: sqlite_listing.list_timers(db, IN_RANGE), "SEARCH timers USING PRIMARY KEY (shard_id=? AND row_t"),
        *(
            (
                lambda db, query=query: sqlite_listing.list_timers(db, query),
                "SEARCH timers USING INDEX timers_by_correlation "
                "(timer_correlation_id=? AND timer_namespace=? AND row_type=? AND ",
            )
            for query in (TRACE, REACHED_TRACE)
        ),
        (
            lambda db: sqlite_listing.next_namespace(db, "c", "a"),
            "SEARCH timers USING COVERING INDEX timers_by_correlation (timer_correlation_id=? AND timer_namespace>?)",
        ),
    ],
    ids=["due", "due range", "correlation", "reached correlation", "namespaces"],
)
async def test_sqlite_finds_timers_by_an_index(sqlite: apsw.Connection, work: Any, search: str) -> None:
    for plan in sqlite_plans(sqlite, work):
        assert search in plan
        assert "SCAN timers" not in plan
        assert "ORDER BY" not in plan, "nothing is sorted"


async def test_the_view_of_sqlite_finds_a_correlation_id_by_its_index(sqlite: apsw.Connection) -> None:
    [plan] = sqlite_plans(sqlite, lambda db: db.execute(VIEW).fetchall())
    assert plan.count("USING INDEX timers_by_correlation (timer_correlation_id=?") == 2
    assert "SCAN timers" not in plan


async def test_the_index_of_sqlite_has_no_timers_without_a_correlation_id(sqlite: apsw.Connection) -> None:
    [entries, timers] = sqlite.execute(
        "SELECT (SELECT sum(ncell) FROM dbstat WHERE name = 'timers_by_correlation' AND pagetype = 'leaf'),"
        " (SELECT count(*) FROM timers WHERE timer_correlation_id IS NOT NULL)"
    ).fetchone() or (0, 0)
    assert entries == timers == 8 + 8


# --- PostgreSQL ----------------------------------------------------------------------------------


async def postgres_plans(version: int, work: Any) -> list[list[str]]:
    """The lines of each plan, in a session as the store has it."""
    url = await filled(f"postgres{version}")
    db = await postgres_connection.connect(postgres_connection.address_of(url))
    plans: list[list[str]] = []

    async def run(sql: str, /, *args: Any) -> list[Any]:
        plans.append([row[0].strip() for row in await db.fetch(f"EXPLAIN {sql}", *args)])
        return await db.fetch(sql, *args)

    try:
        await work(run)
    finally:
        db.terminate()
    assert plans
    return plans


@pytest.mark.parametrize("version", [15, 18])
@pytest.mark.parametrize(
    ("work", "columns"),
    [
        (lambda run: postgres_statements.load(run, DUE), ("row_type", "shard_id", "timer_execute_at")),
        (lambda run: postgres_listing.list_timers(run, IN_RANGE), ("row_type", "shard_id", "timer_execute_at")),
        (lambda run: postgres_listing.list_timers(run, TRACE), ("timer_correlation_id", "timer_namespace", "row_type")),
        (
            lambda run: postgres_listing.list_timers(run, REACHED_TRACE),
            ("timer_correlation_id", "timer_namespace", "row_type"),
        ),
        (
            lambda run: postgres_listing.next_namespace(run, "c", "a"),
            ("timer_correlation_id", "timer_namespace > "),
        ),
        (lambda run: run(VIEW), ("timer_correlation_id",)),
    ],
    ids=["due", "due range", "correlation", "reached correlation", "namespaces", "view"],
)
async def test_postgresql_finds_timers_by_an_index(version: int, work: Any, columns: Sequence[str]) -> None:
    for plan in await postgres_plans(version, work):
        assert not [line for line in plan if "Seq Scan" in line or line.startswith(("Sort  (", "->  Sort  ("))]
        conditions = [line for line in plan if line.startswith("Index Cond")]
        assert len(conditions) >= 32, "one for each partition"
        found_by = [line for line in conditions if all(column in line for column in columns)]
        # The view also looks for a later timer with the id of each reached one.
        assert len(found_by) == (64 if columns == ("timer_correlation_id",) else len(conditions)), plan


# --- MySQL and MariaDB ---------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["mariadb", "mysql"])
@pytest.mark.parametrize(
    ("work", "index"),
    [
        (lambda read: mysql_reads.load(read, DUE), "PRIMARY"),
        (lambda read: mysql_reads.list_timers(read, IN_RANGE), "PRIMARY"),
        (lambda read: mysql_reads.list_timers(read, TRACE), "timers_by_correlation"),
        (lambda read: mysql_reads.list_timers(read, REACHED_TRACE), "reached_by_correlation"),
        (lambda read: mysql_reads.next_namespace(read, "c", "a"), "_by_correlation"),
    ],
    ids=["due", "due range", "correlation", "reached correlation", "namespaces"],
)
async def test_mysql_finds_timers_by_an_index(server: str, work: Any, index: str) -> None:
    url = await filled(server)
    db = await mysql_connection.connect(mysql_connection.address_of(url))
    as_table = "FORMAT=TRADITIONAL " if server == "mysql" else ""  # MariaDB has no other form for people
    steps: list[Sequence[Any]] = []

    async def read(statements: Sequence[str], /) -> list[Any]:
        for sql in statements:
            [plan] = await mysql_connection.execute(db, (f"EXPLAIN {as_table}{sql}",))
            steps.extend(plan)
        return await mysql_connection.execute(db, statements)

    try:
        await work(read)
    finally:
        await db.ensure_closed()
    of_tables = [step for step in steps if step[2] in ("timers", "reached")]
    assert of_tables
    for step in of_tables:
        assert any(str(value).endswith(index) for value in step), step
        assert {"range", "ref"} & set(step), step
        assert "filesort" not in str(step[-1]), step
