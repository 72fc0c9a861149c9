"""A service that records what it is asked and answers with the right types, with the API in front of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, cast

import msgspec

from duetime.api.dispatch import Api
from duetime.api.routes import PREFIX
from duetime.cluster.forwarding import Peer
from duetime.config import Auth, Config, Token, load_config
from duetime.domain.flow_status import FlowFilter, FlowState, FlowStatus
from duetime.domain.status import (
    BrokerStatus,
    ClusterStatus,
    HeldFor,
    InstanceStatus,
    MemberStatus,
    ShardCounts,
    ShardMap,
    ShardStatus,
)
from duetime.domain.timer import (
    Created,
    Namespace,
    NamespaceSpec,
    State,
    Timer,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.errors import Busy, DuetimeError
from duetime.http.messages import Request, Response
from duetime.service.flows import FlowAnswer, FlowPage, Unanswered
from duetime.service.service import Service
from duetime.telemetry import Telemetry

NOW_MS = 1_800_000_000_000  # 2027-01-15T08:00:00Z


class NamespaceRecorder:
    def __init__(self, note: Callable[[Any], None]) -> None:
        self.note = note

    async def create(self, spec: NamespaceSpec) -> Namespace:
        self.note(spec)
        return Namespace(name=spec.name, num_shards=4, created_at_ms=0)

    update = create

    async def get(self, name: str) -> Namespace:
        return await self.create(NamespaceSpec(name=name))

    async def list_all(self) -> list[Namespace]:
        return [await self.get(name) for name in ("default", "orders")]

    async def delete(self, name: str) -> None:
        self.note(name)

    async def pause(self, name: str) -> Namespace:
        return msgspec.structs.replace(await self.get(name), paused=True)

    resume = get


class FlowRecorder:
    def __init__(self, note: Any) -> None:
        self.note = note

    async def get(self, *asked: Any) -> FlowAnswer:
        self.note(asked)
        flow = FlowStatus(
            namespace=asked[0],
            flow_key=asked[1],
            origin="https://shop.example",
            state=FlowState.OPEN,
            waiting=4,
            in_flight=1,
            until_ms=1_000,
        )
        return FlowAnswer(flow, (Unanswered("j", "127.0.0.1:2", "no answer in time"),))

    update = pause = resume = get

    async def list_page(self, wanted: FlowFilter, allowed: Iterable[str] | None) -> FlowPage:
        self.note((wanted, allowed))
        return FlowPage(((await self.get("orders", "a")).flow,), "next")


class QuotaRecorder:
    def __init__(self) -> None:
        self.counted: list[str] = []
        self.refused: set[str] = set()

    def take_request(self, name: str) -> None:
        self.counted.append(name)
        if name in self.refused:
            raise Busy("used up", code="quota_requests_per_second")


class Recorder:
    """Stands where the service stands, writes down what it is asked and answers something of the right shape."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.reason: str | None = None
        self.namespaces = NamespaceRecorder(self.note)
        self.flows = FlowRecorder(self.note)
        self.quotas = QuotaRecorder()

    def now_ms(self) -> int:
        return NOW_MS

    def note(self, what: Any) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    def view(self, key: TimerKey) -> TimerView:
        timer = Timer(
            namespace=key.namespace,
            timer_id=key.timer_id,
            uuid_high=0,
            uuid_low=0,
            generation=1,
            execute_at_ms=0,
            scheduled_at_ms=0,
            created_at_ms=0,
            callback_url="http://127.0.0.1/",
        )
        return TimerView(timer, State.SCHEDULED)

    async def create(self, spec: TimerSpec) -> Created:
        self.note(spec)
        return Created(self.view(TimerKey(spec.namespace, spec.timer_id)), False)

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        return [spec if isinstance(spec, DuetimeError) else await self.create(spec) for spec in specs]

    async def get(self, key: TimerKey) -> TimerView:
        self.note(key)
        return self.view(key)

    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated:
        self.note((key, patch))
        return Updated(self.view(key), Verdict.UPDATED)

    async def delete(self, key: TimerKey) -> Verdict:
        self.note(key)
        return Verdict.CANCELLED

    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]:
        return [key if isinstance(key, DuetimeError) else await self.delete(key) for key in keys]

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        self.note(filter)
        return [self.view(TimerKey(filter.namespace or "", "a"))], None

    fire_now = replay = pause = resume = get

    def as_peer(self) -> Peer:
        return Peer("i", "127.0.0.1:1", "secret")

    def shard_map(self) -> ShardMap:
        return ShardMap(("127.0.0.1:1", "127.0.0.1:2"), ("i", "j"), (0, 1, None), {"default": 3, "orders": 2})

    async def cluster_status(self, *, with_shards: bool = False) -> ClusterStatus:
        self.note(with_shards)
        words = InstanceStatus(
            instance_id="i",
            version="1",
            ready=False,
            reason="starting",
            lease_ms=3_000,
            clock_skew_ms=-3,
            shards=1,
            in_memory=5,
            in_flight=2,
            held=4,
            writes_waiting=0,
            held_for=(HeldFor(destination="https://a.test", held=4, in_flight=2, failures=0, breaker_open=False),),
            brokers=(
                BrokerStatus(name="kafka", connected=False, away_reason="connection refused"),
                BrokerStatus(
                    name="nats",
                    connected=True,
                    consuming=True,
                    waiting=70,
                    in_flight=3,
                    retrying=2,
                    retry_reason="quota of a",
                    refused=1,
                    refusal_reason="b is not JSON",
                ),
            ),
        )
        mine = MemberStatus(
            instance_id="i", address="a:1", alive=True, self_=True, shards=1, joined_at_ms=0, status=words
        )
        other = MemberStatus(
            instance_id="j", address="b:1", alive=True, self_=False, shards=0, joined_at_ms=0, unreachable="timeout"
        )
        return ClusterStatus(
            instance_id="i",
            version="1",
            store="memory",
            ready=True,
            reason=None,
            clock_skew_max_ms=500,
            dead_after_ms=3_500,
            members=(mine, other),
            shard_counts=ShardCounts(total=2, owned=1, free=1, of_dead=0),
            unowned_shards=(1,),
            shards=(
                (
                    ShardStatus(
                        shard_id=0, version=3, owner_id="i", owner_address="a:1", in_memory=5, horizon_ms=60_000
                    ),
                    ShardStatus(
                        shard_id=1, version=0, owner_id=None, owner_address=None, in_memory=None, horizon_ms=None
                    ),
                )
                if with_shards
                else None
            ),
            in_memory=5,
            in_flight=2,
            held=4,
            writes_waiting=0,
            clock_skew_ms=-3,
            oldest_due_ms=None,
            lateness_p50_ms=1.0,
            lateness_p99_ms=None,
        )

    def readiness(self) -> str | None:
        return self.reason


def configured(*tokens: Token, **flags: Any) -> Config:
    config = load_config(environ={}, flags=flags)
    return msgspec.structs.replace(config, auth=Auth(tokens=tokens))


def token(text: str, *, namespaces: tuple[str, ...] = (), verbs: tuple[str, ...] = ()) -> Token:
    return Token(name=text, sha256=sha256(text.encode()).hexdigest(), namespaces=namespaces, verbs=verbs)


class World:
    """An Api in front of a Recorder."""

    def __init__(self, *tokens: Token) -> None:
        self.service = Recorder()
        self.telemetry = Telemetry()
        self.api = Api(cast(Service, self.service), configured(*tokens), self.telemetry)

    async def ask(
        self, path: str, body: Any = None, *, bearer: str | None = None, method: str = "POST", **headers: str
    ) -> tuple[Response, Any]:
        sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        if bearer is not None:
            sent[b"authorization"] = f"Bearer {bearer}".encode()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        where = path if path.startswith("/") else PREFIX + path
        response = await self.api.handle(Request(method, where, headers=sent, body=data))
        return response, json.loads(response.body) if response.content_type.endswith(b"json") else None


def headers_of(response: Response) -> dict[str, str]:
    return dict(response.headers)
