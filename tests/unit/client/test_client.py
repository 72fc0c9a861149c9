"""The Python client against a server with scripted answers: what it sends, what it retries, what it raises."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

import duetime
from duetime import client as client_module
from duetime import wire
from duetime.client import (
    AsyncClient,
    Busy,
    Client,
    Conflict,
    ConnectionFailed,
    Created,
    DuetimeError,
    InvalidField,
    NewTimer,
    NotFound,
    OutcomeUnknown,
    RetryPolicy,
    SignatureError,
    State,
    Unauthenticated,
    Unserved,
    Verdict,
    again_at,
    models,
    ok,
    read_callback,
    retry,
    verify,
)
from duetime.clock import SystemClock
from duetime.errors import SetupError
from duetime.signing import check_secret, new_secret, sign

HOOK = "http://127.0.0.1:9000/hook"
NEW_YEAR = datetime(2027, 1, 1, 9, tzinfo=UTC)


def timer_json(timer_id: str = "a", **fields: Any) -> dict[str, Any]:
    at = "2027-01-01T09:00:00.000Z"
    return {
        "namespace": "default",
        "timerId": timer_id,
        "state": "scheduled",
        "executeAt": at,
        "scheduledAt": at,
        "createdAt": at,
        "attempts": 0,
        "callbackUrl": HOOK,
        **fields,
    }


def created(timer_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"timer": timer_json(timer_id, **fields), "replaced": False}


def problem(status: int, code: str, **more: Any) -> dict[str, Any]:
    return {"type": f"urn:{code}", "title": code, "status": status, "detail": f"{code}!", "code": code, **more}


class Answer(msgspec.Struct):
    """One scripted answer of the server: a response, or closing the connection."""

    body: Any = None
    status: int = 200
    headers: str = ""
    lost: bool = False


NOT_APPLIED = Answer(problem(503, "not_applied"), 503, "retry-after: 0\r\n")
UNKNOWN = Answer(problem(503, "outcome_unknown"), 503, "retry-after: 0\r\n")
BUSY = Answer(problem(429, "busy"), 429, "retry-after: 0\r\n")
LOST = Answer(lost=True)

Rule = Callable[[str, Any], Answer]


class Peer:
    """A server in its own thread, so that sync and async clients can call it."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.rule: Rule = lambda path, body: Answer(problem(500, "unscripted"), 500)
        self.requests: list[tuple[str, Any]] = []
        self.heads: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._listening.wait()

    @property
    def paths(self) -> list[str]:
        return [path.removeprefix("/api/v1/") for path, _ in self.requests]

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**26)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._stopped.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                path = head.split(" ")[1]
                value = msgspec.json.decode(body) if body else None
                self.heads.append(head)
                self.requests.append((path, value))
                answer = self.script.pop(0) if self.script else self.rule(path, value)
                if answer.lost:
                    return
                data = msgspec.json.encode(answer.body)
                writer.write(
                    f"HTTP/1.1 {answer.status} X\r\n{answer.headers}content-length: {len(data)}\r\n\r\n".encode()
                )
                writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(peer.url, retries=2) as client:
        yield client


# --- what is sent, what comes back ---------------------------------------------------------------


async def test_a_create_sends_what_the_api_expects_and_returns_a_typed_timer(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created("order-17", payload={"order": 17}, tags=["eu"]))]
    result = await client.create(
        "order-17",
        at=datetime(2027, 1, 1, 10, tzinfo=timezone(timedelta(hours=1))),
        callback_url=HOOK,
        payload={"order": 17},
        retry_policy=RetryPolicy(max_retries=3),
        callback_timeout_seconds=5,
        headers={"x-shop": "1"},
        correlation_id="c-1",
        tags=["eu"],
        if_absent=True,
        namespace="orders",
    )
    assert peer.requests == [
        (
            "/api/v1/timers/create",
            {
                "timerId": "order-17",
                "namespace": "orders",
                "executeAt": "2027-01-01T09:00:00Z",
                "callbackUrl": HOOK,
                "payload": {"order": 17},
                "retryPolicy": {"maxRetries": 3},
                "callbackTimeoutSeconds": 5,
                "headers": {"x-shop": "1"},
                "correlationId": "c-1",
                "tags": ["eu"],
                "ifAbsent": True,
            },
        )
    ]
    assert result.timer.execute_at == NEW_YEAR
    assert result.timer.payload == {"order": 17}
    assert result.timer.state is State.SCHEDULED
    assert result.replaced is False


