"""The statements of PostgresStore, and the functions that run them and decode the results.

A commit is one statement and one round trip. Its first step locks the shard rows, ordered by id, and checks the fences;
the other steps are executed only if all fences are valid. The lock makes the fence safe: it waits for a claim that is
not committed yet, and a row that the claim changed does not match any more. Batches are passed as arrays, one for each
column. Times are passed as milliseconds and converted to timestamps by the server, which is exact from 1970 to 9999 and
costs the client nothing.

Tables are named without a schema: the search path of the session selects it.

No plan may depend on statistics, because a plan is made once, perhaps while the table is empty, and kept. PostgreSQL
has no hints, so every statement is written so that there is only one possible plan. Sessions plan only with nested
loops and indexes (connection.py). The outer side of a join is the keys or the fences, because the table can be accessed
in no other way: through LATERAL with an OFFSET or a LIMIT, or by a complete key whose columns, including row_type, all
come from the outer side. And each condition matches one index: conditions by time name row_type; conditions by id never
do, they name timer_outcome. tests/conformance/test_postgres_zombies.py counts the rows that are read.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from duetime.domain.timer import ROW_FORMAT, Namespace, TimerKey
from duetime.errors import MemberDead, ShardLost
from duetime.store import Batch, Claim, Committed, Fence, Found, Member, Page, PageRequest, ShardRow
from duetime.stores.fencing import NOTHING_REPLACED, committed, in_steps, lost, shard_rounds
from duetime.stores.postgres.rows import (
    COLUMNS,
    IF_NULL,
    KEY,
    SCHEDULED_AT,
    at,
    common_columns,
    ms,
    own_columns,
    reached_columns,
    selected,
    shard_row,
)
from duetime.stores.rows import (
    Row,
    StoredRows,
    as_json,
    bound_ms,
    found_by_key,
    namespaces_of,
    page_of,
    position_of,
)

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in one result; pages that would be longer are made shorter


class Run(Protocol):
    """Runs one statement in a session."""

    def __call__(self, sql: str, /, *args: Any) -> Awaitable[list[Any]]: ...


# --- SQL -----------------------------------------------------------------------------------------


_KEY_OF_ROW = "t.row_type, t.timer_execute_at AS at, t.timer_uuid_high AS high, t.timer_uuid_low AS low"
_IS_ROW_OF = """t.row_type = f.row_type AND t.shard_id = f.shard_id
  AND t.timer_execute_at = f.at AND t.timer_uuid_high = f.high AND t.timer_uuid_low = f.low"""
_IS_TIMER_OF_KEY = """t.timer_outcome IS NULL AND t.shard_id = k.shard_id
    AND t.timer_namespace = k.timer_namespace AND t.timer_id = k.timer_id"""


class _Arguments:
    """Numbers the arguments of a statement that is built from parts."""

    def __init__(self) -> None:
        self.count = 0

    def arrays(self, *types: str) -> list[str]:
        first = self.count + 1
        self.count += len(types)
        return [f"${number}::{kind}[]" for number, kind in enumerate(types, first)]


def _fence(arguments: _Arguments, *, to_change_it: bool = False) -> str:
    """Locks one shard row after the other, in the given order, and returns those whose fence is valid."""
    given = ", ".join(arguments.arrays("int", "bigint", "bigint"))
    return f"""fence AS MATERIALIZED (
  SELECT f.shard_id FROM unnest({given}) AS f(shard_id, version, nonce)
  WHERE shard_fence_holds(f.shard_id, f.version, f.nonce, {to_change_it}))"""  # noqa: S608


def _insert(arguments: _Arguments, row_type: int, after: str, keys: Sequence[str] = ()) -> str:
    """An array may be shorter than the others: missing values are NULL, or what IF_NULL says.

    `keys`: the arguments for shard, namespace and id, if the statement has them already.
    """
    columns = COLUMNS[row_type]
    known = dict(zip(("shard_id", "timer_namespace", "timer_id"), keys, strict=False))
    wanted = [("shard_id", "int"), *((name, kind) for name, kind, _ in columns)]
    given = ", ".join(known.get(name) or arguments.arrays(kind)[0] for name, kind in wanted)
    names = ", ".join(name for name, _, _ in columns)
    full = {name: f"coalesce({name}, {instead})" for name, instead in IF_NULL.items()}
    values = ", ".join(at(full.get(n, n)) if is_time else full.get(n, n) for n, _, is_time in columns)
    # The timers that puts replace are deleted before this. A reached row that is stored already does not change.
    conflict = " ON CONFLICT DO NOTHING" if row_type == 3 else ""
    return f"""INSERT INTO timers (row_type, row_format, shard_id, {names})
  SELECT {row_type}, {ROW_FORMAT}, shard_id, {values} FROM unnest({given}) AS v(shard_id, {names})
  WHERE {after}{conflict}"""  # noqa: S608


@functools.cache
def commit_sql(puts: bool, deletes: bool, reached: bool, low_water: bool) -> str:
    """The commit, with only the parts that are needed. $1: how many fences have to be valid.

    The steps of one statement see the same snapshot, and their order is not defined. Each step reads the count of the
    step before it, which defines the order: the fences are locked before anything is removed, and removed rows are out
    of the unique indexes before anything is added.
    """
    arguments = _Arguments()
    arguments.count = 1
    # A new low water changes the shard row. With shared locks, two such commits would wait for each other: a deadlock.
    parts = [_fence(arguments, to_change_it=low_water)]
    all_valid = "(SELECT count(*) FROM fence) = $1::int"
    removed, answer, low_waters_set = all_valid, "'{}'::bigint[]", "0"
    put_keys: list[str] | None = None
    if puts or deletes:
        # The keys of the puts come first: those that are found among them are replaced.
        key_types = ("int", "text", "text")
        put_keys, gone_keys = (arguments.arrays(*key_types) if some else None for some in (puts, deletes))
        keys = ", ".join(" || ".join(some) for some in zip(*(k for k in (put_keys, gone_keys) if k), strict=True))
        parts.append(f"""found AS MATERIALIZED (
  SELECT k.number, k.shard_id, t.*
  FROM unnest({keys}) WITH ORDINALITY AS k(shard_id, timer_namespace, timer_id, number)
  CROSS JOIN LATERAL (
    SELECT {_KEY_OF_ROW} FROM timers AS t WHERE {_IS_TIMER_OF_KEY} OFFSET 0) AS t
  WHERE {all_valid}),
