"""The statements of SqliteStore, and the functions that run them on a connection.

SQLite releases Python's global lock for every step of a statement and has to acquire it again, which takes milliseconds
while the event loop is busy. So frequent statements do not work row by row: keys are passed as one JSON text, rows are
inserted as multi-row VALUES, and results are returned as one JSON text. A commit is about five steps whatever its size;
benchmarks/store_commit.py has the figures.

Functions that write are called inside a transaction that has the write lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import apsw
import msgspec
from msgspec import Struct

from duetime.domain.timer import ROW_FORMAT, Namespace, Position, TimerKey
from duetime.errors import MemberDead, ShardLost
from duetime.store import (
    NO_CHARS_MAX,
    Batch,
    Claim,
    Committed,
    Fence,
    Found,
    Member,
    Page,
    PageRequest,
    ShardRow,
)
from duetime.stores.fencing import NOTHING_REPLACED, committed, lost, shard_rounds
from duetime.stores.rows import (
    INLINE_CHARS_MIN,
    REACHED_COLUMNS,
    REACHED_ROWS_MAX,
    TIMER_COLUMNS,
    RowReader,
    as_json,
    found_of,
    namespaces_of,
    page_of,
    position_before,
    position_of,
    reached_values,
    rows_of_page,
    timer_values,
)
from duetime.stores.sqlite.rows import (
    KEY,
    MARKED_ROW_READER,
    REACHED,
    TIMER,
    decode_rows,
    decode_with_marks,
    limited,
    read_rows,
    read_text,
    shorter_if_too_big,
)

T = TypeVar("T")

_WHOLE: Final = len(TIMER_COLUMNS)  # values of a row whose payload is not left out
_PAYLOAD: Final = TIMER_COLUMNS.index("timer_payload")
GET_CHARS_MAX: Final = 8 * 1024 * 1024  # of payloads that are read in one statement by their keys
CHUNK_ROWS_MAX = 128  # apsw caches no statement of more than 16 KiB of text

# --- SQL -----------------------------------------------------------------------------------------

_COLUMNS = {2: ", ".join(("shard_id", *TIMER_COLUMNS)), 3: ", ".join(("shard_id", *REACHED_COLUMNS))}


def _insert(row_type: int, rows: int) -> str:
    """OR ROLLBACK, because without it SQLite keeps a journal for undoing part of a multi-row statement."""
    columns = _COLUMNS[row_type]
    row = f"({row_type}, {ROW_FORMAT}{', ?' * (columns.count(',') + 1)})"
    # The timers that puts replace are deleted before this. A reached row that is stored already does not change.
    conflict = " ON CONFLICT DO NOTHING" if row_type == 3 else ""
    values = ",".join([row] * rows)
    return f"INSERT OR ROLLBACK INTO timers (row_type, row_format, {columns}) VALUES {values}{conflict}"  # noqa: S608


# One text for every number of rows up to CHUNK_ROWS_MAX, so that an insert of any size is one or two steps, and all
# texts stay prepared.
INSERTS = {row_type: [_insert(row_type, rows) for rows in range(CHUNK_ROWS_MAX + 1)] for row_type in (2, 3)}

# The fences of the shards ?1, and which of the keys ?2 are stored: all that a commit needs, in one step.
_CHECK = """
SELECT
  (SELECT json_group_array(json_array(shard_id, shard_version, shard_nonce)) FROM timers
   WHERE row_type = 1 AND shard_owner_id IS NOT NULL AND shard_id IN (SELECT value FROM json_each(?1))),
  (SELECT json_group_array(k.key) FROM json_each(?2) AS k CROSS JOIN timers AS t
   WHERE t.row_type = 2 AND t.shard_id = k.value ->> 0
   AND t.timer_namespace = k.value ->> 1 AND t.timer_id = k.value ->> 2)
