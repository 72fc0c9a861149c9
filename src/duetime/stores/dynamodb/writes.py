"""The writes of DynamoStore, and the reads that belong to them: each call as requests to the service.

A batch is one transaction. Its first action is the fence: a check of the shard's item or, if the low water moves, an
update of it. Then come the rows. The shard is lost only if the condition of the fence itself fails. Each put has a
condition that says whether a timer is expected there, so that the answer to "was one replaced?" is part of the
transaction. If an expectation was wrong, nothing is written, the service names these puts, and the transaction is sent
again with the opposite expectation for them.

The service rejects a transaction that conflicts with another one about the same item. So one process sends the writes
of one shard one after the other. A conflict with another instance is retried (connection.py).

An acknowledged transaction is visible to queries. For a transaction without an answer, the service does not promise a
moment at which all its items are visible to a query, only that each will be. A claim immediately after it could load
without some of them. That does not happen: an owner is declared dead only seconds after its last request, and a request
without an answer is repeated before its shard is claimed.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from duetime.domain.timer import BEFORE_ALL, Namespace, Position, Timer
from duetime.errors import MemberDead, OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import (
    NO_CHARS_MAX,
    Batch,
    Claim,
    Committed,
    Fence,
    Member,
    ShardRow,
)
from duetime.stores.dynamodb import rows as items
from duetime.stores.dynamodb.connection import Run
from duetime.stores.dynamodb.errors import CONDITION_FAILED, ConditionFailed
from duetime.stores.dynamodb.reads import Tables, all_of, rows_by_position
from duetime.stores.dynamodb.rows import number, text
from duetime.stores.fencing import NOTHING_REPLACED, all_or_error, each_shard_separately, in_steps, lost
from duetime.stores.rows import as_json, bound_ms, namespaces_of

__all__ = [
    "ACTIONS_MAX",
    "claim",
    "commit",
    "commit_actions",
    "ensure_shards",
    "fence_action",
    "forget_member",
    "heartbeat",
    "join",
    "mark_dead",
    "members",
    "namespaces",
    "purge_reached",
    "put_namespace",
    "release",
    "shards",
]

T = TypeVar("T")
R = TypeVar("R")

ACTIONS_MAX: Final = 100  # of one transaction, including the fence
_ATTEMPTS_MAX: Final = 8  # with changed expectations: the owner of the shard is right after the first

_ALL_OLD: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
_FENCE_IS_VALID: Final = "shard_version = :version AND shard_nonce = :nonce AND attribute_exists(shard_owner_id)"


# --- fences --------------------------------------------------------------------------------------


def fence_action(tables: Tables, fence: Fence, low_water: Position | None = None) -> dict[str, Any]:
    """The first action of every transaction: if it fails, none of the others is applied."""
    action: dict[str, Any] = {
        "TableName": tables.cluster,
        "Key": items.shard_key(fence.shard_id),
        "ConditionExpression": _FENCE_IS_VALID,
        "ExpressionAttributeValues": _fence_values(fence),
    }
    if low_water is None:
        return {"ConditionCheck": action}
    action["UpdateExpression"] = "SET shard_low_water = :low_water"
    action["ExpressionAttributeValues"][":low_water"] = text(items.low_water_text(low_water))
    return {"Update": action}


def _fence_values(fence: Fence) -> dict[str, Any]:
    return {":version": number(fence.version), ":nonce": number(fence.nonce)}


async def _transact(run: Run, actions: Sequence[dict[str, Any]]) -> None:
    """By the token the service recognises the transaction if it is sent again after a lost answer."""
    await run("transact_write_items", TransactItems=actions, ClientRequestToken=uuid.uuid4().hex)


async def _is_valid(read: Run, tables: Tables, fence: Fence) -> bool:
    """Is the fence valid? For a batch that writes nothing."""
    answer = await read("get_item", TableName=tables.cluster, Key=items.shard_key(fence.shard_id), ConsistentRead=True)
    if "Item" not in answer:
        return False
    row = items.shard_row_of(answer["Item"])
    return row.owner_id is not None and row.fence == fence


# --- members -------------------------------------------------------------------------------------


async def join(run: Run, tables: Tables, member: Member) -> None:
    """Joining twice is the same as joining once, but a dead member stays dead."""
    try:
        await run(
            "put_item",
            TableName=tables.cluster,
            Item=items.member_item(member),
            ConditionExpression="attribute_not_exists(item_name)",
            **_ALL_OLD,
        )
    except ConditionFailed as failed:
        if failed.item is None or not items.member_of(failed.item).alive:
            raise MemberDead(f"{member.instance_id} was declared dead") from None


async def heartbeat(run: Run, tables: Tables, instance_id: str, counter: int) -> None:
    try:
        await run(
            "update_item",
            TableName=tables.cluster,
            Key=items.cluster_key(items.MEMBER, instance_id),
            UpdateExpression="SET member_counter = :counter",
            ConditionExpression="member_alive = :alive AND member_counter < :counter",
            ExpressionAttributeValues={":counter": number(counter), ":alive": {"BOOL": True}},
            **_ALL_OLD,
        )
    except ConditionFailed as failed:
        if failed.item is None or not items.member_of(failed.item).alive:
            raise MemberDead(f"{instance_id} was declared dead") from None


async def members(run: Run, tables: Tables) -> list[Member]:
    return [items.member_of(item) for item in await all_of(run, tables, items.MEMBER)]


async def mark_dead(run: Run, tables: Tables, instance_id: str, counter: int) -> bool:
    try:
        await run(
            "update_item",
            TableName=tables.cluster,
            Key=items.cluster_key(items.MEMBER, instance_id),
            UpdateExpression="SET member_alive = :dead",
            ConditionExpression="member_counter = :counter",
            ExpressionAttributeValues={":counter": number(counter), ":dead": {"BOOL": False}},
            **_ALL_OLD,
        )
    except ConditionFailed as failed:
        return failed.item is None or not items.member_of(failed.item).alive
    return True


async def forget_member(run: Run, tables: Tables, instance_id: str) -> None:
    with contextlib.suppress(ConditionFailed):
        await run(
            "delete_item",
            TableName=tables.cluster,
            Key=items.cluster_key(items.MEMBER, instance_id),
            ConditionExpression="member_alive = :dead",
            ExpressionAttributeValues={":dead": {"BOOL": False}},
        )


# --- shards --------------------------------------------------------------------------------------


async def shards(run: Run, tables: Tables) -> list[ShardRow]:
    return [items.shard_row_of(item) for item in await all_of(run, tables, items.SHARD)]


async def ensure_shards(read: Run, write: Run, tables: Tables, count: int) -> None:
    existing = {row.shard_id for row in await shards(read, tables)}
    missing = [shard_id for shard_id in range(count) if shard_id not in existing]
    all_or_error(await each_shard_separately(missing, missing, lambda shard_id: _ensure_shard(write, tables, shard_id)))


async def _ensure_shard(run: Run, tables: Tables, shard_id: int) -> None:
    with contextlib.suppress(ConditionFailed):  # another instance was first
        await run(
            "put_item",
            TableName=tables.cluster,
            Item={**items.shard_key(shard_id), "shard_version": number(0), "shard_nonce": number(0)},
            ConditionExpression="attribute_not_exists(item_name)",
        )


async def claim(run: Run, tables: Tables, claims: Sequence[Claim]) -> list[ShardRow]:
    answers = all_or_error(
        await each_shard_separately(claims, [c.shard_id for c in claims], lambda c: _claim(run, tables, c))
    )
    rows = {row.shard_id: row for row in answers}  # of several claims of one shard: as after the last one
    return [rows[claim.shard_id] for claim in claims]


async def _claim(run: Run, tables: Tables, claim: Claim) -> ShardRow:
    try:
        answer = await run(
            "update_item",
            TableName=tables.cluster,
            Key=items.shard_key(claim.shard_id),
            UpdateExpression="SET shard_version = :version, shard_nonce = :nonce, shard_owner_id = :owner_id,"
            " shard_owner_address = :owner_address, shard_claimed_at = :now",
            ConditionExpression="shard_version = :expected",
            ExpressionAttributeValues={
                ":expected": number(claim.expected_version),
                ":version": number(claim.expected_version + 1),
                ":nonce": number(claim.nonce),
                ":owner_id": text(claim.owner_id),
                ":owner_address": text(claim.owner_address),
                ":now": number(claim.now_ms),
            },
            ReturnValues="ALL_NEW",
            **_ALL_OLD,
        )
    except ConditionFailed as failed:  # perhaps our own claim was applied and its answer lost: the nonce shows it
        return ShardRow(claim.shard_id) if failed.item is None else items.shard_row_of(failed.item)
    return items.shard_row_of(answer["Attributes"])


async def release(run: Run, tables: Tables, fences: Sequence[Fence]) -> list[ShardLost | None]:
    return all_or_error(
        await each_shard_separately(fences, [f.shard_id for f in fences], lambda f: _release(run, tables, f))
    )


async def _release(run: Run, tables: Tables, fence: Fence) -> ShardLost | None:
    async with tables.lock_of(fence.shard_id):
        try:
            await run(
                "update_item",
                TableName=tables.cluster,
                Key=items.shard_key(fence.shard_id),
                UpdateExpression="SET shard_nonce = :free REMOVE shard_owner_id, shard_owner_address, shard_claimed_at",
                ConditionExpression=_FENCE_IS_VALID,
                ExpressionAttributeValues={**_fence_values(fence), ":free": number(0)},
                **_ALL_OLD,
            )
        except ConditionFailed as failed:
            if failed.may_be_applied and failed.item is not None:
                row = items.shard_row_of(failed.item)
                if row.owner_id is None and row.version == fence.version:
                    return None  # only our own release can free it at this version
            return lost(fence)
        return None


# --- timers --------------------------------------------------------------------------------------


async def commit(read: Run, write: Run, tables: Tables, batches: Sequence[Batch]) -> list[Committed | StoreError]:
    """Each batch succeeds or fails by itself: one shard that is throttled does not delay the others."""
    shard_ids = [batch.fence.shard_id for batch in batches]
    return await each_shard_separately(batches, shard_ids, lambda batch: _commit(read, write, tables, batch))


async def _commit(read: Run, write: Run, tables: Tables, batch: Batch) -> Committed | ShardLost:
    async with tables.lock_of(batch.fence.shard_id):
        if not (batch.puts or batch.deletes or batch.reached or batch.low_water):
            return NOTHING_REPLACED if await _is_valid(read, tables, batch.fence) else lost(batch.fence)
        expected = [_probably_exists(timer) for timer in batch.puts]
        for _ in range(_ATTEMPTS_MAX):
            actions = commit_actions(tables, batch, expected)
            if len(actions) > ACTIONS_MAX:
                raise StoreUnavailable(
                    f"dynamodb: {len(actions)} actions in one batch; at most {ACTIONS_MAX} are allowed"
                )
            try:
                await _transact(write, actions)
            except ConditionFailed as failed:
                if failed.reasons[:1] == [CONDITION_FAILED]:
                    return lost(batch.fence)
                if failed.may_be_applied:
                    # The earlier attempt was not applied, or this one would have been recognised by its token. But the
                    # earlier one may still arrive, and its conditions may be met by what we write next.
                    raise OutcomeUnknown("dynamodb: an earlier attempt may still be applied") from None
                wrong = failed.reasons[1 : len(expected) + 1]
                expected = [exists != (why == CONDITION_FAILED) for exists, why in zip(expected, wrong, strict=True)]
                continue
            return Committed(frozenset(i for i, exists in enumerate(expected) if exists))
        raise StoreUnavailable(f"dynamodb: the timers of shard {batch.fence.shard_id} change too often")


def _probably_exists(timer: Timer) -> bool:
    """A first guess: a timer that was attempted or fired before is most likely stored."""
    return timer.attempts > 0 or timer.extras.occurrence > 0


def commit_actions(tables: Tables, batch: Batch, expected: Sequence[bool]) -> list[dict[str, Any]]:
    """The fence, the puts in their order, and the rest. The service allows each item only once."""
    shard_id = batch.fence.shard_id
    actions = [fence_action(tables, batch.fence, batch.low_water)]
    for timer, exists in zip(batch.puts, expected, strict=True):
        condition = f"attribute_{'' if exists else 'not_'}exists(row_key)"
        item = items.timer_item(shard_id, timer)
        actions.append({"Put": {"TableName": tables.timers, "Item": item, "ConditionExpression": condition}})
    for key in batch.deletes:
        key_of_row = items.row_key(shard_id, items.timer_key(key))
        actions.append({"Delete": {"TableName": tables.timers, "Key": key_of_row}})
    ended = {reached.position: reached for reached in reversed(batch.reached)}
    rows = (items.reached_item(shard_id, reached) for reached in ended.values())
    return actions + [{"Put": {"TableName": tables.timers, "Item": row}} for row in rows]


async def purge_reached(
    read: Run, write: Run, tables: Tables, fences: Sequence[Fence], before_ms: int, limit: int
) -> list[int | StoreError]:
    shard_ids = [fence.shard_id for fence in fences]
    return await each_shard_separately(
        fences, shard_ids, lambda f: _purge(read, in_steps(write), tables, f, before_ms, limit)
    )


async def _purge(read: Run, write: Run, tables: Tables, fence: Fence, before_ms: int, limit: int) -> int | ShardLost:
    """Several transactions, each with the fence."""
    first = items.after(items.REACHED, BEFORE_ALL)
    last = items.before(items.REACHED, bound_ms(before_ms))
    removed = 0
    async with tables.lock_of(fence.shard_id):
        while removed < limit:
            count = min(limit - removed, ACTIONS_MAX - 1)
            keys = {"ProjectionExpression": "shard_id, row_key"}
            found, ended = await rows_by_position(
                read, tables, fence.shard_id, first, last, count, 1, NO_CHARS_MAX, **keys
            )
            if not found:
                break
            deletes = [{"Delete": {"TableName": tables.timers, "Key": dict(item)}} for item in found]
            try:
                await _transact(write, [fence_action(tables, fence), *deletes])
            except ConditionFailed:
                return lost(fence)
            removed += len(found)
            if ended:
                break
        if not removed and not await _is_valid(read, tables, fence):
            return lost(fence)
        return removed


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(run: Run, tables: Tables) -> list[Namespace]:
    found = await all_of(run, tables, items.NAMESPACE)
    return namespaces_of((item["item_name"]["S"], item.get("namespace_body", {}).get("S")) for item in found)


async def put_namespace(run: Run, tables: Tables, namespace: Namespace, expected_revision: int | None) -> bool:
    body = text(as_json(namespace))
    request: dict[str, Any] = {"ConditionExpression": "attribute_not_exists(item_name)"}
    if expected_revision is not None:
        request = {
            "ConditionExpression": "namespace_revision = :expected",
            "ExpressionAttributeValues": {":expected": number(expected_revision)},
        }
    try:
        await run(
            "put_item",
            TableName=tables.cluster,
            Item={
                **items.cluster_key(items.NAMESPACE, namespace.name),
                "namespace_revision": number(namespace.revision),
                "namespace_body": body,
            },
            **request,
            **_ALL_OLD,
        )
    except ConditionFailed as failed:
        # True if it was written by an earlier attempt whose answer was lost.
        return failed.may_be_applied and failed.item is not None and failed.item.get("namespace_body") == body
    return True