@pytest.mark.parametrize(
    ("delay", "sent"),
    [("30m", "30m"), (1.5, "1500ms"), (timedelta(seconds=90), "90000ms"), (1.1, "1100ms"), (0.0001, "1ms"), (0, "0ms")],
)
async def test_a_delay_may_be_text_seconds_or_a_timedelta_and_is_never_rounded_down(
    peer: Peer, client: AsyncClient, delay: Any, sent: str
) -> None:
    peer.script = [Answer(created())]
    await client.create("a", delay=delay)
    assert peer.requests[0][1]["delay"] == sent


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"at": datetime(2027, 1, 1)}, "at"),  # noqa: DTZ001 - the point of the test
        ({}, "at"),
        ({"at": NEW_YEAR, "delay": 1}, "at"),
        ({"delay": -1}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": 1, "payload": object()}, None),
    ],
)
async def test_invalid_arguments_are_refused_before_a_request_is_sent(
    peer: Peer, client: AsyncClient, arguments: Any, field: str | None
) -> None:
    with pytest.raises(InvalidField) as caught:
        await client.create("a", **arguments)
    assert caught.value.field == field
    assert peer.requests == []


async def test_an_update_sends_only_the_given_fields_and_none_resets_a_field(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer({"timer": timer_json(), "verdict": "inFlight"})]
    updated = await client.update("a", at=NEW_YEAR, payload=None)
    assert peer.requests[0][1] == {
        "namespace": "default",
        "timerId": "a",
        "executeAt": "2027-01-01T09:00:00Z",
        "payload": None,
    }
    assert updated.verdict is Verdict.IN_FLIGHT


async def test_if_absent_returns_whether_the_timer_existed(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created()), Answer({**created(), "existed": True})]
    found = [await client.create("a", delay=1, callback_url=HOOK, if_absent=True) for _ in range(2)]
    assert [one.existed for one in found] == [False, True]
    peer.script = [Answer({"results": [created(), {**created(), "existed": True}]})]
    many = await client.create_many([NewTimer("a", delay=1, if_absent=True)] * 2)
    assert [isinstance(one, models.Created) and one.existed for one in many] == [False, True]


async def test_a_list_reads_all_pages_also_after_an_empty_one(peer: Peer, client: AsyncClient) -> None:
    peer.script = [
        Answer({"timers": [timer_json("a"), timer_json("b")], "nextCursor": "1"}),
        Answer({"timers": [], "nextCursor": "2"}),
        Answer({"timers": [timer_json("c")], "nextCursor": None}),
    ]
    found = [timer.timer_id async for timer in client.list(state=State.FAILED, due_from=NEW_YEAR, namespace="n")]
    assert found == ["a", "b", "c"]
    assert [body["cursor"] for _, body in peer.requests] == [None, "1", "2"]
    assert peer.requests[0][1]["state"] == "failed"
    assert peer.requests[0][1]["dueFrom"] == "2027-01-01T09:00:00Z"


async def test_namespaces_have_methods_of_their_own(peer: Peer, client: AsyncClient) -> None:
    answer = {
        "namespace": "orders",
        "numShards": 4,
        "retryPolicy": {"maxRetries": 1, "aFieldOfTheFuture": 1},
        "callbackTimeoutSeconds": 10,
        "requireOk": False,
        "deliveredRetention": "1d",
        "failedRetention": "30d",
        "signingSecrets": ["whsec_…abcd"],
        "createdAt": "2027-01-01T09:00:00.000Z",
    }
    peer.script = [Answer({"namespace": answer}), Answer({"namespaces": [answer]}), Answer({})]
    made = await client.namespaces.create("orders", num_shards=4, failed_retention=timedelta(days=2))
    listed = await client.namespaces.list()
    await client.namespaces.delete("orders")
    assert peer.requests[0][1] == {"namespace": "orders", "numShards": 4, "failedRetention": "172800000ms"}
    assert made.signing_secrets == ("whsec_…abcd",)
    assert made.retry_policy.max_retries == 1
    assert listed == (made,)