"""
_DELETE = """
DELETE FROM timers WHERE row_type = 2
AND (shard_id, timer_namespace, timer_id) IN (SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?))
"""
_LOW_WATER = "UPDATE timers SET shard_low_water = ? WHERE shard_id = ? AND row_type = 1"
_CLAIM = """
UPDATE timers SET shard_version = shard_version + 1, shard_nonce = c.value ->> 2,
  shard_owner_id = c.value ->> 3, shard_owner_address = c.value ->> 4, shard_claimed_at = c.value ->> 5
FROM json_each(?) AS c
WHERE timers.row_type = 1 AND timers.shard_id = c.value ->> 0 AND timers.shard_version = c.value ->> 1
"""
_RELEASE = """
UPDATE timers SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL, shard_claimed_at = 0
WHERE row_type = 1 AND shard_id IN (SELECT value FROM json_each(?))
"""
_ENSURE_SHARDS = f"""
WITH RECURSIVE ids(id) AS (SELECT 0 WHERE ?1 > 0 UNION ALL SELECT id + 1 FROM ids WHERE id + 1 < ?1)
INSERT OR ROLLBACK INTO timers (shard_id, row_type, row_format, {KEY}, shard_version, shard_nonce, shard_claimed_at)
SELECT id, 1, {ROW_FORMAT}, -1, 0, 0, 0, 0, 0 FROM ids WHERE true ON CONFLICT DO NOTHING
"""  # noqa: S608
_SHARDS = """
SELECT json_group_array(json_array(shard_id, shard_version, shard_nonce, shard_owner_id, shard_owner_address,
  shard_claimed_at, json(coalesce(shard_low_water, '[-1,0,0]')))) FROM timers INDEXED BY shard_rows WHERE row_type = 1
"""
_SOME_SHARDS = f"{_SHARDS} AND shard_id IN (SELECT value FROM json_each(?))"  # noqa: S608
_PURGE = f"""
DELETE FROM timers WHERE shard_id = ?1 AND row_type = 3 AND ({KEY}) IN (
  SELECT {KEY} FROM timers WHERE shard_id = ?1 AND row_type = 3 AND timer_execute_at < ?2 ORDER BY {KEY} LIMIT ?3)
"""  # noqa: S608

_LOAD = f"""
SELECT '[' || coalesce(group_concat(row, ','), '') || ']' AS answer FROM (
  SELECT {limited(TIMER)} AS row FROM timers
  WHERE shard_id = :shard_id AND row_type = 2 AND ({KEY}) > (:a, :b, :c) AND timer_execute_at <= :until
  ORDER BY {KEY} LIMIT :page)
"""  # noqa: S608
# Timers and reached rows in one statement, so that both are of the same snapshot.
_GET = f"""
SELECT
  (SELECT '[' || coalesce(group_concat('[' || k.key || ',' || {limited(TIMER)} || ']', ','), '') || ']'
   FROM json_each(:keys) AS k CROSS JOIN timers AS t
   WHERE t.row_type = 2 AND t.shard_id = k.value ->> 0
   AND t.timer_namespace = k.value ->> 1 AND t.timer_id = k.value ->> 2) AS timers,
  (SELECT '[' || coalesce(group_concat('[' || k.key || ',' || {limited(REACHED)} || ']', ','), '') || ']'
   FROM json_each(:keys) AS k CROSS JOIN timers AS t
   WHERE t.row_type = 3 AND t.shard_id = k.value ->> 0 AND ({KEY}) = (
     SELECT {KEY} FROM timers AS newest WHERE newest.row_type = 3 AND newest.shard_id = k.value ->> 0
     AND newest.timer_namespace = k.value ->> 1 AND newest.timer_id = k.value ->> 2
     ORDER BY timer_generation DESC, timer_reached_at DESC,
       timer_execute_at DESC, timer_uuid_high DESC, timer_uuid_low DESC LIMIT 1)) AS ended
"""  # noqa: S608
# For a key whose newest reached row cannot be decoded.
_GET_REACHED = f"""
SELECT '[' || coalesce(group_concat(row, ','), '') || ']' AS answer FROM (
  SELECT {REACHED} AS row FROM timers WHERE row_type = 3 AND shard_id = ? AND timer_namespace = ? AND timer_id = ?
  ORDER BY timer_generation DESC, timer_reached_at DESC,
    timer_execute_at DESC, timer_uuid_high DESC, timer_uuid_low DESC LIMIT {REACHED_ROWS_MAX})
