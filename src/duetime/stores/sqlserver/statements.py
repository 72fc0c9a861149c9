"""The statements of SqlServerStore, and the functions that run them and decode the results.

A write is one batch, in one message, that begins a transaction and ends it. So a client that freezes or is disconnected
does not leave locks behind. COMMIT is the last statement, so that an error always comes before it. The batch first
locks the shard rows (UPDLOCK, and HOLDLOCK until the end of the transaction, row by row) and reads them under that
lock. Also under READ_COMMITTED_SNAPSHOT this reads the current row, and waits for a claim that is not committed yet.
The rest is executed only if all fences are valid; if one is not, the other batches are written without it.

Timers that puts replace are deleted by id, and then all are inserted: two timers of a batch may exchange their
positions, and a MERGE uses only one key and has known bugs.

Every access names its index, and joins go from the rows of the document to those of the table (LOOP): no plan depends
on statistics, and no statement locks other rows than it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import MemberDead, ShardLost
from duetime.store import Batch, Claim, Committed, Fence, Found, Member, Page, PageRequest, ShardRow
from duetime.stores.fencing import NOTHING_REPLACED, committed, in_steps, lost, shard_rounds
from duetime.stores.rows import (
    KEY_COLUMNS,
    TIMER_COLUMNS,
    Row,
    StoredRows,
    as_json,
    bound_ms,
    found_by_key,
    namespaces_of,
    page_of,
    rows_of_page,
)
from duetime.stores.sqlserver.connection import Connection, Run, execute, fetch_until
from duetime.stores.sqlserver.rows import (
    KEY,
    ROW_READER,
    SHARD,
    as_bytes,
    at,
    document,
    insert_sql,
    json_rows,
    ms,
    reached_row,
    selected,
    shard_row,
    timer_row,
)

LOAD_CHARS_MAX = 32 * 1024 * 1024  # of payloads in the pages of one load
KEYS_AT_ONCE = 500

_PAYLOAD = TIMER_COLUMNS.index("timer_payload")

# --- SQL -----------------------------------------------------------------------------------------


def transaction(sql: str) -> str:
    """A batch that is one transaction. It fails if a transaction is open, because then its COMMIT would not commit."""
    return f"""SET NOCOUNT ON; SET XACT_ABORT ON;
IF @@TRANCOUNT > 0 THROW 50000, 'a transaction is open', 1;
DECLARE @doc nvarchar(max) = ?;
BEGIN TRANSACTION;
{sql}
COMMIT TRANSACTION;"""


def query(sql: str) -> str:
    return f"SET NOCOUNT ON;\nDECLARE @doc nvarchar(max) = ?;\n{sql}"


_LOCKED = "WITH (UPDLOCK, HOLDLOCK, ROWLOCK, INDEX(shards_key))"
_FENCES = json_rows("$.fences", shard_id="int", version="bigint", nonce="bigint")
_FENCE_IS_VALID = "s.shard_version = f.version AND s.shard_nonce = f.nonce AND s.shard_owner_id IS NOT NULL"
_FENCE = f"""DECLARE @held TABLE (shard_id int NOT NULL PRIMARY KEY);
INSERT INTO @held SELECT s.shard_id FROM {_FENCES} AS f
  INNER LOOP JOIN shards AS s {_LOCKED} ON s.shard_id = f.shard_id WHERE {_FENCE_IS_VALID} OPTION (MAXDOP 1);
SELECT shard_id FROM @held;"""  # noqa: S608
_KEYS = json_rows("$.keys", number="int", shard_id="int", timer_namespace="nvarchar(255)", timer_id="nvarchar(255)")
_OF_KEY = (
    f"t.shard_id = k.shard_id AND t.timer_namespace = {as_bytes('k.timer_namespace')}"
    f" AND t.timer_id = {as_bytes('k.timer_id')}"
)

COMMIT = transaction(f"""{_FENCE}
IF (SELECT COUNT(*) FROM @held) = (SELECT COUNT(*) FROM OPENJSON(@doc, '$.fences'))
BEGIN
  DELETE t OUTPUT k.number FROM {_KEYS} AS k
  INNER LOOP JOIN timers AS t WITH (ROWLOCK, INDEX(timers_by_id)) ON t.row_type = 2 AND {_OF_KEY} OPTION (MAXDOP 1);
  {insert_sql(2, "$.puts")}
  {insert_sql(3, "$.reached")}
  UPDATE s SET shard_low_water = w.place FROM {json_rows("$.waters", shard_id="int", place="varchar(100)")} AS w
  INNER LOOP JOIN shards AS s {_LOCKED} ON s.shard_id = w.shard_id OPTION (MAXDOP 1);