async def test_the_token_is_sent_to_the_server(peer: Peer) -> None:
    peer.script = [Answer({"timer": timer_json()})]
    async with AsyncClient(peer.url, "secret-token") as client:
        await client.get("a")
    assert "authorization: Bearer secret-token\r\n" in peer.heads[0]


def test_a_malformed_url_or_token_is_refused_by_the_constructor() -> None:
    for arguments in (("ftp://x",), ("http://user@host",), ("http://host", "two\r\nlines")):
        with pytest.raises(SetupError):
            AsyncClient(*arguments)


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETIME_URL", "http://timers.example:1/")
    assert AsyncClient().url == "http://timers.example:1"
    assert AsyncClient("http://other.example").url == "http://other.example"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(problem(400, "invalid_field", field="executeAt"), 400), InvalidField),
        (Answer(problem(401, "unauthenticated"), 401), Unauthenticated),
        (Answer(problem(404, "timer_not_found"), 404), NotFound),
        (Answer(problem(409, "if_absent"), 409), Conflict),
        (Answer(problem(500, "internal"), 500), DuetimeError),
        (Answer(problem(404, "path_not_found"), 404), DuetimeError),  # no server there, not: no such timer
        (Answer("<html>", 404), DuetimeError),
    ],
)
async def test_a_problem_becomes_an_error_of_its_class_and_is_not_retried(
    peer: Peer, client: AsyncClient, answer: Answer, kind: type[DuetimeError]
) -> None:
    peer.script = [answer]
    with pytest.raises(DuetimeError) as caught:
        await client.get("a")
    assert type(caught.value) is kind
    assert caught.value.status == answer.status
    assert len(peer.requests) == 1
    if isinstance(answer.body, dict):
        assert caught.value.code == answer.body["code"]
        assert caught.value.field == answer.body.get("field")


# --- retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [NOT_APPLIED, BUSY])
async def test_a_plain_create_is_retried_if_nothing_was_applied(
    peer: Peer, client: AsyncClient, refusal: Answer
) -> None:
    peer.script = [refusal, refusal, Answer(created())]
    assert (await client.create("a", delay=1)).timer.timer_id == "a"
    assert len(peer.requests) == 3


async def test_the_number_of_retries_is_bounded(peer: Peer, client: AsyncClient) -> None:
    peer.script = [BUSY] * 9
    with pytest.raises(Busy):
        await client.create("a", delay=1)
    assert len(peer.requests) == 3


async def test_a_retry_after_longer_than_the_timeout_ends_the_call_at_once(peer: Peer) -> None:
    peer.script = [Answer(problem(429, "busy"), 429, "retry-after: 3600\r\n")]
    async with AsyncClient(peer.url, timeout=5) as client:
        with pytest.raises(Busy):
            await client.create("a", delay=1)
    assert len(peer.requests) == 1


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST, Answer("bad gateway", 502), Answer({"timer": 1})])
async def test_a_plain_create_of_unknown_outcome_is_never_retried(
    peer: Peer, client: AsyncClient, doubt: Answer
) -> None:
    peer.script = [doubt]
    with pytest.raises(OutcomeUnknown, match=r"it could fire twice.*if_absent"):
        await client.create("a", delay=1)
    assert len(peer.requests) == 1


async def test_a_plain_create_is_not_sent_twice_if_a_kept_connection_ends(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created()), LOST]
    await client.create("a", delay=1)
    with pytest.raises(OutcomeUnknown):
        await client.create("b", delay=1)
    assert len(peer.requests) == 2


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST])
async def test_a_create_with_if_absent_is_retried_after_an_unknown_outcome(
    peer: Peer, client: AsyncClient, doubt: Answer
) -> None:
    peer.script = [doubt, Answer(created())]
    await client.create("a", delay=1, if_absent=True)
    assert len(peer.requests) == 2


