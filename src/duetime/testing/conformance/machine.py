"""Conformance: random histories of calls give the same answers on the store under test and on MemoryStore."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from duetime.domain.timer import Extras, Namespace, Outcome, Position, Reached, Timer, TimerKey, shard_of
from duetime.errors import StoreError, StoreThrottled, StoreUnavailable
from duetime.store import NO_CHARS_MAX, Batch, Claim, Fence, ListQuery, Member, PageRequest, Store
from duetime.stores.memory import MemoryStore
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import EVERY_OUTCOME, Harness, all_timers, listed, load

_CALLS_MAX = 10
T = TypeVar("T")

# Few distinct values, so that calls affect the same rows often.
SHARDS = 3
IDS = ["a", "b", "B", "b ", "c%", "é", "e\u0301", "😀"]
NAMESPACES = ["n", "N"]
TIMES = st.integers(0, 12)
SHARD_IDS = st.integers(0, SHARDS - 1)
KEYS = st.builds(TimerKey, st.sampled_from(NAMESPACES), st.sampled_from(IDS))
CHARS_MAX = st.sampled_from([0, 8, 9, 10, NO_CHARS_MAX])  # the only payload of some length has 9 characters
TAGS = st.sampled_from([(), ("x",), ("x", "y")])
POSITIONS = st.builds(Position, TIMES, st.sampled_from([-(1 << 63), -1, 0, (1 << 63) - 1]), st.integers(-1, 1))


@st.composite
def timers(draw: st.DrawFn, key: TimerKey) -> Timer:
    return make_timer(
        key.timer_id,
        draw(TIMES),
        namespace=key.namespace,
        generation=draw(st.integers(1, 3)),
        attempts=draw(st.integers(0, 2)),
        scheduled_at_ms=draw(TIMES),
        payload=draw(st.sampled_from([None, "", '{"a":"ü"}'])),
        correlation_id=draw(st.sampled_from([None, "r", "R"])),
        extras=Extras(tags=draw(TAGS)),
    )


@st.composite
def ends(draw: st.DrawFn, key: TimerKey) -> Reached:
    """Every field follows from the key, the generation, the occurrence and the purge time, so that the same reached row
    can be drawn again."""
    generation, occurrence, purge_at_ms = draw(st.integers(1, 2)), draw(st.integers(0, 2)), draw(TIMES)
    timer = make_timer(
        key.timer_id,
        generation,
        namespace=key.namespace,
        generation=generation,
        correlation_id="r" if occurrence else None,
        extras=Extras(tags=("x",) * occurrence, occurrence=occurrence),
    )
    outcome = list(Outcome)[(generation + occurrence) % 4]
    return make_reached(timer, outcome, reached_at_ms=purge_at_ms + occurrence, purge_at_ms=purge_at_ms)


@st.composite
def work(draw: st.DrawFn) -> list[Batch]:
    """One batch per shard, without fences: the machine fills them in."""
    by_shard: dict[int, tuple[list[Timer], list[TimerKey], list[Reached]]] = {}
    for key in draw(st.lists(KEYS, unique=True, max_size=12)):
        puts, deletes, reached = by_shard.setdefault(shard_of(key.timer_id, SHARDS), ([], [], []))
        action = draw(st.sampled_from(["put", "put", "delete", "settle", "rearm"]))
        if action in ("put", "rearm"):
            puts.append(draw(timers(key)))
        else:
            deletes.append(key)
        if action in ("settle", "rearm"):
            reached.extend(draw(st.lists(ends(key), min_size=1, max_size=3)))
    return [
        Batch(Fence(shard_id, 0, 0), *lists, draw(st.none() | POSITIONS))
        for shard_id, lists in sorted(by_shard.items())
    ]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.harness = harness
        self.loop = asyncio.new_event_loop()
        self.model = MemoryStore()
        self.fences = {shard_id: [Fence(shard_id, 0, 0)] for shard_id in range(SHARDS)}

    def run(self, action: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(action)

    def both(self, action: Callable[[Store], Coroutine[Any, Any, object]]) -> Any:
        """Make the call on both stores and compare the answers. A call that was not applied because the server was
        too slow is made again: that is no disagreement."""
        wanted, got = self.run(_answer(action(self.model))), self.run(_answer(action(self.store)))
        for _ in range(_CALLS_MAX - 1):
            if got not in (StoreUnavailable, StoreThrottled) or got == wanted:
                break
            got = self.run(_answer(action(self.store)))
        assert got == wanted
        return wanted

    @initialize()
    def begin(self) -> None:
        self.run(self.harness.wipe())
        self.store = self.harness.new_store()
        self.run(self.store.migrate())
        self.run(self.store.open())
        self.both(lambda store: store.ensure_shards(SHARDS))
        self.take(list(range(SHARDS)), stale=False, nonce=1)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
        self.loop.close()

    @rule(
        shard_ids=st.lists(SHARD_IDS, min_size=1, max_size=SHARDS, unique=True),
        stale=st.booleans(),
        nonce=st.integers(-5, 5),
    )
    def claim(self, shard_ids: list[int], stale: bool, nonce: int) -> None:
        self.take(shard_ids, stale, nonce)

    def take(self, shard_ids: list[int], stale: bool, nonce: int) -> None:
        versions = {row.shard_id: row.version - stale for row in self.run(self.model.shards())}
        claims = [
            Claim(shard_id, versions[shard_id], nonce, f"i{nonce}", "host:1", nonce + 9) for shard_id in shard_ids
        ]
        for row in self.both(lambda store: store.claim(claims)):
            self.fences[row.shard_id].append(row.fence)

    @rule(data=st.data(), batches=work())
    def commit(self, data: st.DataObject, batches: list[Batch]) -> None:
        self.write(data, batches)

    @rule(data=st.data(), batches=work())
    def commit_again(self, data: st.DataObject, batches: list[Batch]) -> None:
        self.write(data, batches)  # a second rule, so that commits are drawn more often than other calls

    def write(self, data: st.DataObject, batches: list[Batch]) -> None:
        filled = [replace(batch, fence=self.a_fence(data, batch.fence.shard_id)) for batch in batches]
        self.both(lambda store: store.commit(filled))

    @rule(data=st.data(), shard_ids=st.lists(SHARD_IDS, min_size=1, max_size=2, unique=True))
    def release(self, data: st.DataObject, shard_ids: list[int]) -> None:
        fences = [self.a_fence(data, shard_id) for shard_id in shard_ids]
        self.both(lambda store: store.release(fences))

    @rule(
        data=st.data(),
        shard_ids=st.lists(SHARD_IDS, min_size=1, max_size=2, unique=True),
        before_ms=TIMES,
        limit=st.integers(1, 4),
    )
    def purge(self, data: st.DataObject, shard_ids: list[int], before_ms: int, limit: int) -> None:
        fences = [self.a_fence(data, shard_id) for shard_id in shard_ids]
        self.both(lambda store: store.purge_reached(fences, before_ms, limit))

    def a_fence(self, data: st.DataObject, shard_id: int) -> Fence:
        """Mostly the newest fence, sometimes that with another nonce, sometimes an old one."""
        newest, choice = self.fences[shard_id][-1], data.draw(st.integers(0, 6), label="fence")
        if choice > 1:
            return newest
        if choice == 1:
            return replace(newest, nonce=newest.nonce + 1)
        return data.draw(st.sampled_from(self.fences[shard_id]), label="old fence")

    @rule(
        requests=st.lists(st.builds(PageRequest, SHARD_IDS, POSITIONS, TIMES, st.integers(1, 5), CHARS_MAX), max_size=4)
    )
    def load(self, requests: list[PageRequest]) -> None:
        pages = self.run(load(self.store, requests))
        for got, wanted in zip(pages, self.run(load(self.model, requests)), strict=True):
            shorter = len(got.timers)
            assert list(got.timers) == list(wanted.timers)[:shorter]
            assert (got.next is None) <= (wanted.next is None and shorter == len(wanted.timers))

    @rule(keys=st.lists(st.tuples(SHARD_IDS, KEYS), max_size=6))
    def get(self, keys: list[tuple[int, TimerKey]]) -> None:
        self.both(lambda store: store.get_many(keys))

    @rule(
        query=st.builds(
            ListQuery,
            namespace=st.sampled_from(NAMESPACES),
            num_shards=st.integers(1, SHARDS),
            after=POSITIONS,
            limit=st.integers(1, 5),
            outcomes=st.frozensets(st.sampled_from(Outcome)),
            due_from_ms=st.none() | TIMES,
            due_until_ms=st.none() | TIMES,
            id_prefix=st.none() | st.sampled_from(["b", "e", "c%", "😀", ""]),
            tag=st.none() | st.sampled_from(["x", "y", "z"]),
            correlation_id=st.none() | st.sampled_from(["r", "R"]),
            chars_max=CHARS_MAX,
            payloads=st.booleans(),
        )
    )
    def list_some(self, query: ListQuery) -> None:
        self.both(lambda store: listed(store, query))

    @rule(
        name=st.sampled_from("pq"), action=st.sampled_from(["join", "beat", "die", "forget"]), ahead=st.integers(0, 1)
    )
    def member(self, name: str, action: str, ahead: int) -> None:
        # A counter only grows: the effect of a smaller one is not defined.
        counter = next((m.counter for m in self.run(self.model.members()) if m.instance_id == name), 0) + ahead
        actions: dict[str, Callable[[Store], Coroutine[Any, Any, object]]] = {
            "join": lambda store: store.join(Member(name, "host:1", 0, True, 1)),
            "beat": lambda store: _beat(store, name, counter),
            "die": lambda store: store.mark_dead(name, counter),
            "forget": lambda store: store.forget_member(name),
        }
        self.both(actions[action])
        self.both(_members)

    @rule(name=st.sampled_from(NAMESPACES), expected=st.none() | st.integers(0, 3), revision=st.integers(0, 3))
    def namespace(self, name: str, expected: int | None, revision: int) -> None:
        namespace = Namespace(name=name, num_shards=SHARDS, created_at_ms=revision, revision=revision)
        self.both(lambda store: store.put_namespace(namespace, expected))
        self.both(lambda store: store.namespaces())

    @precondition(lambda self: hasattr(self, "store") and self.store.capabilities.durable)
    @rule(odds=st.integers(0, 9))
    def restart(self, odds: int) -> None:
        if odds == 0:
            self.run(self.store.close())
            self.store = self.harness.new_store()
            self.run(self.store.open())

    @invariant()
    def the_contents_are_the_same(self) -> None:
        if hasattr(self, "store"):
            self.both(_everything)


async def _answer(action: Coroutine[Any, Any, T]) -> object:
    """The answer in a form that can be compared: a StoreError by its type."""
    try:
        answer: object = await action
    except StoreError as error:
        return type(error)
    if isinstance(answer, list):
        return [type(item) if isinstance(item, StoreError) else item for item in answer]
    return answer


async def _beat(store: Store, name: str, counter: int) -> None:
    await store.heartbeat(name, counter)


async def _members(store: Store) -> list[Member]:
    return sorted(await store.members(), key=lambda member: member.instance_id)


async def _everything(store: Store) -> object:
    ended = [
        await listed(store, ListQuery(namespace=name, num_shards=SHARDS, outcomes=EVERY_OUTCOME, limit=100))
        for name in NAMESPACES
    ]
    return await store.shards(), [await all_timers(store, shard_id, page=2) for shard_id in range(SHARDS)], ended


class AgreesWithMemory(Harness):
    HISTORIES = 25  # DUETIME_TEST_EXAMPLES in the environment overrides it

    async def test_random_histories_agree_with_the_memory_store(self) -> None:
        examples = int(os.environ.get("DUETIME_TEST_EXAMPLES", self.HISTORIES))
        bounds = settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        # Hypothesis is synchronous and the machine has its own event loop, so it runs in a thread.
        machine: Any = lambda: StoreMachine(self)  # noqa: E731 - annotated as a class, but any factory works
        await asyncio.to_thread(run_state_machine_as_test, machine, settings=bounds)
