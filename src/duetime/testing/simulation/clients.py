"""The clients of the simulated cluster. They send requests over a network that loses messages, and record the results.
Each client has timers of its own, so that the checker knows the order of its requests."""

from __future__ import annotations

import asyncio
import contextlib
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
from duetime.testing.checker import ClientRequest, Kind, Result, Violation
from duetime.testing.simulation.network import FORBIDDEN_HEADERS, FORBIDDEN_URL, HOSTILE, name_in_history, value_of

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import Instance, SimulatedCluster

__all__ = ["SHARED_FLOW", "HostileClient", "NamespaceClient", "SimClient"]

SHARED_FLOW = "shared"  # the flow key of timers with different origins
_SKIP_LATE_MS = 1_500
_HOSTILE_TIMERS = 15  # of each kind
_HOSTILE_MEMORY_MIN = 200
_HOSTS = ("ok", "slow", "dead", "flapping", "busy", "again")
_HOST_WEIGHTS = (12, 2, 2, 4, 1, 1)

DISCONNECTED = object()
# A client that disconnects and sends the next request has two requests in progress: the first may be applied this much
# later.
DISCONNECTED_MS = 30_000

Call = Callable[[Service], Awaitable[Any]]


class SimClient:
    """Creates, replaces, updates, deletes, fires now, replays and reads timers of one namespace."""

    def __init__(self, cluster: SimulatedCluster, name: str, namespace: str = "default") -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = namespace
        self.values = 0
        self._specs: dict[str, TimerSpec] = {}  # the last create of each timer, to send it again
        # The last acknowledged value of each timer, if no request of unknown outcome was sent after it.
        self._acknowledged: dict[str, str] = {}

    # --- random requests --------------------------------------------------------------------------

    async def work(self) -> None:
        rng, cluster = self.cluster.rng, self.cluster
        mine = [f"{self.name}-{n}" for n in range(cluster.scenario.timers // cluster.scenario.clients)]
        while cluster.faults_on:
            await asyncio.sleep(rng.expovariate(8.0 * cluster.settings.rate))
            await self.send_some_request(rng.choice(mine))

    async def send_some_request(self, timer: str) -> None:
        """A random request about this timer; sometimes two at the same time."""
        if self.cluster.rng.random() < 0.04:
            await asyncio.gather(self._send_one(timer), self._send_one(timer))
            self._acknowledged.pop(timer, None)
        else:
            await self._send_one(timer)

    async def _send_one(self, timer: str) -> None:
        rng = self.cluster.rng
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
            await self.create_again_if_absent(timer)
        elif dice < 0.58:
            await self.read(timer)
        elif dice < 0.585:
            await self.read_lists_and_status()
        elif dice < 0.61:
            await self.send_invalid_request(timer)
        else:
            mode = "if_absent" if dice < 0.65 else "ignore_reached" if dice < 0.72 else ""
            await self.put(timer, self._random_url(), self._random_delay_ms(), mode=mode)

    def _random_url(self) -> str:
        limited = self.cluster.settings.flows
        if limited and self.namespace == "default" and self.cluster.rng.random() < 0.5:
            return self.cluster.rng.choice(list(limited))
        return "http://" + self.cluster.rng.choices(_HOSTS, _HOST_WEIGHTS)[0]

    def _random_delay_ms(self) -> int:
        rng = self.cluster.rng
        return rng.choice((rng.randint(-500, 3_000), rng.randint(0, 20_000)))

    async def burst(self) -> None:
        """Sometimes create more timers that are due at the same time than fit in one page."""
        rng, cluster = self.cluster.rng, self.cluster
        number = 0
        while cluster.faults_on:
            await asyncio.sleep(rng.expovariate(cluster.scenario.bursts * cluster.settings.rate))
            number += 1
            delay_ms = rng.randint(3_000, 8_000)
            timers = [f"burst{number}-{n}" for n in range(cluster.scenario.burst_timers)]
            if rng.random() < 0.5:
                await asyncio.gather(*(self.put(timer, "http://ok", delay_ms) for timer in timers))
            else:
                await self.put_many(timers, self._random_url(), delay_ms)
                if rng.random() < 0.3:
                    await self.delete_many(timers[: len(timers) // 4])

    # --- single requests --------------------------------------------------------------------------

    async def put(self, timer: str, url: str, delay_ms: int, *, mode: str = "") -> None:
        """`mode`: "if_absent", "ignore_reached", or "" for a create that replaces whatever there is."""
        spec = self._spec(timer, url, delay_ms)
        await self._create(replace(spec, **{mode: True}) if mode else spec)

    async def create_again_if_absent(self, timer: str) -> None:
        """Send the last create once more, with ifAbsent: it changes nothing, whatever the first result was."""
        spec = self._specs.get(timer)
        if spec is not None and spec.delay_ms is None:
            await self._create(replace(spec, if_absent=True, ignore_reached=False))

    async def _create(self, spec: TimerSpec) -> None:
        sent_at_ms = self.cluster.now_ms()
        sent = spec
        if not spec.if_absent and self.cluster.settings.clocks != "jumps" and self.cluster.rng.random() < 0.05:
            # Due by the clock of the instance that receives it. The checker allows for the error of that clock.
            sent = replace(spec, execute_at_ms=None, delay_ms=max(0, (spec.execute_at_ms or 0) - sent_at_ms))
        result, answer = await self._send(lambda service: service.create(sent))
        # The same create again, with ifAbsent: whatever its outcome, it adds nothing to the effect of the first one, as
        # long as reached rows are kept.
        last = self._specs.get(spec.timer_id) if spec.if_absent and self.namespace == "default" else None
        is_repeated = last is not None and last.payload == spec.payload
        existed = isinstance(answer, Created) and answer.existed
        if existed and spec.ignore_reached:
            self._record(spec.timer_id, Kind.OVER, sent_at_ms, result, value_of(spec.payload), answer=answer)
            return
        kind = Kind.ENSURE if existed or (is_repeated and result is Result.INFO) else Kind.PUT
        if result is not Result.FAIL:
            self._specs[spec.timer_id] = sent
        self._record_put(spec, sent_at_ms, result, kind, answer=answer)

    async def update(self, timer: str, delay_ms: int | None) -> None:
        """A new payload, and a new time unless `delay_ms` is None."""
        sent_at_ms = self.cluster.now_ms()
        due_ms = 0 if delay_ms is None else sent_at_ms + delay_ms
        value, payload = self._new_value()
        patch = TimerPatch(execute_at_ms=UNSET if delay_ms is None else due_ms, payload=payload)
        if self.cluster.rng.random() < 0.1:
            patch = replace(
                patch,
                callback_url=self._random_url(),
                retry_policy=RetryPolicy(initial_interval_ms=500, max_interval_ms=4_000),
                callback_timeout_seconds=5,
                correlation_id=value,
                headers={"x-sim": value},
                tags=("updated",),
            )
        result, answer = await self._send(lambda service: service.update(self._key(timer), patch))
        self._record(timer, Kind.PUT, sent_at_ms, result, value, due_ms, keeps_due=delay_ms is None, answer=answer)

    async def delete(self, timer: str) -> None:
        sent_at_ms = self.cluster.now_ms()
        result, answer = await self._send(lambda service: service.delete(self._key(timer)))
        self._record(timer, Kind.DELETE, sent_at_ms, result, answer=answer)

    async def fire_now(self, timer: str) -> None:
        sent_at_ms = self.cluster.now_ms()
        result, answer = await self._send(lambda service: service.fire_now(self._key(timer)))
        self._record(timer, Kind.FIRE_NOW, sent_at_ms, result, answer=answer)

    async def replay(self, timer: str) -> None:
        sent_at_ms = self.cluster.now_ms()
        result, answer = await self._send(lambda service: service.replay(self._key(timer)))
        self._record(timer, Kind.REPLAY, sent_at_ms, result, answer=answer)

    async def put_many(self, timers: list[str], url: str, delay_ms: int) -> None:
        sent_at_ms = self.cluster.now_ms()
        specs = [self._spec(timer, url, delay_ms) for timer in timers]
        undecodable = InvalidField("payload", "is no JSON")
        result, answers = await self._send(lambda service: service.create_many([*specs, undecodable]))
        for index, spec in enumerate(specs):
            each = _result_of(answers[index]) if result is Result.OK else result
            self._record_put(spec, sent_at_ms, each, answer=answers)

    async def delete_many(self, timers: list[str]) -> None:
        sent_at_ms = self.cluster.now_ms()
        keys = [self._key(timer) for timer in timers]
        undecodable = InvalidField("timerId", "is no text")
        result, answers = await self._send(lambda service: service.delete_many([*keys, undecodable]))
        for index, timer in enumerate(timers):
            each = _result_of(answers[index]) if result is Result.OK else result
            self._record(timer, Kind.DELETE, sent_at_ms, each, answer=answers)

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, timer: str) -> None:
        """A read returns what was acknowledged before it."""
        value = self._acknowledged.get(timer)
        result, answer = await self._send(lambda service: service.get(self._key(timer)))
        # Reached rows of other namespaces are purged soon.
        if value is None or self.namespace != "default" or result is Result.INFO:
            return
        if result is Result.FAIL and not isinstance(answer, NotFound):
            return  # no instance answered
        seen = value_of(answer.timer.payload) if isinstance(answer, TimerView) else None
        # A newer value belongs to a request that is still in progress.
        if seen != value and self._acknowledged.get(timer) == value and not _is_newer(seen, value):
            what = f"{value!r} was acknowledged, and a later read returned {seen!r}"
            self.cluster.violations.append(Violation("G", self._name(timer), what, ""))

    async def read_lists_and_status(self) -> None:
        """Lists and the cluster status: reading them must not break anything."""
        state = self.cluster.rng.choice((None, None, *State))
        page = TimerFilter(namespace=self.namespace, state=state, limit=5)
        for _ in range(3):
            _, answer = await self._send(partial(_list, page))
            if not isinstance(answer, tuple) or answer[1] is None:
                break
            page = replace(page, cursor=answer[1])
        await self._send(lambda service: service.cluster_status())
        await self._send(lambda service: service.namespaces.list_all())
        await self._send(lambda service: service.namespaces.get(self.namespace))
        await self._send(_read_status)

    async def send_invalid_request(self, timer: str) -> None:
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
        number = self.cluster.rng.randrange(len(calls))
        result, _ = await self._send(calls[number])
        if result is Result.OK:
            self.cluster.violations.append(Violation("D", self._name(timer), f"bad request {number} was accepted", ""))

    # --- values and records -----------------------------------------------------------------------

    def _key(self, timer: str) -> TimerKey:
        return TimerKey(self.namespace, timer)

    def _name(self, timer: str) -> str:
        return name_in_history(self._key(timer))

    def _new_value(self) -> tuple[str, str]:
        """A value that was not used before, and a payload that carries it."""
        self.values += 1
        value, rng, most = f"{self.name}v{self.values}", self.cluster.rng, self.cluster.settings.payload_chars_max
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
            execute_at_ms=self.cluster.now_ms() + delay_ms,
            callback_url=url,
            payload=self._new_value()[1],
            flow_key=self._random_flow_key(),
            headers={"x-sim": timer} if self.cluster.rng.random() < 0.1 else None,
            missed=Missed(skip_if_late_by_ms=skip_late_ms) if skip_late_ms else None,
        )

    def _random_flow_key(self) -> str | None:
        """With an operator some timers of all URLs are in one flow."""
        cluster = self.cluster
        return SHARED_FLOW if cluster.settings.operator and cluster.faults_on and cluster.rng.random() < 0.1 else None

    def _record_put(
        self, spec: TimerSpec, sent_at_ms: int, result: Result, kind: Kind = Kind.PUT, *, answer: object
    ) -> None:
        value, due_ms = value_of(spec.payload), spec.execute_at_ms or 0
        # Reached rows of other namespaces are purged soon.
        ignores_reached = spec.ignore_reached and self.namespace == "default"
        self._record(
            spec.timer_id, kind, sent_at_ms, result, value, due_ms, ignores_reached=ignores_reached, answer=answer
        )

    def _record(
        self,
        timer: str,
        kind: Kind,
        sent_at_ms: int,
        result: Result,
        value: str = "",
        due_ms: int = 0,
        *,
        keeps_due: bool = False,
        ignores_reached: bool = False,
        repeats: bool = False,
        answer: object = None,
    ) -> None:
        if kind is Kind.PUT and result is Result.OK:
            self._acknowledged[timer] = value
        elif kind in (Kind.PUT, Kind.DELETE) and result is not Result.FAIL:
            self._acknowledged.pop(timer, None)
        skip_late_ms = self._skip_late_ms(timer)
        answered_at_ms = self.cluster.now_ms() + (DISCONNECTED_MS if answer is DISCONNECTED else 0)
        send_some_request = ClientRequest(
            self._name(timer),
            kind,
            sent_at_ms,
            answered_at_ms,
            result,
            value,
            due_ms,
            keeps_due,
            skip_late_ms,
            ignores_reached,
            repeats,
        )
        self.cluster.record_request(send_some_request, self.namespace)

    # --- sending ----------------------------------------------------------------------------------

    async def _send(self, call: Call) -> tuple[Result, Any]:
        """Send to one instance after the other, as long as the request was certainly not applied."""
        cluster, rng = self.cluster, self.cluster.rng
        for _ in range(40):
            # Sometimes an instance that is stopping and still accepts requests.
            known = cluster.running() if cluster.faults_on and rng.random() < 0.1 else cluster.instances.values()
            up = [instance for instance in known if instance.up]
            if not up:
                await asyncio.sleep(0.3)
                continue
            result, answer = await self._send_to(rng.choice(up), call)
            if result is not None or answer is DISCONNECTED:
                return result or Result.INFO, answer
            if cluster.faults_on and rng.random() < 0.2:
                break  # gives up: the request was not applied
            await asyncio.sleep(rng.uniform(0.01, 0.3))
        return Result.FAIL, None

    async def _send_to(self, instance: Instance, call: Call) -> tuple[Result | None, Any]:
        cluster, rng = self.cluster, self.cluster.rng
        lost = cluster.faults_on and rng.random() < cluster.scenario.lost_requests
        if lost and rng.random() < 0.5:
            cluster.fault("request lost")
            return Result.INFO, None
        if cluster.faults_on and rng.random() < cluster.scenario.disconnects:
            cluster.fault("client disconnected")
            answer = instance.create_task(_outcome(call, instance.service))
            await asyncio.wait({answer}, timeout=rng.choice((0.001, 0.01, 0.5)))
            instance.cancel(answer)  # as the HTTP server does
            return None, DISCONNECTED
        await asyncio.sleep(rng.uniform(0.0001, 0.002))
        answer = instance.create_task(_outcome(call, instance.service))
        # A crashed instance never answers, and a client waits for a limited time.
        done, _ = await asyncio.wait({answer}, timeout=20)
        if not done or lost:
            if lost:
                cluster.fault("answer lost")
            return Result.INFO, None
        return answer.result()


async def _list(page: TimerFilter, service: Service) -> object:
    return await service.list_timers(page)


async def _read_status(service: Service) -> None:
    service.readiness()
    service.shard_map()


async def _outcome(call: Call, service: Service) -> tuple[Result | None, Any]:
    """None: certainly not applied, may be sent to another instance."""
    try:
        answer = await call(service)
    except DuetimeError as error:
        return _certainty(error), error
    except Exception:
        return Result.INFO, None  # HTTP 500: the outcome is unknown
    return (Result.FAIL, None) if answer is Verdict.ALREADY_REACHED else (Result.OK, answer)


def _is_newer(seen: str | None, than: str) -> bool:
    """Compares two values of one client."""
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
    """The result of one item of a bulk request: an item that was certainly not applied is not sent again."""
    if isinstance(answer, DuetimeError):
        return _certainty(answer) or Result.FAIL
    return Result.FAIL if answer is Verdict.ALREADY_REACHED else Result.OK


# --- namespaces that are created and deleted -----------------------------------------------------


class NamespaceClient:
    """Creates a namespace, uses it with several clients, and deletes it while they use it."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self._num_shards = cluster.rng.randint(1, 6)
        self._revision = 0
        self._admin = SimClient(cluster, f"{name}-admin", name)
        self._clients = [SimClient(cluster, f"{name}-{number}", name) for number in range(2)]

    async def work(self) -> None:
        rng, cluster = self.cluster.rng, self.cluster
        while cluster.faults_on:
            await asyncio.sleep(rng.uniform(0.0, 2.0) / cluster.settings.rate)
            if await self._create():
                await self._first_timers()
            if rng.random() < 0.3:
                await self._update()
            deadline = cluster.loop.now + rng.uniform(0.5, 4.0)
            uses = [cluster.create_task(self._use(client, deadline)) for client in self._clients]
            if rng.random() < 0.5:  # otherwise the deletion happens while their requests are in progress
                await asyncio.gather(*uses)
                await self._empty()
                uses = [cluster.create_task(self._write_during_delete(client)) for client in self._clients]
            await self._delete()
            await asyncio.gather(*uses)

    async def _use(self, client: SimClient, deadline: float) -> None:
        rng, cluster = self.cluster.rng, self.cluster
        while cluster.faults_on and cluster.loop.now < deadline:
            await asyncio.sleep(rng.expovariate(4.0))
            await client.send_some_request(f"{client.name}-{rng.randrange(5)}")

    async def _write_during_delete(self, client: SimClient) -> None:
        """One request while an empty namespace is being deleted, sometimes with slow commits."""
        rng, cluster = self.cluster.rng, self.cluster
        await asyncio.sleep(rng.uniform(0.0, 5.0))
        up = list(cluster.instances.values())
        if cluster.faults_on and up and rng.random() < 0.3:
            cluster.start_outage(rng.choice(up), commits_only=True)
        timer = f"{client.name}-{rng.randrange(5)}"
        if rng.random() < 0.3:
            await client.replay(timer)
        else:
            await client.put(timer, "http://ok", rng.randint(0, 20_000))

    async def _create(self) -> bool:
        """Each time with new settings, so that a callback shows which settings it was made with."""
        self._revision += 1
        spec = NamespaceSpec(
            name=self.name,
            num_shards=self._num_shards,
            retry_policy=RetryPolicy(initial_interval_ms=300 + self._revision, max_interval_ms=5_000),
            delivered_retention_ms=2_000,
            failed_retention_ms=2_000,
            signing_secrets=(f"whsec_{self.name}{self._revision}",),
        )
        self.cluster.namespace_create_sent(self.name)
        result, _ = await self._admin._send(lambda service: service.namespaces.create(spec))
        return result is Result.OK

    async def _first_timers(self) -> None:
        """Due soon: an instance that has not read the new namespace yet may have to fire them."""
        rng, cluster = self.cluster.rng, self.cluster
        client = self._clients[0]
        await asyncio.gather(*(client.put(f"{client.name}-{n}", "http://ok", rng.randint(0, 1_500)) for n in range(5)))
        if cluster.faults_on and rng.random() < 0.25 and cluster.instances:
            cluster.inject(rng.choice(("departure", "crash")), rng.choice(list(cluster.instances.values())))

    async def _update(self) -> None:
        self._revision += 1
        spec = NamespaceSpec(name=self.name, signing_secrets=(f"whsec_{self.name}{self._revision}",))
        await self._admin._send(lambda service: service.namespaces.update(spec))

    async def _empty(self) -> None:
        for client in self._clients:
            await client.delete_many([f"{client.name}-{n}" for n in range(5)])

    async def _delete(self) -> None:
        result, _ = await self._admin._send(lambda service: service.namespaces.delete(self.name))
        if result is Result.OK:
            await self.cluster.namespace_deleted(self.name)
            # The number of shards is kept. (The namespace may have been created on first use, with the default number.)
            stored = self.cluster.database.stored_namespaces[self.name][-1]
            wider = NamespaceSpec(name=self.name, num_shards=stored.num_shards + 1)
            result, _ = await self._admin._send(lambda service: service.namespaces.create(wider))
            if result is Result.OK:
                what = "was created again with another number of shards"
                self.cluster.violations.append(Violation("N", self.name, what, ""))


class HostileClient:
    """A tenant whose receivers hang, fail, or ask for an hour without calls, on the hosts of others and on its own."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    async def create_timers(self) -> None:
        """They are all due at the same time, and are more than any limit that a seed has chosen."""
        cluster = self._cluster
        if cluster.config.engine.timers_in_memory_max < _HOSTILE_MEMORY_MIN:
            return  # the limit of memory is tested by others
        service = next(iter(cluster.instances.values())).service
        with contextlib.suppress(DuetimeError):  # whatever is refused, enough of them are created
            await service.namespaces.create(NamespaceSpec(name=HOSTILE))
        numbers = range(_HOSTILE_TIMERS)
        failing = [f"http://ok/{kind}/{number}" for kind in ("500", "503") for number in numbers]
        hanging = [f"http://{host}/hang/{number}" for number in numbers for host in ("ok", f"hangs-{number}")]
        due_ms = cluster.now_ms() + 1_000
        # URLs that fail do not delay others of their namespace; those that hang may use its share.
        for namespace, urls in (("default", failing), (HOSTILE, failing + hanging)):
            for number, url in enumerate(urls):
                spec = TimerSpec(namespace=namespace, timer_id=f"h{number}", execute_at_ms=due_ms, callback_url=url)
                with contextlib.suppress(DuetimeError):
                    await service.create(spec)