async def test_an_unknown_outcome_stays_unknown_after_later_failures(peer: Peer, client: AsyncClient) -> None:
    peer.script = [LOST, NOT_APPLIED, BUSY]
    with pytest.raises(OutcomeUnknown):
        await client.create("a", delay=1, if_absent=True)
    peer.script = [LOST, Answer(problem(409, "if_absent"), 409)]
    with pytest.raises(Conflict) as caught:
        await client.create("a", delay=1, if_absent=True)
    assert "may have been applied" in caught.value.__notes__[0]


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST, NOT_APPLIED, BUSY, Answer("gateway", 504)])
async def test_a_read_is_retried_after_any_lost_response(peer: Peer, client: AsyncClient, doubt: Answer) -> None:
    peer.script = [doubt, Answer({"timer": timer_json()})]
    assert (await client.get("a")).timer_id == "a"


async def test_a_delete_whose_response_was_lost_still_returns_cancelled(peer: Peer, client: AsyncClient) -> None:
    cancelled = timer_json(state="cancelled", outcome="cancelled")
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), Answer({"timer": cancelled})]
    assert await client.delete("a") is Verdict.CANCELLED
    delivered = timer_json(state="delivered", outcome="delivered")
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), Answer({"timer": delivered})]
    assert await client.delete("a") is Verdict.ALREADY_REACHED


async def test_update_fire_now_and_replay_of_unknown_outcome_are_not_retried(peer: Peer, client: AsyncClient) -> None:
    for call in (client.update("a", delay=1), client.fire_now("a"), client.replay("a")):
        peer.script = [LOST]
        with pytest.raises(OutcomeUnknown):
            await call
    assert peer.paths == ["timers/update", "timers/fireNow", "timers/replay"]


async def test_without_a_server_connection_failed_is_raised(peer: Peer) -> None:
    peer.stop()
    async with AsyncClient(peer.url, retries=1) as client:
        with pytest.raises(ConnectionFailed, match="cannot reach"):
            await client.create("a", delay=1)
        assert await client.ready() is False


# --- many at once --------------------------------------------------------------------------------


def batch_rule(path: str, body: Any) -> Answer:
    if path.endswith("createMany"):
        return Answer({"results": [created(item["timerId"]) for item in body["timers"]]})
    return Answer({"results": [{"verdict": "cancelled"} for _ in body["timers"]]})


async def test_create_many_sends_batches_and_returns_results_in_order(peer: Peer, client: AsyncClient) -> None:
    peer.rule = batch_rule
    results = await client.create_many([NewTimer(f"t{i}", delay=1, if_absent=i % 2 == 0) for i in range(2_500)])
    assert [r.timer.timer_id for r in results if isinstance(r, Created)] == [f"t{i}" for i in range(2_500)]
    assert sorted(len(body["timers"]) for _, body in peer.requests) == [250, 250, 1_000, 1_000]


async def test_create_many_retries_only_the_timers_that_failed(peer: Peer, client: AsyncClient) -> None:
    refusals = [{"error": problem(503, "not_applied")}, {"error": problem(400, "invalid_field", field="callbackUrl")}]
    peer.script = [Answer({"results": [created("a"), *refusals]}), Answer({"results": [created("b")]})]
    results = await client.create_many([NewTimer(name, delay=1) for name in "abc"])
    assert [type(result) for result in results] == [Created, Created, InvalidField]
    assert [item["timerId"] for item in peer.requests[1][1]["timers"]] == ["b"]


async def test_delete_many_is_retried_after_a_lost_response(peer: Peer, client: AsyncClient) -> None:
    peer.rule = batch_rule
    peer.script = [LOST]
    assert await client.delete_many(["a", "b"]) == [Verdict.CANCELLED] * 2