gone AS (DELETE FROM timers AS t USING found AS f WHERE {_IS_ROW_OF} RETURNING f.number)""")  # noqa: S608
        removed = f"{all_valid} AND (SELECT count(*) FROM gone) >= 0"  # noqa: S608
        answer = "ARRAY(SELECT number FROM gone)"
    if puts:
        parts.append(f"put AS ({_insert(arguments, 2, removed, put_keys or ())})")
    if reached:
        parts.append(f"ended AS ({_insert(arguments, 3, all_valid)})")
    if low_water:
        given = ", ".join(arguments.arrays("int", "bigint", "bigint", "bigint"))
        parts.append(f"""water AS MATERIALIZED (
  SELECT shard_set_low_water(w.shard_id, ARRAY[w.at_ms, w.high, w.low])
  FROM unnest({given}) AS w(shard_id, at_ms, high, low) WHERE {all_valid})""")  # noqa: S608
        low_waters_set = "(SELECT count(*) FROM water)"  # selected, because otherwise the step would not be executed
    return f"WITH {', '.join(parts)}\nSELECT ARRAY(SELECT shard_id FROM fence), {answer}, {low_waters_set}, $1::int"  # noqa: S608


_SHARD = (
    "s.shard_id, s.shard_version, s.shard_nonce, s.shard_owner_id, s.shard_owner_address,"
    f" {ms('s.shard_claimed_at')}, s.shard_low_water"
)
_SHARDS = f"SELECT {_SHARD} FROM shards AS s ORDER BY s.shard_id"  # noqa: S608
# The lock reads the current row, which may be newer than the snapshot. It is the result of a claim that fails.
_CLAIM = f"""
WITH found AS MATERIALIZED (
  SELECT f.*, s.shard_version, s.shard_nonce, s.shard_owner_id, s.shard_owner_address, s.shard_claimed_at,
    s.shard_low_water
  FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[])
    AS f(shard_id, version, nonce, owner_id, owner_address, now_ms)
  CROSS JOIN LATERAL (SELECT * FROM shards AS s WHERE s.shard_id = f.shard_id FOR UPDATE) AS s),
taken AS (
  UPDATE shards AS s SET shard_version = f.version + 1, shard_nonce = f.nonce, shard_owner_id = f.owner_id,
    shard_owner_address = f.owner_address, shard_claimed_at = {at("f.now_ms")}
  FROM found AS f WHERE f.shard_version = f.version AND s.shard_id = f.shard_id RETURNING {_SHARD})
