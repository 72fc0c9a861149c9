"""The intake: each command is acknowledged after its commit, refused as a dead letter, or delivered again; and what is
wrong with one tenant or with the store neither stops the others nor uses up deliveries."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from engine_world import World, on_faulty

from duetime.domain.instants import format_instant
from duetime.domain.timer import CommandPosition, Created, Namespace, NamespaceSpec, State, TimerKey, TimerSpec
from duetime.errors import BrokerAway, InvalidField, SetupError
from duetime.ingress.intake import Intake, IntakeSettings
from duetime.ingress.source import Backlog, CommandSource, Message, Refusal
from duetime.testing.faulty import Fault, FaultyStore

_SETTINGS = IntakeSettings(
    target="http://events.test/{tenant}",
    create_tenants=True,
    tenants_max=10,
    in_flight_max=100,
    in_flight_bytes_max=100_000,
    extend_seconds=10.0,
)


class Stream:
    """A CommandSource whose broker is this object: it delivers again what is not acknowledged after `ack_wait`."""

    name = "nats"

    def __init__(self, ack_wait: float = 30.0) -> None:
        self.away: BrokerAway | SetupError | None = None
        self.acks_away = 0  # so many acknowledgements fail
        self.holds_up_deliveries = 1_000  # from then on, commands that are not done keep the others from being received
        self.letters_away: set[str | None] = set()  # tenants whose dead letters cannot be stored
        self.unacknowledged: int | None = None
        self.published = 0
        self.waiting: list[Message] = []
        self.acknowledged: list[int] = []  # sequence numbers
        self.refused: list[Refusal] = []
        self.retried: list[tuple[int, int]] = []  # sequence number, delay
        self.extended: list[int] = []
        self.received = 0
        self.most_received = 0  # at once, not acknowledged
        self.is_open = False
        self._wake = asyncio.Event()
        self._given: dict[int, Message] = {}
        self._ack_wait = ack_wait

    def publish(self, body: bytes, tenant: str | None = None) -> int:
        self.published += 1
        position = CommandPosition("nats:test", self.published, self.published)
        self._put(Message(f"timers.commands.{tenant}", tenant, body, position, 1, self.published))
        return self.published

    def _put(self, message: Message) -> None:
        self.waiting.append(message)
        self._wake.set()

    async def open(self) -> None:
        if self.away is not None:
            raise self.away
        self.is_open = True

    async def receive(self, limit: int, bytes_max: int) -> Sequence[Message]:
        if self.away is not None:
            raise self.away
        if not self.waiting:
            self._wake.clear()
            try:
                async with asyncio.timeout(1):
                    await self._wake.wait()
            except TimeoutError:
                return []
        taken: list[Message] = []
        while self.waiting and len(taken) < limit and bytes_max > 0:
            bytes_max -= len(self.waiting[0].body)
            taken.append(self.waiting.pop(0))
        self.received += len(taken)
        for message in taken:
            self._given[message.position.sequence] = message
        self.most_received = max(self.most_received, len(self._given))
        return taken

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        if self.away is not None or self.acks_away:
            self.acks_away = max(self.acks_away - 1, 0)
            raise self.away or BrokerAway("cut")
        self._end(messages)
        self.acknowledged += [message.position.sequence for message in messages]

    async def retry(self, message: Message, delay_ms: int) -> None:
        self._end([message])
        self.retried.append((message.position.sequence, delay_ms))
        again = msgspec.structs.replace(message, deliveries=message.deliveries + 1)
        asyncio.get_running_loop().call_later(delay_ms / 1_000, self._put, again)

    def holds_others_up(self, message: Message) -> bool:
        return message.deliveries >= self.holds_up_deliveries

    async def refuse(self, message: Message, refusal: Refusal) -> None:
        if self.away is not None:
            raise self.away
        if message.tenant in self.letters_away:
            raise BrokerAway("no stream stores this subject")
        self._end([message])
        self.refused.append(refusal)

    def _end(self, messages: Sequence[Message]) -> None:
        for message in messages:
            del self._given[message.position.sequence]

    async def extend(self, messages: Sequence[Message]) -> None:
        self.extended += [message.position.sequence for message in messages]

    async def backlog(self) -> Backlog | None:
        return Backlog(len(self.waiting), unacknowledged=self.unacknowledged, remark="half of it is old")

    async def close(self) -> None:
        self.is_open = False


def schedule(timer_id: str, tenant: str = "shop", in_ms: int = 60_000, **fields: Any) -> bytes:
    at = format_instant(1_800_000_000_000 + in_ms)
    payload = {"tenantId": tenant, "serviceCallId": timer_id, "dueAt": at}
    return _envelope("ScheduleTimer", tenant, payload, **fields)


def cancel(timer_id: str, tenant: str = "shop") -> bytes:
    return _envelope("CancelTimer", tenant, {"tenantId": tenant, "serviceCallId": timer_id})


def _envelope(kind: str, tenant: str, payload: dict[str, str], **fields: Any) -> bytes:
    envelope = {"id": "c", "type": kind, "tenantId": tenant, "timestampMs": 1, "payload": payload, **fields}
    return json.dumps(envelope).encode()


class Taking:
    """A world with an intake that receives from a stream."""

    def __init__(self, world: World, store: FaultyStore, stream: Stream, intake: Intake) -> None:
        self.world, self.store, self.stream, self.intake = world, store, stream, intake

    async def get(self, timer_id: str, tenant: str = "shop") -> State:
        return (await self.world.service.get(TimerKey(tenant, timer_id))).state

    def counted(self) -> dict[str, int]:
        results = self.world.engine.telemetry.commands.by_label
        return {result: count for result, count in results.items() if count}


def taking(
    scenario: Callable[[Taking], Awaitable[None]],
    *,
    before: Callable[[World, Stream], Awaitable[None]] | None = None,
    settings: dict[str, Any] | None = None,
    **changed: Any,
) -> None:
    async def run(world: World, store: FaultyStore) -> None:
        stream = Stream()
        if before is not None:
            await before(world, stream)
        source: CommandSource = stream
        intake_settings = msgspec.structs.replace(_SETTINGS, **changed)
        intake = Intake(source, intake_settings, world.service, world.engine.telemetry)
        await intake.open()
        intake.start()
        try:
            await scenario(Taking(world, store, stream, intake))
        finally:
            await intake.stop()

    on_faulty(run, **(settings or {}))


# --- what commands do ----------------------------------------------------------------------------


def test_a_command_makes_the_namespace_and_the_timer_and_is_acknowledged_after_the_commit() -> None:
    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        it.stream.publish(schedule("a", correlationId="k"))
        await asyncio.sleep(2)
        assert it.stream.acknowledged == []
        released.set()
        await asyncio.sleep(2)
        assert it.stream.acknowledged == [1]
        view = await it.world.service.get(TimerKey("shop", "a"))
        assert (view.timer.callback_url, view.timer.correlation_id) == ("http://events.test/shop", "k")
        assert it.counted() == {"scheduled": 1}
        await asyncio.sleep(90)
        assert it.world.destinations.called() == ["a"]

    taking(scenario)


def test_the_default_target_of_the_namespace_goes_before_the_configured_one() -> None:
    async def before(world: World, stream: Stream) -> None:
        for name, url in (("shop", "http://own.test"), ("bank", None)):
            await world.service.namespaces.create(NamespaceSpec(name=name, callback_url=url))

    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a", "shop"))
        it.stream.publish(schedule("a", "bank"))
        await asyncio.sleep(2)
        urls = [(await it.world.service.get(TimerKey(name, "a"))).timer.callback_url for name in ("shop", "bank")]
        assert urls == ["http://own.test", "http://events.test/bank"]

    taking(scenario, before=before)


def test_the_last_of_several_commands_for_a_timer_counts() -> None:
    async def scenario(it: Taking) -> None:
        for in_ms in (50_000, 40_000, 30_000):
            it.stream.publish(schedule("a", in_ms=in_ms))
        it.stream.publish(cancel("b"))
        it.stream.publish(schedule("b"))
        it.stream.publish(schedule("c"))
        it.stream.publish(cancel("c"))
        await asyncio.sleep(2)
        assert sorted(it.stream.acknowledged) == [1, 2, 3, 4, 5, 6, 7]
        view = await it.world.service.get(TimerKey("shop", "a"))
        assert view.timer.scheduled_at_ms == 1_800_000_030_000
        assert [await it.get("b"), await it.get("c")] == [State.SCHEDULED, State.CANCELLED]
        assert it.counted() == {"scheduled": 3, "cancelled": 2, "ignored": 2}

    taking(scenario)


def test_commands_for_a_timer_that_is_over_are_acknowledged_and_ignored() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a", in_ms=0))
        await asyncio.sleep(5)
        it.stream.publish(schedule("a"))
        await asyncio.sleep(2)
        it.stream.publish(cancel("a"))
        await asyncio.sleep(100)
        assert it.stream.acknowledged == [1, 2, 3]
        assert it.world.destinations.called() == ["a"]
        assert it.counted() == {"scheduled": 1, "ignored": 2}

    taking(scenario)


def test_a_cancel_that_overtakes_the_first_command_of_a_new_tenant_counts() -> None:
    async def scenario(it: Taking) -> None:
        create = it.stream.publish(schedule("a", "new"))
        early = it.stream.waiting.pop()
        it.stream.publish(cancel("a", "new"))
        await asyncio.sleep(2)
        it.stream.waiting.append(early)
        await asyncio.sleep(100)
        assert it.stream.acknowledged == [2, create]
        assert await it.get("a", "new") is State.CANCELLED
        assert it.world.destinations.called() == []

    taking(scenario)


# --- what can never succeed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tenant", "field", "reason"),
    [
        (b"\xff", None, None, "the message is not JSON"),
        (b'{"id":"c"}', None, "type", "type is required"),
        (b"[]", None, None, "the message must be an object, not a list"),
        (schedule("a", id=7), None, "id", "id must be a string, not a number"),
        (schedule("a", correlationId=7), None, "correlationId", "correlationId must be a string, not a number"),
        (
            b'{"id":"c","type":"CancelTimer","tenantId":"t","timestampMs":1,"payload":[]}',
            None,
            "payload",
            "payload must be an object, not a list",
        ),
        (schedule("a", "shop"), "bank", "tenantId", "tenantId is not the tenant of the subject"),
        (cancel("a", "no.token"), None, "tenantId", "cannot be a part of the target"),
        (schedule("a", "no.token"), None, "tenantId", "cannot be a part of the target"),
    ],
)
def test_a_wrong_command_becomes_a_dead_letter(body: bytes, tenant: str | None, field: str, reason: str) -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(body, tenant)
        it.stream.publish(schedule("good"))
        await asyncio.sleep(2)
        (refusal,) = it.stream.refused
        assert reason in refusal.reason
        assert (refusal.field, it.stream.acknowledged) == (field, [2])
        assert it.counted() == {"refused": 1, "scheduled": 1}

    taking(scenario)


def test_an_unknown_tenant_is_refused_if_none_may_be_made() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a", "new"))
        await asyncio.sleep(2)
        assert "nats.create_tenants is false" in it.stream.refused[0].reason

    taking(scenario, create_tenants=False)


def test_no_more_tenants_are_made_than_allowed() -> None:
    """The default namespace counts too. Commands of those that exist are carried out."""

    async def scenario(it: Taking) -> None:
        for tenant in ("a", "b", "c", "a"):
            it.stream.publish(schedule("x", tenant))
            await asyncio.sleep(2)
        assert [refusal.field for refusal in it.stream.refused] == ["tenantId"]
        assert "tenants_max is 3" in it.stream.refused[0].reason
        assert it.stream.acknowledged == [1, 2, 4]

    taking(scenario, tenants_max=3)


@pytest.mark.parametrize("tenant", ["evil", "evil-{}", "no.token", "no.{}"])
@pytest.mark.parametrize("bounds", [{"create_tenants": False}, {"tenants_max": 2}])
def test_commands_of_tenants_without_a_namespace_do_not_delay_the_others(tenant: str, bounds: dict[str, Any]) -> None:
    """Each of them would read the namespaces, and wait for the one before it."""

    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop"))

    async def scenario(it: Taking) -> None:
        for number in range(500):
            it.stream.publish(schedule(f"t{number % 100}", tenant.format(number)))
        good = it.stream.publish(schedule("good"))
        await asyncio.sleep(2)
        assert len(it.stream.refused) == 500
        assert it.stream.acknowledged == [good]

    taking(scenario, before=before, **bounds)


def test_a_namespace_that_an_operator_makes_is_found_soon() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a", "new"))
        await asyncio.sleep(1)
        assert len(it.stream.refused) == 1
        await it.world.service.namespaces.create(NamespaceSpec(name="new"))
        await asyncio.sleep(1)
        it.stream.publish(schedule("b", "new"))
        await asyncio.sleep(1)
        assert it.stream.acknowledged == [2]

    taking(scenario, create_tenants=False)


def test_between_large_commands_the_event_loop_does_other_work() -> None:
    async def scenario(it: Taking) -> None:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            if len(it.stream.refused) < 10:
                asyncio.get_running_loop().call_soon(turn)

        for _ in range(10):
            it.stream.publish(b"\x01" * 300_000)
        turn()
        await asyncio.sleep(1)
        assert len(it.stream.refused) == 10
        assert turns >= 10

    taking(scenario, in_flight_bytes_max=10_000_000)


def test_dead_letters_that_cannot_be_stored_do_not_stop_other_tenants_and_are_not_lost() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.letters_away = {"evil"}
        for _ in range(300):
            it.stream.publish(b"x", "evil")
        good = it.stream.publish(schedule("a"), "shop")
        await asyncio.sleep(20)
        assert (it.stream.acknowledged, it.stream.refused) == ([good], [])
        it.stream.letters_away.clear()
        await asyncio.sleep(60)
        assert (len(it.stream.refused), it.intake.in_flight) == (300, 0)
        assert it.counted()["refused"] == 300

    taking(scenario)


def test_each_of_several_wrong_commands_for_a_timer_becomes_a_dead_letter() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a", "no.token", id="1"))
        it.stream.publish(schedule("a", "no.token", id="2"))
        await asyncio.sleep(2)
        assert sorted(refusal.command_id or "" for refusal in it.stream.refused) == ["1", "2"]
        assert it.intake.in_flight == 0

    taking(scenario)


def test_the_refusals_of_each_tenant_are_logged_by_themselves_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(it: Taking) -> None:
        for _ in range(50):
            it.stream.publish(b"x", "shop")
        it.stream.publish(b"{}", "bank")
        await asyncio.sleep(5)
        assert lines() == [SHOP] * 3 + [f"{SHOP.replace('shop', 'bank').replace(NOT_JSON, 'id is required')}"]
        await asyncio.sleep(10)
        assert lines()[4:] == [
            f"nats: 47 more commands of 'timers.commands.shop' became dead letters, the last: {NOT_JSON}"
        ]
        it.stream.publish(b"x", "shop")
        await asyncio.sleep(2)
        assert lines()[5:] == [SHOP]
        assert (it.intake.refusals.count, it.intake.refusals.reason, it.intake.refused_ago_ms) == (52, NOT_JSON, 2_000)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "dead letter" in record.getMessage()]

    taking(scenario)


NOT_JSON = "the message is not JSON"
SHOP = f"nats: a command of 'timers.commands.shop' became a dead letter: {NOT_JSON}"


def test_what_was_not_logged_at_the_stop_is_logged_then(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Taking) -> None:
        for _ in range(5):
            it.stream.publish(b"x", "shop")
        await asyncio.sleep(1)

    taking(scenario)
    assert "2 more commands of 'timers.commands.shop' became dead letters" in caplog.text


# --- what may succeed later ----------------------------------------------------------------------


def test_commands_beyond_the_quota_of_a_namespace_are_delivered_again_and_do_not_stop_other_tenants() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(
            NamespaceSpec(name="shop", callback_url="http://own.test", requests_per_second=1)
        )

    async def scenario(it: Taking) -> None:
        for number in range(20):
            it.stream.publish(schedule(f"a{number}"))
        it.stream.publish(schedule("b", "bank"))
        await asyncio.sleep(1)
        assert 21 in it.stream.acknowledged
        assert it.stream.retried
        assert it.intake.not_consuming() is None
        await asyncio.sleep(400)
        assert sorted(it.stream.acknowledged) == list(range(1, 22))
        assert len(it.world.destinations.called()) == 21

    taking(scenario, before=before, in_flight_bytes_max=1_000_000)


def test_commands_that_wait_for_their_quota_are_shown_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def before(world: World, stream: Stream) -> None:
        stream.unacknowledged = 40
        for name, quota in (("shop", 1), ("bank", 1), ("depot", 100)):
            spec = NamespaceSpec(name=name, callback_url="http://own.test", creates_per_second=quota)
            await world.service.namespaces.create(spec)

    async def scenario(it: Taking) -> None:
        for number in range(120):
            it.stream.publish(schedule(f"a{number}"))
        for tenant in ("bank", "depot"):
            for number in range(10):
                it.stream.publish(schedule(f"b{number}", tenant))
        await asyncio.sleep(0.5)
        waiting = 140 - len(it.stream.acknowledged)
        assert (it.intake.retrying, it.intake.in_flight, it.intake.unacknowledged) == (waiting, 0, 40)
        assert it.intake.remark == "half of it is old"
        assert "createsPerSecond of namespace" in str(it.intake.retry_reason)
        assert "wait for their quota" not in caplog.text
        await asyncio.sleep(30)
        assert lines() == 1
        said = r"nats: \d+ commands of 2 tenants wait for their quota, the most \(\d+\) of 'shop'"
        assert re.search(said, caplog.text)
        await asyncio.sleep(40)
        assert lines() == 2
        await asyncio.sleep(400)
        assert (it.intake.retrying, it.intake.retry_reason) == (0, None)
        assert it.world.engine.telemetry.commands_repeated.by_label["nats"] == it.stream.received - 140 > 0

    def lines() -> int:
        return sum("wait for their quota" in record.getMessage() for record in caplog.records)

    taking(scenario, before=before, in_flight_bytes_max=1_000_000)


def test_commands_that_wait_for_another_reason_are_shown_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def before(world: World, stream: Stream) -> None:
        stream.letters_away = {"shop"}

    async def scenario(it: Taking) -> None:
        it.stream.publish(b"x", "shop")
        await asyncio.sleep(10)
        assert it.intake.retrying == 1
        assert it.intake.retry_reason == "its dead letter cannot be stored: the message is not JSON"
        assert it.intake.refusals.count == 0
        assert "1 commands wait for a retry: its dead letter cannot be stored" in caplog.text

    taking(scenario, before=before)


@pytest.mark.parametrize(
    "shop", [NamespaceSpec(name="shop", requests_per_second=1), NamespaceSpec(name="shop", creates_per_second=1)]
)
def test_cancels_of_timers_that_were_never_created_count_as_requests_and_creates(shop: NamespaceSpec) -> None:
    """Each stores a row."""

    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(shop)

    async def scenario(it: Taking) -> None:
        for number in range(20):
            it.stream.publish(cancel(f"a{number}"))
        await asyncio.sleep(5)
        assert 1 <= len(it.stream.acknowledged) <= 7
        await asyncio.sleep(400)
        assert (sorted(it.stream.acknowledged), it.stream.refused) == (list(range(1, 21)), [])

    taking(scenario, before=before, in_flight_bytes_max=1_000_000)


def test_a_cancel_of_a_timer_that_is_stored_is_no_create() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        for number in range(20):
            it.stream.publish(schedule(f"a{number}"))
        await asyncio.sleep(2)
        await it.world.service.namespaces.update(NamespaceSpec(name="shop", creates_per_second=1))
        for number in range(20):
            it.stream.publish(cancel(f"a{number}"))
        await asyncio.sleep(2)
        assert sorted(it.stream.acknowledged) == list(range(1, 41))
        assert it.stream.retried == []

    taking(scenario, before=before)


def test_a_tenant_far_beyond_its_quota_does_not_keep_all_places_of_commands_that_wait() -> None:
    async def before(world: World, stream: Stream) -> None:
        for name in ("shop", "bank"):
            await world.service.namespaces.create(
                NamespaceSpec(name=name, callback_url="http://own.test", requests_per_second=1)
            )

    async def scenario(it: Taking) -> None:
        for number in range(50):
            it.stream.publish(schedule(f"a{number}", id=str(number)))
        await asyncio.sleep(0.5)
        refused = len(it.stream.refused)
        assert 30 <= refused <= 45, "some were carried out, 10 may wait"
        assert it.stream.refused[0].command_id
        assert "too many commands of this tenant wait already" in it.stream.refused[0].reason
        for number in range(5):
            it.stream.publish(schedule(f"b{number}", "bank", id="bank"))
        await asyncio.sleep(400)
        assert "bank" not in {refusal.command_id for refusal in it.stream.refused}, "there was room for it"
        assert len(it.stream.acknowledged) == 55 - len(it.stream.refused)
        assert set(range(51, 56)) <= set(it.stream.acknowledged)

    taking(scenario, before=before, in_flight_bytes_max=64_000)


def test_a_command_beyond_its_quota_that_holds_up_those_of_others_is_refused() -> None:
    async def before(world: World, stream: Stream) -> None:
        stream.holds_up_deliveries = 3
        await world.service.namespaces.create(
            NamespaceSpec(name="shop", callback_url="http://own.test", requests_per_second=1)
        )

    async def scenario(it: Taking) -> None:
        for number in range(40):
            it.stream.publish(schedule(f"a{number}"))
        await asyncio.sleep(400)
        assert it.stream.refused
        assert {"the commands after it cannot wait any longer" in each.reason for each in it.stream.refused} == {True}
        assert len(it.stream.acknowledged) + len(it.stream.refused) == 40
        assert max(sum(number == each for number, _ in it.stream.retried) for each in range(1, 41)) == 2

    taking(scenario, before=before, in_flight_bytes_max=1_000_000)


def test_a_command_that_holds_up_others_because_the_store_is_away_is_not_refused() -> None:
    async def before(world: World, stream: Stream) -> None:
        stream.holds_up_deliveries = 1
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        it.store.fail("commit", *[Fault.UNAVAILABLE] * 100_000)
        it.stream.publish(schedule("a"))
        await asyncio.sleep(300)
        assert it.stream.retried
        it.store.heal()
        await asyncio.sleep(120)
        assert (it.stream.refused, it.stream.acknowledged) == ([], [1])

    taking(scenario, before=before)


def test_while_all_queues_are_full_commands_wait_and_none_is_refused() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        for number in range(200):
            it.stream.publish(schedule(f"a{number}"))
        await asyncio.sleep(4)
        released.set()
        await asyncio.sleep(200)
        assert (it.stream.refused, len(it.stream.acknowledged)) == ([], 200)

    taking(scenario, before=before, settings={"engine__writes_waiting_max": 20})


def test_retries_come_later_and_later() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        it.store.fail("commit", *[Fault.UNAVAILABLE] * 100_000)
        it.stream.publish(schedule("a"))
        await asyncio.sleep(1_000)
        for (_, delay_ms), most in zip(it.stream.retried, (1, 2, 4, 8, 16, 32, 60, 60), strict=False):
            assert most * 500 <= delay_ms <= most * 1_000
        assert len(it.stream.retried) >= 8
        it.store.heal()
        await asyncio.sleep(120)
        assert it.stream.acknowledged == [1]

    taking(scenario, before=before)


def test_the_outcome_of_a_commit_is_unknown_and_the_command_is_carried_out_once() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        it.store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        it.stream.publish(schedule("a", in_ms=0))
        await asyncio.sleep(30)
        assert it.stream.acknowledged == [1]
        assert it.world.destinations.called() == ["a"]

    taking(scenario, before=before)


# --- what stops all commands ---------------------------------------------------------------------


def test_while_the_store_is_away_few_commands_are_received() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        it.store.fail("commit", *[Fault.UNAVAILABLE] * 10_000)
        it.stream.publish(schedule("first"))
        await asyncio.sleep(1)
        for number in range(1_000):
            it.stream.publish(schedule(f"a{number}"))
        await asyncio.sleep(60)
        assert it.intake.not_consuming() == "the store is away"
        assert it.stream.received < 200
        it.store.heal()
        await asyncio.sleep(200)
        assert len(it.stream.acknowledged) == 1_001
        assert it.intake.not_consuming() is None

    taking(scenario, before=before)


@pytest.mark.parametrize("useless", [b"not a command", schedule("c", "no.token")])
def test_after_a_failure_of_the_store_commands_that_do_not_reach_it_do_not_hold_up_the_others(useless: bytes) -> None:
    """While it is not known that the store is back, commands are received one by one."""

    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        it.store.fail("commit", *[Fault.UNAVAILABLE] * 100_000)
        it.stream.publish(schedule("first"))
        while not it.stream.retried:
            await asyncio.sleep(0.1)
        it.store.heal()
        for _ in range(100):
            it.stream.publish(useless)
        good = it.stream.publish(schedule("good"))
        await asyncio.sleep(5)
        assert good in it.stream.acknowledged

    taking(scenario, before=before)


def test_a_broker_that_is_away_at_the_start_is_opened_later(caplog: pytest.LogCaptureFixture) -> None:
    async def before(world: World, stream: Stream) -> None:
        stream.away = BrokerAway("no route")

    async def scenario(it: Taking) -> None:
        await asyncio.sleep(10)
        assert it.intake.not_consuming() == "no route"
        it.stream.away = None
        it.stream.publish(schedule("a"))
        await asyncio.sleep(5)
        assert (it.stream.acknowledged, it.intake.not_consuming()) == ([1], None)

    taking(scenario, before=before)


def test_what_can_never_work_fails_the_start_and_is_tried_again_later_in_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(world: World, store: FaultyStore) -> None:
        stream = Stream()
        stream.away = SetupError("there is no stream")
        intake = Intake(stream, _SETTINGS, world.service, world.engine.telemetry)
        with pytest.raises(SetupError, match="no stream"):
            await intake.open()

    on_faulty(run)

    async def scenario(it: Taking) -> None:
        it.stream.away = BrokerAway("gone")
        await asyncio.sleep(3)
        it.stream.away = SetupError("there is no stream")
        await asyncio.sleep(30)
        assert it.intake.not_consuming() == "there is no stream"
        it.stream.away = None
        await asyncio.sleep(3)
        assert it.intake.not_consuming() is None

    taking(scenario)
    assert sum("there is no stream" in record.getMessage() for record in caplog.records) == 1


def test_acknowledgements_wait_for_the_broker() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.acks_away = 3
        it.stream.publish(schedule("a"))
        await asyncio.sleep(10)
        assert it.stream.acknowledged == [1]
        assert it.intake.in_flight == 0

    taking(scenario)


# --- bounds, and the stop ------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{"in_flight_max": 5}, {"in_flight_bytes_max": 1_000}])
def test_what_is_worked_on_is_bounded(bounds: dict[str, Any]) -> None:
    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        for number in range(100):
            it.stream.publish(schedule(f"a{number}"))
        await asyncio.sleep(5)
        assert 0 < it.stream.most_received <= 8
        released.set()
        await asyncio.sleep(60)
        assert sorted(it.stream.acknowledged) == list(range(1, 101))
        assert it.stream.most_received <= 8

    taking(scenario, **bounds)


def test_what_takes_long_is_extended() -> None:
    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        it.stream.publish(schedule("a"))
        await asyncio.sleep(12)
        assert it.stream.extended == [1]
        released.set()

    taking(scenario)


def test_at_the_stop_what_is_worked_on_ends_and_nothing_more_is_received() -> None:
    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        it.stream.publish(schedule("a"))
        await asyncio.sleep(1)
        stopping = asyncio.ensure_future(it.intake.stop())
        await asyncio.sleep(1)
        it.stream.publish(schedule("b"))
        released.set()
        await stopping
        assert (it.stream.acknowledged, it.stream.received, it.stream.is_open) == ([1], 1, False)

    taking(scenario)


def test_at_the_stop_what_does_not_end_is_handed_back_at_once() -> None:
    async def scenario(it: Taking) -> None:
        released = it.store.hold("commit")
        it.stream.publish(schedule("a"))
        await asyncio.sleep(1)
        await it.intake.stop()
        released.set()
        assert it.stream.retried == [(1, 0)]
        assert it.intake.in_flight == 0

    taking(scenario)


def test_a_target_that_only_another_instance_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(it: Taking) -> None:
        async def refuse(spec: TimerSpec) -> Created:
            monkeypatch.undo()
            raise InvalidField("callbackUrl", "callbackUrl has a scheme that this instance does not know")

        monkeypatch.setattr(it.world.service, "create", refuse)
        it.stream.publish(schedule("a"))
        await asyncio.sleep(5)
        assert (it.stream.refused, it.stream.acknowledged, len(it.stream.retried)) == ([], [1], 1)

    taking(scenario)


def test_a_target_that_this_instance_refuses_too_makes_a_dead_letter() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop"))

    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a"))
        await asyncio.sleep(5)
        (refusal,) = it.stream.refused
        assert refusal.field is None, "no command has a target"
        assert refusal.reason.startswith("the default target 'ftp://events.test/shop' of nats.target must be a URL")

    taking(scenario, before=before, target="ftp://events.test/{tenant}")


def test_a_default_target_that_no_section_serves_is_named_in_the_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        def refuse(url: str, namespace: str) -> None:
            raise ValueError("must be a URL with one of the schemes kafka")

        monkeypatch.setattr(it.world.destinations, "check", refuse)
        it.stream.publish(schedule("a"))
        await asyncio.sleep(5)
        (refusal,) = it.stream.refused
        assert refusal.reason == (
            "the default target 'http://own.test' of namespace 'shop' must be a URL with one of the schemes kafka"
        )

    taking(scenario, before=before)


def test_commands_of_a_namespace_that_was_deleted_become_dead_letters_until_it_is_created_again() -> None:
    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(
            NamespaceSpec(name="web", callback_url="http://own.test", requests_per_second=1)
        )

    async def scenario(it: Taking) -> None:
        for number in range(15):
            it.stream.publish(cancel(f"a{number}", "web"))
        await asyncio.sleep(1)
        await it.world.service.namespaces.delete("web")  # its first commands go on until the deletion has ended
        await asyncio.sleep(0.1)
        before_deletion = len(it.stream.acknowledged)
        assert 1 <= before_deletion < 15
        it.stream.publish(schedule("b", "web"))
        good = it.stream.publish(schedule("good"))
        await asyncio.sleep(120)
        assert it.stream.acknowledged[before_deletion:] == [good]
        assert len(it.stream.refused) == 16 - before_deletion
        assert {(each.field, each.reason) for each in it.stream.refused} == {
            ("tenantId", "the namespace 'web' was deleted: create it again")
        }
        assert not it.world.service.namespaces.is_known("web")
        await it.world.service.namespaces.create(NamespaceSpec(name="web", callback_url="http://new.test"))
        again = it.stream.publish(schedule("b", "web"))
        await asyncio.sleep(2)
        assert it.stream.acknowledged[-1] == again
        assert (await it.world.service.get(TimerKey("web", "b"))).timer.callback_url == "http://new.test"

    taking(scenario, before=before, in_flight_bytes_max=1_000_000)


@pytest.mark.parametrize("command", [schedule, cancel])
def test_a_namespace_that_is_deleted_while_a_command_is_carried_out_is_not_created_again(
    command: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the error count as one of the store: the commands of others would be received one by one."""

    async def before(world: World, stream: Stream) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="web", callback_url="http://own.test"))

    async def scenario(it: Taking) -> None:
        namespaces = it.world.service.namespaces
        get = namespaces.get

        async def get_and_delete(name: str) -> Namespace:
            namespace = await get(name)
            monkeypatch.undo()
            await namespaces.delete(name)
            return namespace

        monkeypatch.setattr(namespaces, "get", get_and_delete)
        it.stream.publish(command("a", "web"))
        await asyncio.sleep(5)
        assert [each.reason for each in it.stream.refused] == ["the namespace 'web' was deleted: create it again"]
        assert it.intake.not_consuming() is None

    taking(scenario, before=before)


def test_a_paused_namespace_takes_commands() -> None:
    async def scenario(it: Taking) -> None:
        it.stream.publish(schedule("a"))
        await asyncio.sleep(1)
        await it.world.service.namespaces.pause("shop")
        it.stream.publish(schedule("b"))
        await asyncio.sleep(2)
        assert it.stream.acknowledged == [1, 2]

    taking(scenario)