async def test_concurrent_calls_share_a_request_with_coalesce(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        results = await asyncio.gather(*[client.create(f"t{i}", delay=1) for i in range(1_500)])
        assert [r.timer.timer_id for r in results] == [f"t{i}" for i in range(1_500)]
        assert [len(body["timers"]) for _, body in peer.requests] == [1_000, 500]
        verdicts = await asyncio.gather(*[client.delete(f"t{i}") for i in range(10)])
    assert verdicts == [Verdict.CANCELLED] * 10
    assert peer.paths[2:] == ["timers/deleteMany"]


async def test_a_single_coalesced_create_is_sent_at_once(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        for name in "ab":
            assert (await client.create(name, delay=1)).timer.timer_id == name
    assert [len(body["timers"]) for _, body in peer.requests] == [1, 1]


async def test_coalesced_creates_fail_separately_and_keep_their_retry_rules(peer: Peer) -> None:
    peer.script = [
        Answer({"results": [created("a"), {"error": problem(400, "invalid_field", field="timerId")}]}),
        LOST,
    ]
    async with AsyncClient(peer.url, coalesce=True, retries=1) as client:
        first = await asyncio.gather(*[client.create(n, delay=1) for n in "ab"], return_exceptions=True)
        lost = await asyncio.gather(*[client.create(n, delay=1) for n in "cd"], return_exceptions=True)
    assert [type(result) for result in first] == [Created, InvalidField]
    assert [type(result) for result in lost] == [OutcomeUnknown] * 2
    assert lost[0] is not lost[1]
    assert len(peer.requests) == 2


async def test_coalesced_creates_with_if_absent_are_retried_separately_from_plain_ones(peer: Peer) -> None:
    seen: set[str] = set()

    def lose_each_the_first_time(path: str, body: Any) -> Answer:
        is_new = str(body) not in seen
        seen.add(str(body))
        return LOST if is_new else batch_rule(path, body)

    peer.rule = lose_each_the_first_time
    async with AsyncClient(peer.url, coalesce=True) as client:
        plain, safe = await asyncio.gather(
            client.create("plain", delay=1), client.create("safe", delay=1, if_absent=True), return_exceptions=True
        )
    assert isinstance(plain, OutcomeUnknown)
    assert isinstance(safe, Created)


async def test_a_cancelled_caller_does_not_disturb_the_others(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        tasks = [asyncio.ensure_future(client.create(n, delay=1)) for n in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in done] == [Created, asyncio.CancelledError, Created]


# --- the sync client -----------------------------------------------------------------------------


def test_the_sync_client_has_every_method_of_the_async_one() -> None:
    hidden = {"pages"}
    public = {name for name in vars(AsyncClient) if not name.startswith("_")} - hidden
    assert public <= set(vars(Client))
    namespaces = {name for name in vars(AsyncClient("http://x").namespaces.__class__) if not name.startswith("_")}
    assert namespaces <= set(dir(Client("http://x").namespaces))


def test_the_sync_client_works_from_many_threads(peer: Peer) -> None:
    peer.rule = batch_rule
    with Client(peer.url, coalesce=True) as client:
        found: list[str] = []

        def work(number: int) -> None:
            found.extend(client.create(f"{number}.{i}", delay=1).timer.timer_id for i in range(20))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(f"{n}.{i}" for n in range(8) for i in range(20))


def test_the_sync_client_lists_raises_and_closes(peer: Peer) -> None:
    peer.script = [
        Answer({"timers": [timer_json("a")], "nextCursor": "1"}),
        Answer({"timers": [timer_json("b")], "nextCursor": None}),
        Answer(problem(404, "timer_not_found"), 404),
    ]
    client = Client(peer.url)
    assert [timer.timer_id for timer in client.list(tag="x")] == ["a", "b"]
    with pytest.raises(NotFound):
        client.get("c")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get("a")


def _in_the_child(client: Client, results: Any) -> None:
    results.put(client.get("from-the-child").timer_id)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_after_a_fork_parent_and_child_can_both_use_the_client(peer: Peer) -> None:
    peer.rule = lambda path, body: Answer({"timer": timer_json(body["timerId"])})
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    with Client(peer.url) as client:
        assert client.get("before").timer_id == "before"
        child = forking.Process(target=_in_the_child, args=(client, results))
        child.start()
        assert results.get(timeout=20) == "from-the-child"
        child.join()
        assert child.exitcode == 0
        assert client.get("after").timer_id == "after"


# --- the receiving side --------------------------------------------------------------------------

BODY = (
    b'{"namespace":"n","timerId":"t","executeAt":"2027-01-01T09:00:00.000Z","firedAt":"2027-01-01T09:00:00.003Z",'
    b'"attempt":2,"payload":{"a":1},"correlationId":"c"}'
)


def signed(body: bytes, secret: str, at_s: int | None = None) -> dict[str, str]:
    at_s = SystemClock().wall_ms() // 1_000 if at_s is None else at_s
    return {
        "Webhook-Id": "id-1",
        "Webhook-Timestamp": str(at_s),
        "Webhook-Signature": sign("id-1", at_s, body, [check_secret(secret)]),
        "Duetime-Fence": "3.7",
    }


def test_a_signed_callback_is_verified_and_read() -> None:
    secret = new_secret()
    callback = verify(BODY, signed(BODY, secret), [new_secret(), secret])
    assert callback.execute_at == NEW_YEAR
    assert callback.late_by == timedelta(milliseconds=3)
    assert (callback.namespace, callback.timer_id, callback.attempt) == ("n", "t", 2)
    assert (callback.payload, callback.correlation_id) == ({"a": 1}, "c")
    assert (callback.id, callback.fence) == ("id-1", "3.7")


def test_a_forged_or_stale_callback_is_refused() -> None:
    secret = new_secret()
    with pytest.raises(SignatureError):
        verify(BODY, signed(BODY, new_secret()), secret)
    with pytest.raises(SignatureError):
        verify(BODY, signed(BODY, secret, at_s=1), secret)
    with pytest.raises(InvalidField):
        read_callback(b"[]", {})


def test_the_server_decodes_the_answers_of_a_receiver() -> None:
    from duetime.domain.settle import read_answer

    assert read_answer(ok()) == (True, None, None)
    assert read_answer(retry()) == (False, None, None)
    at_ms = int(NEW_YEAR.timestamp() * 1_000)
    assert read_answer(again_at(NEW_YEAR)) == (True, at_ms, None)
    assert read_answer(again_at(NEW_YEAR, done=False)) == (False, at_ms, None)
    with pytest.raises(InvalidField):
        again_at(datetime(2027, 1, 1))  # noqa: DTZ001 - the point of the test


# --- the public names ---------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert client_module.__all__ == [
        "AsyncClient",
        "Busy",
        "Callback",
        "Client",
        "ClusterStatus",
        "Conflict",
        "ConnectionFailed",
        "Created",
        "DuetimeError",
        "Ending",
        "Forbidden",
        "HeldFor",
        "InvalidField",
        "Member",
        "Missed",
        "Namespace",
        "NamespaceSettings",
        "NewTimer",
        "NotFound",
        "Outcome",
        "OutcomeUnknown",
        "Page",
        "Rejected",
        "RetryPolicy",
        "Shard",
        "ShardCounts",
        "SignatureError",
        "State",
        "Timer",
        "TimerChanges",
        "TimerFilter",
        "TooLarge",
        "Unauthenticated",
        "Unserved",
        "Updated",
        "Verdict",
        "again_at",
        "ok",
        "read_callback",
        "retry",
        "verify",
    ]
    assert all(hasattr(client_module, name) for name in client_module.__all__)
    assert Unserved.code == "not_applied"


def test_the_package_imports_the_clients_only_when_they_are_used() -> None:
    assert duetime.Client is Client
    assert duetime.AsyncClient is AsyncClient


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (models.Timer, wire.TimerJson),
        (models.Namespace, wire.NamespaceJson),
        (models.ClusterStatus, wire.ClusterStatusJson),
        (models.Member, wire.MemberJson),
        (models.Shard, wire.ShardJson),
        (models.ShardCounts, wire.ShardCountsJson),
        (models.HeldFor, wire.HeldForJson),
        (models._CreateJson, wire.CreateTimerJson),
        (models.Created, wire.CreatedAnswer),
    ],
)
def test_the_models_of_the_client_have_every_field_of_the_wire(ours: type, theirs: type) -> None:
    def names(kind: type) -> set[str]:
        return {field.encode_name for field in msgspec.structs.fields(kind)}

    assert names(ours) == names(theirs)