END;""")  # noqa: S608

_CLAIMS = json_rows(
    "$",
    shard_id="int",
    version="bigint",
    nonce="bigint",
    owner_id="nvarchar(255)",
    owner_address="nvarchar(2048)",
    claimed_at="datetime2(3)",
)
CLAIM = transaction(f"""UPDATE s SET shard_version = c.version + 1, shard_nonce = c.nonce, shard_owner_id = c.owner_id,
  shard_owner_address = c.owner_address, shard_claimed_at = c.claimed_at FROM {_CLAIMS} AS c
  INNER LOOP JOIN shards AS s {_LOCKED} ON s.shard_id = c.shard_id WHERE s.shard_version = c.version OPTION (MAXDOP 1);
SELECT {SHARD} FROM {json_rows("$", shard_id="int")} AS c
  INNER LOOP JOIN shards AS s {_LOCKED} ON s.shard_id = c.shard_id OPTION (MAXDOP 1);""")  # noqa: S608
RELEASE = transaction(f"""UPDATE s SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL,
  shard_claimed_at = '1970-01-01T00:00:00' OUTPUT inserted.shard_id FROM {_FENCES} AS f
  INNER LOOP JOIN shards AS s {_LOCKED} ON s.shard_id = f.shard_id WHERE {_FENCE_IS_VALID} OPTION (MAXDOP 1);""")  # noqa: S608
SHARDS = f"SELECT {SHARD} FROM shards AS s ORDER BY s.shard_id"  # noqa: S608
ENSURE_SHARDS = transaction("""INSERT INTO shards (shard_id, shard_version, shard_nonce, shard_claimed_at)
  SELECT v.shard_id, 0, 0, '1970-01-01T00:00:00' FROM OPENJSON(@doc) WITH (shard_id int '$') AS v
  WHERE NOT EXISTS (SELECT 1 FROM shards AS s WITH (UPDLOCK, HOLDLOCK) WHERE s.shard_id = v.shard_id);""")

# Deletes the oldest rows, so that the remaining rows are one range.
PURGE = transaction(f"""{_FENCE}
DECLARE @before datetime2(3) = CAST(JSON_VALUE(@doc, '$.before') AS datetime2(3));
DECLARE @most int = CAST(JSON_VALUE(@doc, '$.most') AS int);
DELETE t OUTPUT deleted.shard_id FROM @held AS h
  CROSS APPLY (SELECT TOP (@most) {KEY} FROM timers AS o WITH (INDEX(timers_key)) WHERE o.shard_id = h.shard_id
    AND o.row_type = 3 AND o.timer_execute_at < @before ORDER BY {KEY}) AS k
  INNER JOIN timers AS t WITH (ROWLOCK, INDEX(timers_key)) ON t.shard_id = h.shard_id AND t.row_type = 3
    AND {" AND ".join(f"t.{name} = k.{name}" for name in KEY_COLUMNS)}
  OPTION (LOOP JOIN, FORCE ORDER, MAXDOP 1);""")  # noqa: S608


def scan_sql(row_type: int, columns: str, *, by_correlation: bool = False) -> str:
    """The next rows of some shards, each with the number of its scan."""
    where = "t.shard_id = s.shard_id"
    index = "INDEX(timers_key)"
    if by_correlation:
        where = (
            f"t.timer_correlation_id IS NOT NULL AND t.timer_correlation_id = {as_bytes('@correlation_id')}"
            f" AND t.timer_namespace = {as_bytes('@namespace')} AND t.shard_id < s.shard_id"
        )
        index = "INDEX(timers_by_correlation)"
    scans = json_rows(
        "$.scans",
        number="int",
        shard_id="int",
        place_at="datetime2(3)",
        place_high="bigint",
        place_low="bigint",
        until_at="datetime2(3)",
        most="int",
    )
    return f"""SELECT t.*, s.number FROM {scans} AS s
CROSS APPLY (SELECT TOP (s.most) {columns} FROM timers AS t WITH ({index})
  WHERE {where} AND t.row_type = {row_type} AND t.timer_execute_at >= s.place_at
  AND (t.timer_execute_at > s.place_at OR t.timer_uuid_high > s.place_high
    OR (t.timer_uuid_high = s.place_high AND t.timer_uuid_low > s.place_low))
  AND t.timer_execute_at <= s.until_at
  ORDER BY {", ".join(f"t.{name}" for name in KEY_COLUMNS)}) AS t