"""  # noqa: S608


# --- rows ----------------------------------------------------------------------------------------

_decode_indexes = msgspec.json.Decoder(list[int]).decode
_decode_fences = msgspec.json.Decoder(list[tuple[int, int, int]]).decode


class _ShardJson(Struct, array_like=True):
    shard_id: int
    version: int
    nonce: int
    owner_id: str | None
    owner_address: str | None
    claimed_at_ms: int
    low_water: Position


_decode_shards = msgspec.json.Decoder(list[_ShardJson]).decode


# --- members -------------------------------------------------------------------------------------


def join(db: apsw.Connection, member: Member) -> None:
    """A second join changes nothing. A dead member stays dead."""
    db.execute(
        "INSERT INTO members (instance_id, address, counter, alive, joined_at, secret) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (member.instance_id, member.address, member.counter, int(member.alive), member.joined_at_ms, member.secret),
    )
    if not db.execute("SELECT alive FROM members WHERE instance_id = ?", (member.instance_id,)).get:
        raise MemberDead(f"{member.instance_id} was declared dead")


def heartbeat(db: apsw.Connection, instance_id: str, counter: int) -> None:
    db.execute("UPDATE members SET counter = max(counter, ?) WHERE instance_id = ? AND alive", (counter, instance_id))
    if db.changes() == 0:
        raise MemberDead(f"{instance_id} was declared dead")


def members(db: apsw.Connection) -> list[Member]:
    rows: list[Any] = db.execute(
        "SELECT instance_id, address, counter, alive, joined_at, secret FROM members ORDER BY instance_id"
    ).fetchall()
    return [Member(row[0], row[1], row[2], bool(row[3]), row[4], row[5]) for row in rows]


def mark_dead(db: apsw.Connection, instance_id: str, counter: int) -> bool:
    db.execute("UPDATE members SET alive = 0 WHERE instance_id = ? AND counter = ?", (instance_id, counter))
    return not db.execute("SELECT alive FROM members WHERE instance_id = ?", (instance_id,)).get


def forget_member(db: apsw.Connection, instance_id: str) -> None:
    db.execute("DELETE FROM members WHERE instance_id = ? AND NOT alive", (instance_id,))


# --- shards --------------------------------------------------------------------------------------


def ensure_shards(db: apsw.Connection, count: int) -> None:
    db.execute(_ENSURE_SHARDS, (count,))


def shards(db: apsw.Connection) -> list[ShardRow]:
    return sorted(_shard_rows(read_text(db, _SHARDS, ())), key=lambda row: row.shard_id)


def _shard_rows(text: str) -> list[ShardRow]:
    return [ShardRow(*msgspec.structs.astuple(row)) for row in _decode_shards(text)]


def claim(db: apsw.Connection, claims: Sequence[Claim]) -> list[ShardRow]:
    for indexes in shard_rounds([claim.shard_id for claim in claims]):
        group = [claims[index] for index in indexes]
        db.execute(
            _CLAIM,
            (
                as_json(
                    [(c.shard_id, c.expected_version, c.nonce, c.owner_id, c.owner_address, c.now_ms) for c in group]
                ),
            ),
        )
    text = read_text(db, _SOME_SHARDS, (as_json([claim.shard_id for claim in claims]),))
    rows = {row.shard_id: row for row in _shard_rows(text)}
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


def release(db: apsw.Connection, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        owned, _ = _check(db, [fences[index] for index in indexes], [])
        db.execute(_RELEASE, (as_json([fences[index].shard_id for index in indexes if fences[index] in owned]),))
        for index in indexes:
            if fences[index] not in owned:
                results[index] = lost(fences[index])
    return results


def _check(db: apsw.Connection, fences: Sequence[Fence], keys: Sequence[_Key]) -> tuple[set[Fence], list[int]]:
    """The fences that are valid, and the indexes of the keys under which a timer is stored."""
    shard_ids = [fence.shard_id for fence in fences]
    found, stored = db.execute(_CHECK, (as_json(shard_ids), as_json(keys))).fetchone()  # type: ignore[misc]
    current = {Fence(*fence) for fence in _decode_fences(found)}
    return current.intersection(fences), _decode_indexes(stored)


# --- timers --------------------------------------------------------------------------------------

_Key = tuple[int, str, str]


def commit(db: apsw.Connection, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    for indexes in shard_rounds([batch.fence.shard_id for batch in batches]):
        for index, result in zip(indexes, _commit_round(db, [batches[index] for index in indexes]), strict=True):
            results[index] = result
    return results


def _commit_round(db: apsw.Connection, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    """Checks the fences, removes what is deleted or replaced, and inserts. No two batches are of the same shard."""
    puts = [(batch.fence.shard_id, timer) for batch in batches for timer in batch.puts]
    keys = [(shard_id, timer.namespace, timer.timer_id) for shard_id, timer in puts]
    owned, stored = _check(db, [batch.fence for batch in batches], keys)
    if len(owned) < len(batches):
        return _commit_owned(db, batches, owned)
    deleted = [(batch.fence.shard_id, *key) for batch in batches for key in batch.deletes]
    deleted += [keys[index] for index in stored]
    if deleted:
        db.execute(_DELETE, (as_json(deleted),))
    insert_rows(db, 2, [(shard_id, *timer_values(timer)) for shard_id, timer in puts])
    insert_rows(db, 3, [(b.fence.shard_id, *reached_values(reached)) for b in batches for reached in b.reached])
    for batch in batches:
        if batch.low_water is not None:
            db.execute(_LOW_WATER, (as_json(batch.low_water), batch.fence.shard_id))
    return committed(batches, stored)


def _commit_owned(db: apsw.Connection, batches: Sequence[Batch], owned: set[Fence]) -> list[Committed | ShardLost]:
    """Some fences failed: commits only the batches whose fence is valid."""
    good = [batch for batch in batches if batch.fence in owned]
    done = iter(_commit_round(db, good) if good else ())
    return [next(done) if batch.fence in owned else lost(batch.fence) for batch in batches]


def insert_rows(db: apsw.Connection, row_type: int, rows: list[tuple[Any, ...]]) -> None:
    first, texts = 0, INSERTS[row_type]
    while first < len(rows):
        count = min(CHUNK_ROWS_MAX, len(rows) - first)
        db.execute(texts[count], [value for row in rows[first : first + count] for value in row])
        first += count


def load(db: apsw.Connection, requests: Sequence[PageRequest]) -> list[Page]:
    return [_load(db, request) for request in requests]


def _load(db: apsw.Connection, request: PageRequest) -> Page:
    inline = max(INLINE_CHARS_MIN, request.chars_max // (request.limit + 1))
    (rows, reader), limit = shorter_if_too_big(
        lambda count: _load_rows(db, request.shard_id, request.after, request.until_ms, count + 1, inline),
        request.limit,
    )
    is_cut = any(len(row) > _WHOLE for row in rows)
    count = min(len(rows), limit)
    if is_cut or limit * inline > request.chars_max:
        count = rows_of_page(map(_payload_length, rows[:limit]), request.chars_max)
    after = None if len(rows) <= count else position_of(rows[count - 1])
    del rows[count:]
    if not is_cut:
        return page_of(rows, after, reader)
    whole = [row if len(row) == _WHOLE else _load_whole(db, request.shard_id, position_of(row)) for row in rows]
    return page_of([row for row in whole if row is not None], after, MARKED_ROW_READER)


def _load_rows(
    db: apsw.Connection, shard_id: int, after: Position, until_ms: int, count: int, inline: int
) -> tuple[list[list[Any]], RowReader]:
    a, b, c = after
    bindings = {"shard_id": shard_id, "a": a, "b": b, "c": c, "until": until_ms, "page": count, "inline": inline}
    return read_rows(db, _LOAD, bindings)


def _load_whole(db: apsw.Connection, shard_id: int, position: Position) -> list[Any] | None:
    """A row whose payload was left out. None: it was removed meanwhile."""
    rows, _ = _load_rows(db, shard_id, position_before(position), position.execute_at_ms, 1, NO_CHARS_MAX)
    return rows[0] if rows and position_of(rows[0]) == position else None


def _payload_length(row: list[Any]) -> int:
    return row[-1] if len(row) > _WHOLE else len(row[_PAYLOAD] or "")


def get_many(db: apsw.Connection, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    try:
        text = as_json([(shard_id, *key) for shard_id, key in keys])
        found, reached_rows = _found_rows(db, text, max(INLINE_CHARS_MIN, GET_CHARS_MAX // max(1, len(keys))))
    except apsw.TooBigError:
        if len(keys) == 1:
            raise
        half = len(keys) // 2
        return get_many(db, keys[:half]) + get_many(db, keys[half:])
    return [_found(db, key, found.get(index), reached_rows.get(index)) for index, key in enumerate(keys)]


_IndexedRows = dict[int, list[Any]]


def _found_rows(db: apsw.Connection, keys_json: str, inline: int) -> tuple[_IndexedRows, _IndexedRows]:
    """The rows of timers and the newest reached rows, by the indexes of their keys. Payloads of more than `inline`
    bytes are left out."""
    answers: Any
    bindings = {"keys": keys_json, "inline": inline}
    try:
        answers = db.execute(_GET, bindings).fetchone()
        timers, reached_rows = map(decode_rows, answers)
    except UnicodeDecodeError:
        as_blobs = f"SELECT CAST(timers AS BLOB), CAST(ended AS BLOB) FROM ({_GET})"  # noqa: S608
        answers = db.execute(as_blobs, bindings).fetchone()
        timers, reached_rows = map(decode_with_marks, answers)
    return dict(timers), dict(reached_rows)


def _found(
    db: apsw.Connection, key: tuple[int, TimerKey], timer: list[Any] | None, reached_row: list[Any] | None
) -> Found:
    is_left_out = timer is not None and len(timer) > len(TIMER_COLUMNS)
    if is_left_out or (reached_row is not None and len(reached_row) > len(REACHED_COLUMNS)):
        whole = _found_rows(db, as_json([(key[0], *key[1])]), NO_CHARS_MAX)  # both again: of the same moment
        timer, reached_row = (rows.get(0) for rows in whole)
    found = found_of(timer, () if reached_row is None else (reached_row,), MARKED_ROW_READER)
    if reached_row is None or found.reached is not None:
        return found
    reached_rows, _ = read_rows(db, _GET_REACHED, (key[0], *key[1]))
    return found_of(timer, reached_rows, MARKED_ROW_READER)


def purge_reached(db: apsw.Connection, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    owned, _ = _check(db, fences, [])
    return [_purge(db, fence, before_ms, limit) if fence in owned else lost(fence) for fence in fences]


def _purge(db: apsw.Connection, fence: Fence, before_ms: int, limit: int) -> int:
    db.execute(_PURGE, (fence.shard_id, before_ms, limit))
    return db.changes()


# --- namespaces ----------------------------------------------------------------------------------


def namespaces(db: apsw.Connection) -> list[Namespace]:
    rows: list[Any] = db.execute("SELECT CAST(name AS BLOB), CAST(body AS BLOB) FROM namespaces").fetchall()
    return namespaces_of((name.decode(errors="replace"), body) for name, body in rows)


def put_namespace(db: apsw.Connection, namespace: Namespace, expected_revision: int | None) -> bool:
    values = (namespace.name, namespace.num_shards, namespace.revision, as_json(namespace))
    if expected_revision is None:
        db.execute(
            "INSERT INTO namespaces (name, num_shards, revision, body) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            values,
        )
    else:
        db.execute(
            "UPDATE namespaces SET num_shards = ?2, revision = ?3, body = ?4 WHERE name = ?1 AND revision = ?5",
            (*values, expected_revision),
        )
    return db.changes() == 1