SELECT {_SHARD} FROM found AS s WHERE s.shard_version <> s.version UNION ALL SELECT * FROM taken
"""  # noqa: S608


def _release_sql() -> str:
    fence = _fence(_Arguments(), to_change_it=True)
    return f"""
WITH {fence}
UPDATE shards AS s SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL,
  shard_claimed_at = {at("0")}
FROM fence AS f WHERE s.shard_id = f.shard_id RETURNING s.shard_id
"""  # noqa: S608


def _purge_sql() -> str:
    fence = _fence(_Arguments())
    return f"""
WITH {fence},
old AS MATERIALIZED (
  SELECT f.shard_id, k.* FROM fence AS f CROSS JOIN LATERAL (
    SELECT {_KEY_OF_ROW} FROM timers AS t
    WHERE t.shard_id = f.shard_id AND t.row_type = 3 AND t.timer_execute_at < {at("$4::bigint")}
    ORDER BY {KEY} LIMIT $5::int) AS k),
gone AS (
  DELETE FROM timers AS t USING old AS f WHERE {_IS_ROW_OF} RETURNING t.shard_id)
SELECT shard_id, count(*) - 1 FROM (SELECT shard_id FROM fence UNION ALL SELECT shard_id FROM gone) AS all_of_them
GROUP BY shard_id
"""  # noqa: S608


_RELEASE = _release_sql()
_PURGE = _purge_sql()
_ENSURE_SHARDS = f"""
INSERT INTO shards (shard_id, shard_version, shard_nonce, shard_claimed_at)
SELECT id, 0, 0, {at("0")} FROM generate_series(0, $1::int - 1) AS id ON CONFLICT DO NOTHING
"""  # noqa: S608


# A page ends after the timer with which its payloads exceed the limit. `total` shows that it was cut.
_LOAD = f"""
SELECT {selected(2)}, s.number, t.total
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::int[], $7::bigint[])
  WITH ORDINALITY AS s(shard_id, at, high, low, until, most, bytes_max, number)