OPTION (LOOP JOIN, FORCE ORDER, MAXDOP 1);"""  # noqa: S608


LOAD = query(scan_sql(2, selected(2)))


@cache
def get_sql(reached_max: int) -> str:
    """The timers are read first, and locked until the reached rows were read. So both are of the same moment."""
    return transaction(f"""SET DEADLOCK_PRIORITY LOW;
SELECT {selected(2)}, k.number FROM {_KEYS} AS k
  INNER LOOP JOIN timers AS t WITH (HOLDLOCK, ROWLOCK, INDEX(timers_by_id)) ON t.row_type = 2 AND {_OF_KEY}
  OPTION (MAXDOP 1);
SELECT t.*, k.number FROM {_KEYS} AS k
  CROSS APPLY (SELECT TOP ({reached_max}) {selected(3)} FROM timers AS t WITH (INDEX(reached_by_id))
    WHERE t.row_type = 3 AND {_OF_KEY}
    ORDER BY {", ".join(f"t.{n} DESC" for n in ("timer_generation", "timer_reached_at", *KEY_COLUMNS))}) AS t
  OPTION (LOOP JOIN, FORCE ORDER, MAXDOP 1);""")  # noqa: S608


_MEMBER = json_rows(
    "$",
    instance_id="nvarchar(255)",
    address="nvarchar(2048)",
    counter="bigint",
    alive="bit",
    joined_at="datetime2(3)",
    secret="nvarchar(2048)",  # noqa: S106 - a type
)
_NAMED = f"instance_id = {as_bytes('m.instance_id')}"
JOIN = transaction(f"""INSERT INTO members (instance_id, address, counter, alive, joined_at, secret)
  SELECT {as_bytes("m.instance_id")}, m.address, m.counter, m.alive, m.joined_at, m.secret FROM {_MEMBER} AS m
  WHERE NOT EXISTS (SELECT 1 FROM members AS o WITH (UPDLOCK, HOLDLOCK) WHERE o.{_NAMED});
SELECT o.alive FROM {_MEMBER} AS m INNER JOIN members AS o ON o.{_NAMED};""")  # noqa: S608
_BEAT = json_rows("$", instance_id="nvarchar(255)", counter="bigint")
HEARTBEAT = transaction(f"""UPDATE o SET counter = CASE WHEN o.counter < m.counter THEN m.counter ELSE o.counter END
  FROM {_BEAT} AS m INNER LOOP JOIN members AS o WITH (ROWLOCK) ON o.{_NAMED} WHERE o.alive = 1;
SELECT @@ROWCOUNT, DATEDIFF_BIG(millisecond, CAST('1970-01-01' AS datetime2(3)), SYSUTCDATETIME());""")  # noqa: S608
MEMBERS = "SELECT CAST(instance_id AS nvarchar(255)), address, counter, alive, joined_at, secret FROM members"
MARK_DEAD = transaction(f"""UPDATE o SET alive = 0
  FROM {_BEAT} AS m INNER LOOP JOIN members AS o WITH (ROWLOCK) ON o.{_NAMED} WHERE o.counter = m.counter;
SELECT COUNT(*) FROM {_BEAT} AS m INNER JOIN members AS o ON o.{_NAMED} WHERE o.alive = 1;""")  # noqa: S608
FORGET = transaction(f"""DELETE o
  FROM {_BEAT} AS m INNER LOOP JOIN members AS o WITH (ROWLOCK) ON o.{_NAMED} WHERE o.alive = 0;""")

_NAMESPACE = json_rows(
    "$", name="nvarchar(255)", num_shards="int", revision="bigint", body="nvarchar(max)", expected="bigint"
)
NEW_NAMESPACE = transaction(f"""INSERT INTO namespaces (name, num_shards, revision, body)
  SELECT {as_bytes("n.name")}, n.num_shards, n.revision, n.body FROM {_NAMESPACE} AS n
  WHERE NOT EXISTS (SELECT 1 FROM namespaces AS o WITH (UPDLOCK, HOLDLOCK) WHERE o.name = {as_bytes("n.name")});
SELECT @@ROWCOUNT;""")  # noqa: S608
PUT_NAMESPACE = transaction(f"""UPDATE o SET num_shards = n.num_shards, revision = n.revision, body = n.body
  FROM {_NAMESPACE} AS n INNER LOOP JOIN namespaces AS o WITH (ROWLOCK) ON o.name = {as_bytes("n.name")}
  WHERE o.revision = n.expected;
