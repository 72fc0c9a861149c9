"""The clients of the simulated cluster: they ask for timers, over a network that loses things, and remember what they
were told. Each has timers of its own, so that the checker knows the order of its wishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from duetime.domain.timer import (
    Created,
    Missed,
    NamespaceSpec,
    RetryPolicy,
    State,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.errors import Busy, Conflict, DuetimeError, InvalidField, NotFound, OutcomeUnknown
from duetime.service.service import Service
from duetime.testing.checker import Kind, Result, Violation, Wish
from duetime.testing.simulation.network import FORBIDDEN_HEADERS, FORBIDDEN_URL, name_in_history, value_of

if TYPE_CHECKING:
    from duetime.testing.simulation.world import Instance, World

__all__ = ["NamespaceClient", "SimClient"]

_SKIP_LATE_MS = 1_500
_HOSTS = ("ok", "slow", "dead", "flapping", "busy", "again")
_HOST_WEIGHTS = (12, 2, 2, 4, 1, 1)

HUNG_UP = object()
# A client that hangs up and asks again has two requests under way: the first may be applied this much later.
_HUNG_UP_MS = 30_000

Call = Callable[[Service], Awaitable[Any]]


class SimClient:
    """Creates, replaces, updates, deletes, fires now, replays and reads timers of one namespace."""

    def __init__(self, world: World, name: str, namespace: str = "default") -> None:
        self.world = world
        self.name = name
        self.namespace = namespace
        self.values = 0
        self._specs: dict[str, TimerSpec] = {}  # the last create of each timer, for asking the same again
        # What was acknowledged last, if nothing was asked for since whose outcome is not known.
        self._certain: dict[str, str] = {}

    # --- what a client does -----------------------------------------------------------------------

    async def work(self) -> None:
        rng, world = self.world.rng, self.world
        mine = [f"{self.name}-{n}" for n in range(world.scenario.timers // world.scenario.clients)]
        while world.stormy:
            await asyncio.sleep(rng.expovariate(8.0 * world.settings.rate))
            await self.wish(rng.choice(mine))

    async def wish(self, timer: str) -> None:
        """One of everything a client may ask for; now and then two at the same time."""
        if self.world.rng.random() < 0.04:
            await asyncio.gather(self._one_wish(timer), self._one_wish(timer))
            self._certain.pop(timer, None)
        else:
            await self._one_wish(timer)

    async def _one_wish(self, timer: str) -> None:
        rng = self.world.rng
        dice = rng.random()
        if dice < 0.17:
            await self.delete(timer)
        elif dice < 0.31:
            await self.update(timer, rng.randint(-200, 8_000))
        elif dice < 0.39:
            await self.update(timer, None)
        elif dice < 0.45:
            await self.fire_now(timer)
        elif dice < 0.50:
            await self.replay(timer)
        elif dice < 0.54:
            await self.ensure(timer)
        elif dice < 0.58:
            await self.read(timer)
        elif dice < 0.585:
            await self.look_around()
        elif dice < 0.61:
            await self.ask_nonsense(timer)
        else:
            await self.put(timer, self._some_url(), self._some_delay_ms(), if_absent=dice < 0.65)

    def _some_url(self) -> str:
        return "http://" + self.world.rng.choices(_HOSTS, _HOST_WEIGHTS)[0]

    def _some_delay_ms(self) -> int:
        rng = self.world.rng
        return rng.choice((rng.randint(-500, 3_000), rng.randint(0, 20_000)))

    async def burst(self) -> None:
        """Now and then more timers of one instant than fit a page."""
        rng, world = self.world.rng, self.world
        number = 0
        while world.stormy:
            await asyncio.sleep(rng.expovariate(world.scenario.bursts * world.settings.rate))
            number += 1
            delay_ms = rng.randint(3_000, 8_000)
            timers = [f"burst{number}-{n}" for n in range(world.scenario.burst_timers)]
            if rng.random() < 0.5:
                await asyncio.gather(*(self.put(timer, "http://ok", delay_ms) for timer in timers))
            else:
                await self.put_many(timers, self._some_url(), delay_ms)
                if rng.random() < 0.3:
                    await self.delete_many(timers[: len(timers) // 4])

    # --- single wishes ----------------------------------------------------------------------------

    async def put(self, timer: str, url: str, delay_ms: int, *, if_absent: bool = False) -> None:
        await self._create(replace(self._spec(timer, url, delay_ms), if_absent=if_absent))

    async def ensure(self, timer: str) -> None:
        """The last create once more, with ifAbsent: nothing new, whatever became of it."""
        spec = self._specs.get(timer)
        if spec is not None and spec.delay_ms is None:
            await self._create(replace(spec, if_absent=True))

    async def _create(self, spec: TimerSpec) -> None:
        asked_at_ms = self.world.now_ms()
        asked = spec
        if not spec.if_absent and self.world.settings.clocks != "jumps" and self.world.rng.random() < 0.05:
            # Due by the clock of the instance that takes it, which is right but for what the checker allows.
            asked = replace(spec, execute_at_ms=None, delay_ms=max(0, (spec.execute_at_ms or 0) - asked_at_ms))
        result, answer = await self._ask(lambda service: service.create(asked))
        # The same create again, with ifAbsent: whatever its outcome, it adds nothing to what the first one did, as long
        # as reached rows are kept.
        last = self._specs.get(spec.timer_id) if spec.if_absent and self.namespace == "default" else None
        is_repeated = last is not None and last.payload == spec.payload
        existed = isinstance(answer, Created) and answer.existed
        kind = Kind.ENSURE if existed or (is_repeated and result is Result.INFO) else Kind.PUT
        if result is not Result.FAIL:
            self._specs[spec.timer_id] = asked
        self._put(spec, asked_at_ms, result, kind, answer=answer)

    async def update(self, timer: str, delay_ms: int | None) -> None:
        """A new payload, and a new time unless `delay_ms` is None."""
        asked_at_ms = self.world.now_ms()
        due_ms = 0 if delay_ms is None else asked_at_ms + delay_ms
        value, payload = self._new_value()
        patch = TimerPatch(execute_at_ms=UNSET if delay_ms is None else due_ms, payload=payload)
        if self.world.rng.random() < 0.1:
            patch = replace(
                patch,
                callback_url=self._some_url(),
                retry_policy=RetryPolicy(initial_interval_ms=500, max_interval_ms=4_000),
                callback_timeout_seconds=5,
                correlation_id=value,
                headers={"x-sim": value},
                tags=("updated",),
            )
        result, answer = await self._ask(lambda service: service.update(self._key(timer), patch))
        self._wished(timer, Kind.PUT, asked_at_ms, result, value, due_ms, keeps_due=delay_ms is None, answer=answer)

    async def delete(self, timer: str) -> None:
        asked_at_ms = self.world.now_ms()
        result, answer = await self._ask(lambda service: service.delete(self._key(timer)))
        self._wished(timer, Kind.DELETE, asked_at_ms, result, answer=answer)

    async def fire_now(self, timer: str) -> None:
        asked_at_ms = self.world.now_ms()
        result, answer = await self._ask(lambda service: service.fire_now(self._key(timer)))
        self._wished(timer, Kind.FIRE_NOW, asked_at_ms, result, answer=answer)

    async def replay(self, timer: str) -> None:
        asked_at_ms = self.world.now_ms()
        result, answer = await self._ask(lambda service: service.replay(self._key(timer)))
        self._wished(timer, Kind.REPLAY, asked_at_ms, result, answer=answer)

    async def put_many(self, timers: list[str], url: str, delay_ms: int) -> None:
        asked_at_ms = self.world.now_ms()
        specs = [self._spec(timer, url, delay_ms) for timer in timers]
        undecodable = InvalidField("payload", "is no JSON")
        result, answers = await self._ask(lambda service: service.create_many([*specs, undecodable]))
        for index, spec in enumerate(specs):
            each = _result_of(answers[index]) if result is Result.OK else result
            self._put(spec, asked_at_ms, each, answer=answers)

    async def delete_many(self, timers: list[str]) -> None:
        asked_at_ms = self.world.now_ms()
        keys = [self._key(timer) for timer in timers]
        undecodable = InvalidField("timerId", "is no text")
        result, answers = await self._ask(lambda service: service.delete_many([*keys, undecodable]))
        for index, timer in enumerate(timers):
            each = _result_of(answers[index]) if result is Result.OK else result
            self._wished(timer, Kind.DELETE, asked_at_ms, each, answer=answers)

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, timer: str) -> None:
        """A read sees what was acknowledged before it."""
        value = self._certain.get(timer)
        result, answer = await self._ask(lambda service: service.get(self._key(timer)))
        # Reached rows of other namespaces are purged soon.
        if value is None or self.namespace != "default" or result is Result.INFO:
            return
        if result is Result.FAIL and not isinstance(answer, NotFound):
            return  # nobody answered
        seen = value_of(answer.timer.payload) if isinstance(answer, TimerView) else None
        # A newer value is that of a wish that is still under way.
        if seen != value and self._certain.get(timer) == value and not _is_newer(seen, value):
            what = f"{value!r} was acknowledged, and a read after that answered {seen!r}"
            self.world.violations.append(Violation("G", self._name(timer), what, ""))

    async def look_around(self) -> None:
        """Lists and the cluster status: asking for them must not break anything."""
        state = self.world.rng.choice((None, None, *State))
        page = TimerFilter(namespace=self.namespace, state=state, limit=5)
        for _ in range(3):
            _, answer = await self._ask(partial(_list, page))
            if not isinstance(answer, tuple) or answer[1] is None:
                break
            page = replace(page, cursor=answer[1])
        await self._ask(lambda service: service.cluster_status())
        await self._ask(lambda service: service.namespaces.list_all())
        await self._ask(lambda service: service.namespaces.get(self.namespace))
        await self._ask(_standing)

    async def ask_nonsense(self, timer: str) -> None:
        """An invalid request is refused, and changes nothing."""
        key, spec = self._key(timer), self._spec(timer, "http://ok", 1_000)
        calls: list[Call] = [
            lambda service: service.create(replace(spec, callback_url=None)),
            lambda service: service.create(replace(spec, callback_url=FORBIDDEN_URL)),
            lambda service: service.create(replace(spec, headers=FORBIDDEN_HEADERS)),
            lambda service: service.create(replace(spec, execute_at_ms=None)),
            lambda service: service.create(replace(spec, execute_at_ms=None, delay_ms=10**15)),
            lambda service: service.create(replace(spec, payload='"' + "x" * 300_000 + '"')),
            lambda service: service.update(key, TimerPatch(callback_url=FORBIDDEN_URL)),
            lambda service: service.update(key, TimerPatch(callback_url=None)),
            lambda service: service.update(key, TimerPatch(headers=FORBIDDEN_HEADERS)),
            lambda service: service.namespaces.create(NamespaceSpec(name="")),
            lambda service: service.namespaces.create(NamespaceSpec(name="wide", num_shards=10**6)),
            lambda service: service.namespaces.create(NamespaceSpec(name="default", num_shards=7)),
            lambda service: service.namespaces.update(NamespaceSpec(name="default", num_shards=9)),
            lambda service: service.namespaces.update(NamespaceSpec(name="default", callback_url=FORBIDDEN_URL)),
            lambda service: service.namespaces.update(NamespaceSpec(name="default", signing_secrets=("whsec_…none",))),
            lambda service: service.namespaces.delete("default"),
            lambda service: service.list_timers(TimerFilter(namespace="default", cursor="nonsense")),
        ]
        number = self.world.rng.randrange(len(calls))
        result, _ = await self._ask(calls[number])
        if result is Result.OK:
            self.world.violations.append(Violation("D", self._name(timer), f"bad request {number} was accepted", ""))

    # --- words ------------------------------------------------------------------------------------

    def _key(self, timer: str) -> TimerKey:
        return TimerKey(self.namespace, timer)

    def _name(self, timer: str) -> str:
        return name_in_history(self._key(timer))

    def _new_value(self) -> tuple[str, str]:
        """A value nobody has used, and a payload that carries it."""
        self.values += 1
        value, rng, most = f"{self.name}v{self.values}", self.world.rng, self.world.settings.payload_chars_max
        if most and rng.random() < 0.3:
            return value, f'"{value}|{"x" * rng.randint(1, most)}"'
        return value, f'"{value}"'

    def _skip_late_ms(self, timer: str) -> int:
        """One timer in ten has a missed-fire policy, always the same."""
        return _SKIP_LATE_MS if timer.endswith("-7") and self.name != "last" else 0

    def _spec(self, timer: str, url: str, delay_ms: int) -> TimerSpec:
        skip_late_ms = self._skip_late_ms(timer)
        return TimerSpec(
            namespace=self.namespace,
            timer_id=timer,
            execute_at_ms=self.world.now_ms() + delay_ms,
            callback_url=url,
            payload=self._new_value()[1],
            headers={"x-sim": timer} if self.world.rng.random() < 0.1 else None,
            missed=Missed(skip_if_late_by_ms=skip_late_ms) if skip_late_ms else None,
        )

    def _put(self, spec: TimerSpec, asked_at_ms: int, result: Result, kind: Kind = Kind.PUT, *, answer: object) -> None:
        value, due_ms = value_of(spec.payload), spec.execute_at_ms or 0
        self._wished(spec.timer_id, kind, asked_at_ms, result, value, due_ms, answer=answer)

    def _wished(
        self,
        timer: str,
        kind: Kind,
        asked_at_ms: int,
        result: Result,
        value: str = "",
        due_ms: int = 0,
        *,
        keeps_due: bool = False,
        answer: object = None,
    ) -> None:
        if kind is Kind.PUT and result is Result.OK:
            self._certain[timer] = value
        elif kind in (Kind.PUT, Kind.DELETE) and result is not Result.FAIL:
            self._certain.pop(timer, None)
        skip_late_ms = self._skip_late_ms(timer)
        told_at_ms = self.world.now_ms() + (_HUNG_UP_MS if answer is HUNG_UP else 0)
        wish = Wish(self._name(timer), kind, asked_at_ms, told_at_ms, result, value, due_ms, keeps_due, skip_late_ms)
        self.world.wished(wish, self.namespace)

    # --- asking -----------------------------------------------------------------------------------

    async def _ask(self, call: Call) -> tuple[Result, Any]:
        """At one instance after the other, as long as it is certain that nothing was applied."""
        world, rng = self.world, self.world.rng
        for _ in range(40):
            # Now and then one that is just leaving, which still listens.
            known = world.running() if world.stormy and rng.random() < 0.1 else world.instances.values()
            up = [instance for instance in known if instance.up]
            if not up:
                await asyncio.sleep(0.3)
                continue
            result, answer = await self._ask_one(rng.choice(up), call)
            if result is not None or answer is HUNG_UP:
                return result or Result.INFO, answer
            if world.stormy and rng.random() < 0.2:
                break  # gives up: the answer was that nothing was applied
            await asyncio.sleep(rng.uniform(0.01, 0.3))
        return Result.FAIL, None

    async def _ask_one(self, instance: Instance, call: Call) -> tuple[Result | None, Any]:
        world, rng = self.world, self.world.rng
        lost = world.stormy and rng.random() < world.scenario.lost_requests
        if lost and rng.random() < 0.5:
            world.fault("request lost")
            return Result.INFO, None
        if world.stormy and rng.random() < world.scenario.hang_ups:
            world.fault("client hung up")
            answer = instance.inside(_outcome(call, instance.service))
            await asyncio.wait({answer}, timeout=rng.choice((0.001, 0.01, 0.5)))
            instance.cancel(answer)  # as the HTTP server does it
            return None, HUNG_UP
        await asyncio.sleep(rng.uniform(0.0001, 0.002))
        answer = instance.inside(_outcome(call, instance.service))
        # A crashed instance never answers, and a client waits for a limited time.
        done, _ = await asyncio.wait({answer}, timeout=20)
        if not done or lost:
            if lost:
                world.fault("answer lost")
            return Result.INFO, None
        return answer.result()


async def _list(page: TimerFilter, service: Service) -> object:
    return await service.list_timers(page)


async def _standing(service: Service) -> None:
    service.readiness()
    service.shard_map()


async def _outcome(call: Call, service: Service) -> tuple[Result | None, Any]:
    """None: certainly not applied, worth trying elsewhere."""
    try:
        answer = await call(service)
    except DuetimeError as error:
        return _certainty(error), error
    except Exception:
        return Result.INFO, None  # HTTP 500: the outcome is unknown
    return (Result.FAIL, None) if answer is Verdict.ALREADY_REACHED else (Result.OK, answer)


def _is_newer(seen: str | None, than: str) -> bool:
    """Of two values of one client."""
    return seen is not None and int(seen.rpartition("v")[2]) > int(than.rpartition("v")[2])


def _certainty(error: DuetimeError) -> Result | None:
    if isinstance(error, OutcomeUnknown):
        return Result.INFO
    if isinstance(error, NotFound | Conflict):
        return Result.FAIL
    if isinstance(error, Busy) or error.status == 503:
        return None
    return Result.FAIL


def _result_of(answer: Created | Updated | Verdict | DuetimeError) -> Result:
    """For one of many: a create that was certainly not applied is not tried again."""
    if isinstance(answer, DuetimeError):
        return _certainty(answer) or Result.FAIL
    return Result.FAIL if answer is Verdict.ALREADY_REACHED else Result.OK


# --- namespaces that are created and deleted -----------------------------------------------------


class NamespaceClient:
    """Creates a namespace, uses it with several clients, and deletes it while they use it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._num_shards = world.rng.randint(1, 6)
        self._made = 0
        self._admin = SimClient(world, f"{name}-admin", name)
        self._clients = [SimClient(world, f"{name}-{number}", name) for number in range(2)]

    async def work(self) -> None:
        rng, world = self.world.rng, self.world
        while world.stormy:
            await asyncio.sleep(rng.uniform(0.0, 2.0) / world.settings.rate)
            if await self._create():
                await self._first_timers()
            if rng.random() < 0.3:
                await self._change()
            deadline = world.loop.now + rng.uniform(0.5, 4.0)
            uses = [world.outside(self._use(client, deadline)) for client in self._clients]
            if rng.random() < 0.5:  # otherwise the deletion happens while their requests are under way
                await asyncio.gather(*uses)
                await self._empty()
                uses = [world.outside(self._come_too_late(client)) for client in self._clients]
            await self._delete()
            await asyncio.gather(*uses)

    async def _use(self, client: SimClient, deadline: float) -> None:
        rng, world = self.world.rng, self.world
        while world.stormy and world.loop.now < deadline:
            await asyncio.sleep(rng.expovariate(4.0))
            await client.wish(f"{client.name}-{rng.randrange(5)}")

    async def _come_too_late(self, client: SimClient) -> None:
        """A wish or two while an empty namespace is being deleted, perhaps with commits that take long."""
        rng, world = self.world.rng, self.world
        await asyncio.sleep(rng.uniform(0.0, 5.0))
        up = list(world.instances.values())
        if world.stormy and up and rng.random() < 0.3:
            world.cut_off(rng.choice(up), commits_only=True)
        timer = f"{client.name}-{rng.randrange(5)}"
        if rng.random() < 0.3:
            await client.replay(timer)
        else:
            await client.put(timer, "http://ok", rng.randint(0, 20_000))

    async def _create(self) -> bool:
        """Each time with settings of its own, so that a callback shows which it was made with."""
        self._made += 1
        spec = NamespaceSpec(
            name=self.name,
            num_shards=self._num_shards,
            retry_policy=RetryPolicy(initial_interval_ms=300 + self._made, max_interval_ms=5_000),
            delivered_retention_ms=2_000,
            failed_retention_ms=2_000,
            signing_secrets=(f"whsec_{self.name}{self._made}",),
        )
        self.world.namespace_made(self.name)
        result, _ = await self._admin._ask(lambda service: service.namespaces.create(spec))
        return result is Result.OK

    async def _first_timers(self) -> None:
        """Due at once; perhaps an instance that knows nothing of the namespace yet has to fire them."""
        rng, world = self.world.rng, self.world
        client = self._clients[0]
        await asyncio.gather(*(client.put(f"{client.name}-{n}", "http://ok", rng.randint(0, 1_500)) for n in range(5)))
        if world.stormy and rng.random() < 0.25 and world.instances:
            world.happen(rng.choice(("departure", "crash")), rng.choice(list(world.instances.values())))

    async def _change(self) -> None:
        self._made += 1
        spec = NamespaceSpec(name=self.name, signing_secrets=(f"whsec_{self.name}{self._made}",))
        await self._admin._ask(lambda service: service.namespaces.update(spec))

    async def _empty(self) -> None:
        for client in self._clients:
            await client.delete_many([f"{client.name}-{n}" for n in range(5)])

    async def _delete(self) -> None:
        result, _ = await self._admin._ask(lambda service: service.namespaces.delete(self.name))
        if result is Result.OK:
            await self.world.namespace_deleted(self.name)
            # Its number of shards is kept. (It may have been made on first use, with the default number.)
            stored = self.world.database.stored_namespaces[self.name][-1]
            wider = NamespaceSpec(name=self.name, num_shards=stored.num_shards + 1)
            result, _ = await self._admin._ask(lambda service: service.namespaces.create(wider))
            if result is Result.OK:
                what = "was made with another number of shards"
                self.world.violations.append(Violation("N", self.name, what, ""))