CROSS JOIN LATERAL (
  SELECT *, count(*) OVER () AS total, coalesce(sum(octet_length(timer_payload)) OVER (
    ORDER BY {KEY} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS weight
  FROM (
    SELECT * FROM timers
    WHERE shard_id = s.shard_id AND row_type = 2 AND ({KEY}) > ({at("s.at")}, s.high, s.low)
    AND timer_execute_at <= {at("s.until")}
    ORDER BY {KEY} LIMIT s.most) AS page) AS t
WHERE t.weight <= s.bytes_max
"""  # noqa: S608


@functools.cache
def get_sql(reached_max: int) -> str:
    """Timers and reached rows in one statement, so that both are of the same snapshot. Columns that a timer does not
    have are NULL."""
    return f"""
WITH k AS MATERIALIZED (
  SELECT * FROM unnest($1::int[], $2::text[], $3::text[])
  WITH ORDINALITY AS k(shard_id, timer_namespace, timer_id, number))
SELECT {selected(2)}, NULL::bigint, NULL::bigint, NULL::bigint, NULL::text, NULL::bigint, k.number, 2
FROM k CROSS JOIN LATERAL (SELECT * FROM timers AS t WHERE {_IS_TIMER_OF_KEY} OFFSET 0) AS t
UNION ALL
SELECT {selected(3)}, k.number, 3 FROM k CROSS JOIN LATERAL (
  SELECT * FROM timers WHERE timer_outcome IS NOT NULL AND shard_id = k.shard_id
  AND timer_namespace = k.timer_namespace AND timer_id = k.timer_id
  ORDER BY timer_generation DESC, timer_reached_at DESC,
    timer_execute_at DESC, timer_uuid_high DESC, timer_uuid_low DESC LIMIT {reached_max}) AS t
"""  # noqa: S608


# --- fences --------------------------------------------------------------------------------------


def _fence_columns(fences: Sequence[Fence]) -> list[list[int]]:
    return [
        [fence.shard_id for fence in fences],
        [fence.version for fence in fences],
        [fence.nonce for fence in fences],
    ]


# --- members -------------------------------------------------------------------------------------

# The timeline of the log changes with a failover or a restore.
TIMELINE = "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
NO_TIMELINE = "''"


async def join(run: Run, member: Member, timeline: str) -> str:
    """A second join changes nothing. A dead member stays dead. Returns the timeline."""
    rows = await run(
        f"""WITH new AS (
  INSERT INTO members (instance_id, address, counter, alive, joined_at, secret)
  VALUES ($1, $2, $3, $4, {at("$5::bigint")}, $6) ON CONFLICT DO NOTHING RETURNING alive)
SELECT alive, {timeline} FROM (SELECT alive FROM new UNION ALL SELECT alive FROM members WHERE instance_id = $1) AS m
""",  # noqa: S608 - TIMELINE or NO_TIMELINE
        member.instance_id,
        member.address,
        member.counter,
        member.alive,
        member.joined_at_ms,
        member.secret,
    )
    if not rows or not rows[0][0]:
        raise MemberDead(f"{member.instance_id} was declared dead")
    return str(rows[0][1])


async def heartbeat(run: Run, instance_id: str, counter: int, timeline: str) -> tuple[int, str]:
    rows = await run(
        f"""UPDATE members SET counter = greatest(counter, $2) WHERE instance_id = $1 AND alive
RETURNING {ms("clock_timestamp()")}, {timeline}""",  # noqa: S608 - TIMELINE or NO_TIMELINE
        instance_id,
        counter,
    )
    if not rows:
        raise MemberDead(f"{instance_id} was declared dead")
    return int(rows[0][0]), str(rows[0][1])


async def members(run: Run) -> list[Member]:
    rows = await run(
        f"SELECT instance_id, address, counter, alive, {ms('joined_at')}, secret FROM members ORDER BY instance_id"  # noqa: S608
    )
    return [Member(*row) for row in rows]


async def mark_dead(run: Run, instance_id: str, counter: int) -> bool:
    [row] = await run(
        """WITH dead AS (
  UPDATE members SET alive = false WHERE instance_id = $1 AND counter = $2 RETURNING 1)
SELECT EXISTS (SELECT 1 FROM dead) OR NOT EXISTS (SELECT 1 FROM members WHERE instance_id = $1 AND alive)""",
        instance_id,
        counter,
    )
    return bool(row[0])


async def forget_member(run: Run, instance_id: str) -> None:
    await run("DELETE FROM members WHERE instance_id = $1 AND NOT alive", instance_id)


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(run: Run, count: int) -> None:
    await run(_ENSURE_SHARDS, count)


async def shards(run: Run) -> list[ShardRow]:
    return [shard_row(row) for row in await run(_SHARDS)]


async def claim(run: Run, claims: Sequence[Claim]) -> list[ShardRow]:
    rows: dict[int, ShardRow] = {}
    run = in_steps(run)
    for indexes in shard_rounds([claim.shard_id for claim in claims]):
        group = [claims[index] for index in indexes]
        answer = await run(
            _CLAIM,
            [c.shard_id for c in group],
            [c.expected_version for c in group],
            [c.nonce for c in group],
            [c.owner_id for c in group],
            [c.owner_address for c in group],
            [c.now_ms for c in group],
        )
        rows.update((row[0], shard_row(row)) for row in answer)
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def release(run: Run, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    run = in_steps(run)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        rows = await run(_RELEASE, *_fence_columns([fences[index] for index in indexes]))
        released = {row[0] for row in rows}
        for index in indexes:
            if fences[index].shard_id not in released:
                results[index] = lost(fences[index])
    return results


# --- timers --------------------------------------------------------------------------------------


async def commit(run: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    run = in_steps(run)
    for indexes in shard_rounds([batch.fence.shard_id for batch in batches]):
        for index, result in zip(indexes, await _commit_round(run, [batches[index] for index in indexes]), strict=True):
            results[index] = result
    return results


async def _commit_round(run: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    """Commits all batches or, if a fence failed, nothing. Then the batches whose fence is valid are committed."""
    [[owned, found, *_]] = await run(*commit_call(batches))
    if len(owned) < len(batches):
        good = [batch for batch in batches if batch.fence.shard_id in set(owned)]
        done = dict(zip((b.fence.shard_id for b in good), await _commit_round(run, good) if good else (), strict=True))
        return [done.get(batch.fence.shard_id) or lost(batch.fence) for batch in batches]
    return committed(batches, [number - 1 for number in found])


def commit_call(batches: Sequence[Batch]) -> tuple[Any, ...]:
    """The statement and its arguments. No two batches are of the same shard."""
    args: list[Any] = [len(batches), *_fence_columns([batch.fence for batch in batches])]
    puts = [timer for batch in batches for timer in batch.puts]
    deletes = [key for batch in batches for key in batch.deletes]
    reached = [ended for batch in batches for ended in batch.reached]
    low_waters = [(batch.fence.shard_id, *batch.low_water) for batch in batches if batch.low_water is not None]
    put_shards = [batch.fence.shard_id for batch in batches for _ in batch.puts]
    columns = common_columns(puts) if puts else []
    if puts:
        args += (put_shards, columns[0], columns[1])
    if deletes:
        args.append([batch.fence.shard_id for batch in batches for _ in batch.deletes])
        args.append([key.namespace for key in deletes])
        args.append([key.timer_id for key in deletes])
    if puts:
        if all(timer.scheduled_at_ms == timer.execute_at_ms for timer in puts):
            columns[SCHEDULED_AT] = []
        args += (*own_columns(puts), *columns[2:])
    if reached:
        args.append([batch.fence.shard_id for batch in batches for _ in batch.reached])
        args += reached_columns(reached)
    if low_waters:
        args += ([low_water[part] for low_water in low_waters] for part in range(4))
    return commit_sql(bool(puts), bool(deletes), bool(reached), bool(low_waters)), *args


async def load(run: Run, requests: Sequence[PageRequest]) -> list[Page]:
    if not requests:
        return []
    rows = await run(
        _LOAD,
        [request.shard_id for request in requests],
        [bound_ms(request.after.execute_at_ms) for request in requests],
        [request.after.uuid_high for request in requests],
        [request.after.uuid_low for request in requests],
        [bound_ms(request.until_ms) for request in requests],
        [request.limit + 1 for request in requests],
        [min(request.chars_max, LOAD_BYTES_MAX // len(requests)) for request in requests],
    )
    pages: list[list[Row]] = [[] for _ in requests]
    for row in rows:
        pages[row[-2] - 1].append(row)
    return [_page(request, found) for request, found in zip(requests, pages, strict=True)]


def _page(request: PageRequest, rows: list[Row]) -> Page:
    """The last column of each row is how many rows matched, at most limit + 1. Some of them may have been cut off."""
    total = rows[0][-1] if rows else 0
    if total <= request.limit and len(rows) == total:
        return page_of(rows, None)
    del rows[request.limit :]
    return page_of(rows, position_of(rows[-1]))


Key = tuple[int, TimerKey]


async def get_many(run: Run, keys: Sequence[Key]) -> list[Found]:
    if not keys:
        return []
    found = await found_by_key(list(dict.fromkeys(keys)), functools.partial(_stored_rows, run))
    return [found[key] for key in keys]


async def _stored_rows(run: Run, keys: Sequence[Key], reached_max: int) -> StoredRows[Key]:
    rows = await run(
        get_sql(reached_max),
        [shard_id for shard_id, _ in keys],
        [key.namespace for _, key in keys],
        [key.timer_id for _, key in keys],
    )
    timers: dict[Key, Row] = {}
    reached_rows: dict[Key, list[Row]] = {}
    for row in rows:
        key = keys[row[-2] - 1]
        if row[-1] == 2:
            timers[key] = row
        else:
            reached_rows.setdefault(key, []).append(row)
    return timers, reached_rows


async def purge_reached(run: Run, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    run = in_steps(run)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        some = [fences[index] for index in indexes]
        removed = dict(await run(_PURGE, *_fence_columns(some), bound_ms(before_ms), limit))
        for index in indexes:
            count = removed.get(fences[index].shard_id)
            results[index] = lost(fences[index]) if count is None else count
    return results


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(run: Run) -> list[Namespace]:
    return namespaces_of(await run("SELECT name, body FROM namespaces"))


async def put_namespace(run: Run, namespace: Namespace, expected_revision: int | None) -> bool:
    values = (namespace.name, namespace.num_shards, namespace.revision, as_json(namespace))
    if expected_revision is None:
        rows = await run(
            "INSERT INTO namespaces (name, num_shards, revision, body) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT DO NOTHING RETURNING 1",
            *values,
        )
    else:
        rows = await run(
            "UPDATE namespaces SET num_shards = $2, revision = $3, body = $4 WHERE name = $1 AND revision = $5"
            " RETURNING 1",
            *values,
            expected_revision,
        )
    return len(rows) == 1