SELECT @@ROWCOUNT;""")  # noqa: S608


def _execute(sql: str, document: str | None, db: Connection) -> list[list[Row]]:
    return execute(db, sql, document)


# --- members -------------------------------------------------------------------------------------


async def join(write: Run, member: Member, _: str) -> str:
    """A second join changes nothing. A dead member stays dead. Returns the history that the connection has read."""
    values = (
        member.instance_id,
        member.address,
        member.counter,
        member.alive,
        at(member.joined_at_ms),
        member.secret,
    )
    parameter = document([values])

    def work(db: Connection) -> tuple[list[Row], str]:
        [rows] = execute(db, JOIN, parameter)
        return rows, db.history

    rows, history = await write(work)
    if not rows or not rows[0][0]:
        raise MemberDead(f"{member.instance_id} was declared dead")
    return history


async def heartbeat(write: Run, instance_id: str, counter: int, _: str) -> tuple[int, str]:
    parameter = document([[instance_id, counter]])

    def work(db: Connection) -> tuple[Row, str]:
        [[row]] = execute(db, HEARTBEAT, parameter)
        return row, db.history

    (changed, now_ms), history = await write(work)
    if not changed:
        raise MemberDead(f"{instance_id} was declared dead")
    return int(now_ms), history


async def members(read: Run) -> list[Member]:
    [rows] = await read(partial(_execute, MEMBERS, None))
    found = [
        Member(name, address, counter, bool(alive), ms(joined_at), secret)
        for name, address, counter, alive, joined_at, secret in rows
    ]
    return sorted(found, key=lambda member: member.instance_id)


async def mark_dead(write: Run, instance_id: str, counter: int) -> bool:
    [[[alive]]] = await write(partial(_execute, MARK_DEAD, document([[instance_id, counter]])))
    return not alive


async def forget_member(write: Run, instance_id: str) -> None:
    await write(partial(_execute, FORGET, document([[instance_id, 0]])))


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(write: Run, count: int) -> None:
    await write(partial(_execute, ENSURE_SHARDS, document(list(range(count)))))


async def shards(read: Run) -> list[ShardRow]:
    [rows] = await read(partial(_execute, SHARDS, None))
    return [shard_row(row) for row in rows]


async def claim(write: Run, claims: Sequence[Claim]) -> list[ShardRow]:
    rows: dict[int, ShardRow] = {}
    step = in_steps(write)
    for indexes in shard_rounds([claim.shard_id for claim in claims]):
        some = [claims[index] for index in indexes]
        values = [(c.shard_id, c.expected_version, c.nonce, c.owner_id, c.owner_address, at(c.now_ms)) for c in some]
        found: list[list[Row]] = await step(partial(_execute, CLAIM, document(values)))
        rows.update((row[0], shard_row(row)) for row in found[0])
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def release(write: Run, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    step = in_steps(write)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        parameter = document({"fences": _fences([fences[index] for index in indexes])})
        found: list[list[Row]] = await step(partial(_execute, RELEASE, parameter))
        released = {row[0] for rows in found for row in rows}
        for index in indexes:
            if fences[index].shard_id not in released:
                results[index] = lost(fences[index])
    return results


def _fences(fences: Sequence[Fence]) -> list[tuple[int, int, int]]:
    return [(fence.shard_id, fence.version, fence.nonce) for fence in fences]


# --- timers: writing -----------------------------------------------------------------------------


async def commit(write: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    step: Any = in_steps(write)
    for indexes in shard_rounds([batch.fence.shard_id for batch in batches]):
        round_results = await _commit_round(step, [batches[index] for index in indexes])
        for index, result in zip(indexes, round_results, strict=True):
            results[index] = result
    return results


async def _commit_round(write: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    """Commits all batches or, if a fence failed, nothing. Then the batches whose fence is valid are committed."""
    [locked, *found] = await write(partial(_execute, COMMIT, commit_document(batches)))
    owned = {row[0] for row in locked}
    if len(owned) < len(batches):
        good = [batch for batch in batches if batch.fence.shard_id in owned]
        done = iter(await _commit_round(write, good) if good else ())
        return [next(done) if batch.fence.shard_id in owned else lost(batch.fence) for batch in batches]
    puts = sum(len(batch.puts) for batch in batches)
    return committed(batches, (row[0] for rows in found for row in rows if row[0] < puts))


def commit_document(batches: Sequence[Batch]) -> str:
    """The JSON document of a commit. The keys of the puts come first: those that are found among them are replaced."""
    keys = [(batch.fence.shard_id, *timer.key) for batch in batches for timer in batch.puts]
    keys += [(batch.fence.shard_id, *key) for batch in batches for key in batch.deletes]
    reached = {(batch.fence.shard_id, ended.position): ended for batch in batches for ended in reversed(batch.reached)}
    return document(
        {
            "fences": _fences([batch.fence for batch in batches]),
            "waters": [
                (batch.fence.shard_id, as_json(batch.low_water)) for batch in batches if batch.low_water is not None
            ],
            "keys": [(number, *key) for number, key in enumerate(keys)],
            "puts": [timer_row(batch.fence.shard_id, timer) for batch in batches for timer in batch.puts],
            "reached": [reached_row(shard_id, ended) for (shard_id, _), ended in reached.items()],
        }
    )


async def purge_reached(write: Run, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    step = in_steps(write)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        some = [fences[index] for index in indexes]
        parameter = document({"fences": _fences(some), "before": at(bound_ms(before_ms)), "most": limit})
        found: list[list[Row]] = await step(partial(_execute, PURGE, parameter))
        owned, *others = ([row[0] for row in rows] for rows in found)
        removed = [shard_id for rows in others for shard_id in rows]
        for index in indexes:
            shard_id = fences[index].shard_id
            results[index] = removed.count(shard_id) if shard_id in owned else lost(fences[index])
    return results


# --- timers: reading -----------------------------------------------------------------------------


async def load(read: Run, requests: Sequence[PageRequest]) -> list[Page]:
    def work(db: Connection) -> list[Page]:
        return [_load_one(db, request, LOAD_CHARS_MAX // len(requests)) for request in requests]

    return await read(work) if requests else []


def _load_one(db: Connection, request: PageRequest, chars_max: int) -> Page:
    """Rows that are not on the page may be read: the rest of the group with which it exceeds the limit."""
    chars_max = min(request.chars_max, chars_max)
    payload_chars = 0

    def is_enough(group: Sequence[Row]) -> bool:
        nonlocal payload_chars
        payload_chars += sum(map(_payload_chars, group))
        return payload_chars > chars_max

    after = request.after
    scan = (
        0,
        request.shard_id,
        at(bound_ms(after.execute_at_ms)),
        after.uuid_high,
        after.uuid_low,
        at(bound_ms(request.until_ms)),
        request.limit + 1,
    )
    rows = list(fetch_until(db, LOAD, document({"scans": [scan]}), is_enough))
    count = rows_of_page(map(_payload_chars, rows[: request.limit]), chars_max)
    if payload_chars <= chars_max and len(rows) == count:
        return page_of(rows, None, ROW_READER)
    del rows[count:]
    return page_of(rows, ROW_READER.position(rows[-1]), ROW_READER)


def _payload_chars(row: Row) -> int:
    return len(row[_PAYLOAD] or "")


Key = tuple[int, TimerKey]


async def get_many(read: Run, keys: Sequence[Key]) -> list[Found]:
    found: dict[Key, Found] = {}
    wanted = list(dict.fromkeys(keys))
    for first in range(0, len(wanted), KEYS_AT_ONCE):
        found |= await found_by_key(wanted[first : first + KEYS_AT_ONCE], partial(_stored_rows, read), ROW_READER)
    return [found[key] for key in keys]


async def _stored_rows(read: Run, keys: Sequence[Key], reached_max: int) -> StoredRows[Key]:
    parameter = document({"keys": [(number, shard_id, *key) for number, (shard_id, key) in enumerate(keys)]})
    timers, reached = await read(partial(_execute, get_sql(reached_max), parameter))
    reached_rows: dict[Key, list[Row]] = {}
    for row in reached:
        reached_rows.setdefault(keys[row[-1]], []).append(row)
    return {keys[row[-1]]: row for row in timers}, reached_rows


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(read: Run) -> list[Namespace]:
    [rows] = await read(partial(_execute, "SELECT CAST(name AS nvarchar(255)), body FROM namespaces", None))
    return namespaces_of(rows)


async def put_namespace(write: Run, namespace: Namespace, expected_revision: int | None) -> bool:
    values = (namespace.name, namespace.num_shards, namespace.revision, as_json(namespace), expected_revision)
    sql = NEW_NAMESPACE if expected_revision is None else PUT_NAMESPACE
    [[[changed]]] = await write(partial(_execute, sql, document([values])))
    return bool(changed)
