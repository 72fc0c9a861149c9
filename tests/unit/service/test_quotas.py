"""Quotas of namespaces: creates and requests per second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_world import URL, World, in_world
from hypothesis import given
from hypothesis import strategies as st

from duetime.domain.timer import Created, NamespaceSpec, TimerKey, TimerSpec
from duetime.errors import Busy, DuetimeError, NotFound
from duetime.service.quotas import TokenBucket
from duetime.store import Member


def specs(namespace: str, count: int, prefix: str = "t") -> list[TimerSpec]:
    return [
        TimerSpec(namespace=namespace, timer_id=f"{prefix}{n}", delay_ms=3_600_000, callback_url=URL)
        for n in range(count)
    ]


def accepted(results: Sequence[Created | DuetimeError]) -> int:
    assert {r.code for r in results if isinstance(r, DuetimeError)} <= {"quota_creates_per_second"}
    return sum(isinstance(result, Created) for result in results)


class TestTokenBucket:
    @given(st.floats(0.1, 50), st.lists(st.integers(0, 3_000), max_size=200))
    def test_it_allows_at_most_the_rate_and_a_seconds_worth_more(self, rate: float, pauses: list[int]) -> None:
        now_ms = 1_000
        bucket, taken = TokenBucket(rate, now_ms), list[int]()
        for pause in pauses:
            now_ms += pause
            if bucket.take(rate, now_ms):
                taken.append(now_ms)
        for first in range(len(taken)):
            for last in range(first, len(taken)):
                seconds = (taken[last] - taken[first]) / 1_000
                assert last - first + 1 <= rate * seconds + max(1.0, rate) + 1e-6

    def test_a_rate_below_one_a_second_allows_one_at_a_time(self) -> None:
        bucket = TokenBucket(0.5, 0)
        assert [bucket.take(0.5, at_ms) for at_ms in (0, 1_000, 2_000, 3_999, 4_000)] == [
            True,
            False,
            True,
            False,
            True,
        ]

    def test_a_lower_rate_holds_at_once(self) -> None:
        bucket = TokenBucket(100, 0)
        assert sum(bucket.take(2, 0) for _ in range(100)) == 2

    def test_a_clock_that_goes_back_adds_nothing(self) -> None:
        bucket = TokenBucket(1, 1_000)
        assert bucket.take(1, 1_000)
        assert not bucket.take(1, 0)


class TestCreates:
    def test_more_creates_than_the_quota_are_refused_and_other_namespaces_are_not(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.namespaces.create(NamespaceSpec(name="small", creates_per_second=10))
            assert accepted(await world.service.create_many(specs("small", 30))) == 10
            assert accepted(await world.service.create_many(specs("default", 30))) == 30
            with pytest.raises(Busy) as refused:
                await world.service.create(specs("small", 1, "one more")[0])
            error = refused.value
            assert (error.status, error.code, error.retry_after_seconds) == (429, "quota_creates_per_second", 1)
            assert "createsPerSecond of namespace 'small', 10," in error.detail
            assert world.engine.telemetry.refused_by_quota.by_label == {"quota_creates_per_second": 21}
            await asyncio.sleep(0.5)
            assert accepted(await world.service.create_many(specs("small", 30, "u"))) == 5

        in_world(scenario)

    def test_a_namespace_without_a_quota_has_that_of_the_server(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.namespaces.create(NamespaceSpec(name="large", creates_per_second=20))
            assert accepted(await world.service.create_many(specs("default", 30))) == 3
            assert accepted(await world.service.create_many(specs("large", 30))) == 20

        in_world(scenario, limits__creates_per_second=3)

    def test_each_instance_allows_its_share(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.namespaces.create(NamespaceSpec(name="small", creates_per_second=9))
            own = next(iter(world.engine.membership.alive.values()))
            others: dict[str, Member] = {f"other {n}": own for n in range(2)}
            world.engine.membership.alive = world.engine.membership.alive | others
            assert accepted(await world.service.create_many(specs("small", 30))) == 3

        in_world(scenario)

    def test_a_quota_is_changed_and_removed_while_running(self) -> None:
        async def scenario(world: World) -> None:
            namespaces = world.service.namespaces
            await namespaces.create(NamespaceSpec(name="small", creates_per_second=2))
            assert accepted(await world.service.create_many(specs("small", 10))) == 2
            await namespaces.update(NamespaceSpec(name="small", creates_per_second=4))
            await asyncio.sleep(1)
            assert accepted(await world.service.create_many(specs("small", 10))) == 4
            await namespaces.update(NamespaceSpec(name="small", creates_per_second=None))
            assert accepted(await world.service.create_many(specs("small", 10))) == 10

        in_world(scenario)


class TestRequests:
    @pytest.mark.parametrize("by_default", [True, False])
    def test_a_create_counts_as_a_request_and_is_refused_before_anything_is_written(self, by_default: bool) -> None:
        async def scenario(world: World) -> None:
            if not by_default:
                await world.service.namespaces.create(NamespaceSpec(name="small", requests_per_second=2))
            one, two, three = specs("default" if by_default else "small", 3)
            await world.service.create(one)
            await world.service.create(two)
            with pytest.raises(Busy) as refused:
                await world.service.create(three)
            assert refused.value.code == "quota_requests_per_second"
            with pytest.raises(NotFound):
                await world.service.get(TimerKey(three.namespace, three.timer_id))

        in_world(scenario, limits__requests_per_second=2 if by_default else 0)

    def test_more_requests_than_the_quota_are_refused(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.namespaces.create(NamespaceSpec(name="small", requests_per_second=2))
            quotas = world.service.quotas
            for _ in range(2):
                quotas.take_request("small")
            with pytest.raises(Busy) as refused:
                quotas.take_request("small")
            assert refused.value.code == "quota_requests_per_second"
            for _ in range(10):
                quotas.take_request("default")
                quotas.take_request("unknown")
            assert accepted(await world.service.create_many(specs("small", 10))) == 10  # creates have their own quota
            with pytest.raises(DuetimeError):
                await world.service.get(TimerKey("small", "missing"))

        in_world(scenario)
