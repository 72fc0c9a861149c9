"""How timers, reached timers and shards are stored as items of DynamoDB.

In the table of timers, partitioned by shard:
- `row_key` is the key of an item: namespace and id, followed by a mark for the timer itself or for one of its reached
  rows, the newest last. So a timer is one item whatever its time, a put is an upsert, and one short query in reverse
  order finds a timer and its last reached row.
- `row_at` is the position, the sort key of the local index that loads, lists and purges read.
- the rest is one text: DynamoDB charges by the size of an item, including the names of attributes.

The bytes of both keys have the same order as what they encode. The table of the cluster has the small items: shards,
members, namespaces and the schema version, each under its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct as Packing
from typing import Any, Final

import msgspec

from duetime.domain.timer import ROW_FORMAT, Position, Reached, Timer, TimerKey
from duetime.store import Member, ShardRow
from duetime.stores.rows import LARGEST, RowReader, check_types, reached_of, reached_values, timer_of, timer_values

__all__ = [
    "CLUSTER_KEY",
    "MEMBER",
    "NAMESPACE",
    "POSITIONS",
    "REACHED",
    "ROW_READER",
    "SCHEMA",
    "SHARD",
    "TIMER",
    "TIMERS_KEY",
    "WITHOUT_PAYLOAD",
    "Item",
    "after",
    "before",
    "cluster_key",
    "is_timer",
    "key_prefix",
    "low_water_text",
    "member_item",
    "member_of",
    "number",
    "payload_length",
    "position_of",
    "reached_item",
    "reached_of_item",
    "row_key",
    "shard_key",
    "shard_row_of",
    "text",
    "timer_item",
    "timer_key",
    "timer_of_item",
    "up_to",
]

Item = Mapping[str, Mapping[str, Any]]
"""An item in the format of the service: every value with the letter of its type."""

TIMERS_KEY: Final = ("shard_id", "row_key")
CLUSTER_KEY: Final = ("item_kind", "item_name")
POSITIONS: Final = "by_position"  # the local index, on (shard_id, row_at)

SHARD: Final = "shard"
MEMBER: Final = "member"
NAMESPACE: Final = "namespace"
SCHEMA: Final = "schema"

TIMER: Final = 2  # row types, as in all stores
REACHED: Final = 3

_OFFSET: Final = 1 << 63  # gives signed numbers the same order as their bytes
_position = Packing(">BQQQ")
_end = Packing(">BQQQQQ")
_IS_TIMER: Final = b"\xff"  # sorts after all reached rows, so that a query in reverse order finds it first
_PAYLOAD: Final = 10  # among the columns of a row
# For a query that needs no payloads. The service reads them, but does not send them.
WITHOUT_PAYLOAD: Final = {"ProjectionExpression": "shard_id, row_key, row_at, timer_row"}

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Any]).decode


def number(value: int) -> dict[str, str]:
    return {"N": str(value)}


def text(value: str) -> dict[str, str]:
    return {"S": value}


# --- keys ----------------------------------------------------------------------------------------


def key_prefix(key: TimerKey) -> bytes:
    """The prefix of the keys of a timer and all its reached rows, and of no other key: a name has no NUL."""
    return f"{key.namespace}\0{key.timer_id}\0".encode()


def timer_key(key: TimerKey) -> bytes:
    return key_prefix(key) + _IS_TIMER


def reached_key(reached: Reached) -> bytes:
    at_ms, high, low = reached.position
    numbers = (reached.timer.generation, reached.reached_at_ms, at_ms, high, low)
    return key_prefix(reached.timer.key) + _end.pack(REACHED, *(value + _OFFSET for value in numbers))


def position_bytes(row_type: int, position: Position) -> bytes:
    return _position.pack(row_type, *(value + _OFFSET for value in position))


def after(row_type: int, position: Position) -> bytes:
    """The first key after a position, as an inclusive bound."""
    return position_bytes(row_type, position) + b"\0"


def up_to(row_type: int, at_ms: int) -> bytes:
    """The last key at that time, as an inclusive bound."""
    return position_bytes(row_type, Position(at_ms, LARGEST, LARGEST))


def before(row_type: int, at_ms: int) -> bytes:
    return up_to(row_type, at_ms - 1)


def row_key(shard_id: int, key: bytes) -> dict[str, dict[str, Any]]:
    return {"shard_id": number(shard_id), "row_key": {"B": key}}


def cluster_key(kind: str, name: str) -> dict[str, dict[str, Any]]:
    return {"item_kind": text(kind), "item_name": text(name)}


def shard_key(shard_id: int) -> dict[str, dict[str, Any]]:
    return cluster_key(SHARD, f"{shard_id:05}")


# --- timers --------------------------------------------------------------------------------------


def timer_item(shard_id: int, timer: Timer) -> dict[str, dict[str, Any]]:
    key, at = timer_key(timer.key), position_bytes(TIMER, timer.position)
    return _row_item(shard_id, key, at, timer_values(timer))


def reached_item(shard_id: int, reached: Reached) -> dict[str, dict[str, Any]]:
    key, at = reached_key(reached), position_bytes(REACHED, reached.position)
    return _row_item(shard_id, key, at, reached_values(reached))


def _row_item(shard_id: int, key: bytes, at: bytes, values: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    payload = values[_PAYLOAD]
    row = _encode((*values[:_PAYLOAD], None, *values[_PAYLOAD + 1 :])).decode()
    item: dict[str, dict[str, Any]] = {
        "shard_id": number(shard_id),
        "row_key": {"B": key},
        "row_at": {"B": at},
        "row_format": number(ROW_FORMAT),
        "timer_row": text(row),
    }
    if payload is not None:  # an attribute of its own, where it is not escaped: it may be nearly as large as an item
        item["timer_payload"] = text(payload)
    return item


def is_timer(item: Item) -> bool:
    return bool(item["row_at"]["B"][0] == TIMER)


def position_of(item: Item) -> Position:
    _, *numbers = _position.unpack(item["row_at"]["B"])
    return Position(*(value - _OFFSET for value in numbers))


def timer_of_item(item: Item) -> Timer:
    return timer_of(_row(item))


def reached_of_item(item: Item) -> Reached:
    return reached_of(_row(item))


def payload_length(item: Item) -> int:
    return len(item["timer_payload"]["S"]) if "timer_payload" in item else 0


def _row(item: Item) -> list[Any]:
    row = _decode(item["timer_row"]["S"])
    if "timer_payload" in item:
        row[_PAYLOAD] = item["timer_payload"]["S"]
    check_types(row)
    return row


def _name_of(item: Item) -> tuple[str, str]:
    """Namespace and id of an item, also if its row is unreadable."""
    namespace, timer_id, _ = item["row_key"]["B"].split(b"\0", 2)
    return namespace.decode(), timer_id.decode()


ROW_READER: Final = RowReader(timer=timer_of_item, reached=reached_of_item, position=position_of, key=_name_of)


# --- shards and members --------------------------------------------------------------------------


def low_water_text(position: Position) -> str:
    return " ".join(map(str, position))


def shard_row_of(item: Item) -> ShardRow:
    row = ShardRow(int(item["item_name"]["S"]), int(item["shard_version"]["N"]), int(item["shard_nonce"]["N"]))
    fields: dict[str, Any] = {}
    if "shard_owner_id" in item:
        fields["owner_id"] = item["shard_owner_id"]["S"]
        fields["owner_address"] = item["shard_owner_address"]["S"]
        fields["claimed_at_ms"] = int(item["shard_claimed_at"]["N"])
    if "shard_low_water" in item:
        fields["low_water"] = Position(*map(int, item["shard_low_water"]["S"].split()))
    return msgspec.structs.replace(row, **fields) if fields else row


def member_item(member: Member) -> dict[str, dict[str, Any]]:
    return {
        **cluster_key(MEMBER, member.instance_id),
        "member_address": text(member.address),
        "member_counter": number(member.counter),
        "member_alive": {"BOOL": member.alive},
        "member_joined_at": number(member.joined_at_ms),
        "member_secret": text(member.secret),
    }


def member_of(item: Item) -> Member:
    return Member(
        item["item_name"]["S"],
        item["member_address"]["S"],
        int(item["member_counter"]["N"]),
        bool(item["member_alive"]["BOOL"]),
        int(item["member_joined_at"]["N"]),
        item["member_secret"]["S"],
    )
