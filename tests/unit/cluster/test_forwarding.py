"""Requests between instances over real HTTP: signed, in batches; a command is carried out once, or is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from msgspec.structs import replace
from raw_server import Server, serving

from duetime.api.dispatch import Api
from duetime.cluster.forwarding import CommandAnswer, CreateCommand, DeleteCommand, Forward, Peer
from duetime.cluster.peer_client import PeerClient
from duetime.cluster.peer_protocol import (
    COMMANDS_PATH,
    SIGNATURE,
    CommandBatch,
    Reply,
    ReplyBatch,
    decode_replies,
    encode,
    reply_of,
    sign,
)
from duetime.config import load_config
from duetime.domain.status import InstanceStatus
from duetime.domain.timer import Created, State, TimerKey, TimerSpec, TimerView, Verdict
from duetime.errors import (
    Conflict,
    InvalidField,
    NotOwner,
    OutcomeUnknown,
    Unserved,
)
from duetime.http.client import Answer, HttpClient
from duetime.http.messages import Handler, Request, Response
from duetime.http.server import HttpServer, serve_http
from duetime.service.service import Service
from duetime.telemetry import Telemetry
from duetime.testing import make_timer

STATUS = InstanceStatus(
    instance_id="b",
    version="1",
    ready=True,
    lease_ms=1,
    clock_skew_ms=0,
    shards=3,
    in_memory=0,
    in_flight=0,
    held=0,
    writes_waiting=0,
)


class Commands:
    """The service of the other instance, as the peer server uses it. Commands for "slow" wait for `released`."""

    def __init__(self) -> None:
        self.name = "b"
        self.secret = "the secret"
        self.port = 0
        self.forwarded = self
        self.got: list[str] = []
        self.requests = 0
        self.released = asyncio.Event()
        self.answers: dict[str, asyncio.Future[CommandAnswer]] = {}
        self.break_off = False
        self.answer_instead: Response | None = None  # whatever was carried out

    def as_peer(self) -> Peer:
        return Peer(self.name, f"127.0.0.1:{self.port}", self.secret)

    def join_again(self, name: str) -> None:
        """As after a freeze: the process goes on under another id and with another secret."""
        self.name = name
        self.secret = f"the secret of {name}"

    def instance_status(self) -> InstanceStatus:
        return STATUS

    def receive(self, forward: Forward) -> asyncio.Future[CommandAnswer]:
        answer = self.answers[forward.command_id] = asyncio.ensure_future(self._carry_out(forward))
        return answer

    def answer_to(self, command_id: str) -> asyncio.Future[CommandAnswer]:
        return self.answers[command_id]

    async def _carry_out(self, forward: Forward) -> CommandAnswer:
        command = forward.command
        if isinstance(command, CreateCommand):
            self.got.append(command.spec.timer_id)
            if command.spec.timer_id == "slow":
                await self.released.wait()
            return Created(TimerView(make_timer(command.spec.timer_id), State.SCHEDULED), True)
        assert isinstance(command, DeleteCommand)
        if command.key.timer_id == "wrong":
            raise InvalidField("timerId", "is wrong")
        if command.key.timer_id == "moved":
            raise NotOwner
        if command.key.timer_id == "broken":
            raise ZeroDivisionError("a bug")
        return Verdict.CANCELLED


@pytest_asyncio.fixture
async def owner() -> AsyncIterator[Commands]:
    owner = Commands()
    api = Api(cast(Service, owner), load_config(environ={}), Telemetry())
    server: HttpServer

    async def handle(request: Request) -> Response:
        owner.requests += 1
        response = await api.handle(request)
        if owner.break_off:
            for connection in list(server.connections):
                cast(Any, connection)._transport.abort()
        return owner.answer_instead or response

    server = await listen(handle)
    owner.port = server.port
    yield owner
    owner.released.set()
    await server.close(1_000)


async def listen(handle: Handler) -> HttpServer:
    return await serve_http(handle, "127.0.0.1", 0, body_bytes_max=1 << 24, connections_max=64, idle_timeout_ms=60_000)


@pytest_asyncio.fixture
async def peers() -> AsyncIterator[PeerClient]:
    peers = PeerClient(lambda: "a")
    yield peers
    await peers.close()


def create(timer_id: str) -> Forward:
    return Forward(f"command-{timer_id}", 0, 1, CreateCommand(TimerSpec(namespace="n", timer_id=timer_id, delay_ms=1)))


def delete(timer_id: str) -> Forward:
    return Forward(f"command-{timer_id}", 0, 1, DeleteCommand(TimerKey("n", timer_id)))


async def test_a_command_is_carried_out_and_answered(owner: Commands, peers: PeerClient) -> None:
    answer = await peers.forward(owner.as_peer(), create("t1"))
    assert answer == Created(TimerView(make_timer("t1"), State.SCHEDULED), True)
    assert await peers.forward(owner.as_peer(), delete("t1")) is Verdict.CANCELLED
    assert owner.got == ["t1"]


async def test_concurrent_commands_are_sent_in_one_request(owner: Commands, peers: PeerClient) -> None:
    names = [f"t{number}" for number in range(500)]
    answers = await asyncio.gather(*(peers.forward(owner.as_peer(), create(name)) for name in names))
    assert [cast(Created, answer).view.timer.timer_id for answer in answers] == names
    assert sorted(owner.got) == sorted(names), "each once"
    assert owner.requests == 2


async def test_a_slow_command_does_not_delay_the_others_of_its_request(owner: Commands, peers: PeerClient) -> None:
    slow = asyncio.ensure_future(peers.forward(owner.as_peer(), create("slow")))
    fast = await peers.forward(owner.as_peer(), create("t1"))
    assert isinstance(fast, Created)
    assert not slow.done()
    owner.released.set()
    assert cast(Created, await slow).view.timer.timer_id == "slow"
    assert sorted(owner.got) == ["slow", "t1"], "asked for again, not carried out again"


async def test_the_owners_refusal_arrives_as_it_was(owner: Commands, peers: PeerClient) -> None:
    with pytest.raises(InvalidField, match="is wrong") as caught:
        await peers.forward(owner.as_peer(), delete("wrong"))
    assert (caught.value.field, caught.value.code) == ("timerId", "invalid_field")
    with pytest.raises(NotOwner):
        await peers.forward(owner.as_peer(), delete("moved"))
    with pytest.raises(OutcomeUnknown):
        await peers.forward(owner.as_peer(), delete("broken"))


async def test_a_refused_connection_means_not_applied(owner: Commands, peers: PeerClient) -> None:
    unreachable = replace(owner.as_peer(), address="127.0.0.1:1")
    with pytest.raises(NotOwner, match="refused"):
        await peers.forward(unreachable, create("t1"))
    with pytest.raises(Unserved, match="refused"):
        await peers.status(unreachable)


async def test_a_successor_on_the_same_address_refuses(owner: Commands, peers: PeerClient) -> None:
    before = owner.as_peer()
    owner.name = "c"
    with pytest.raises(NotOwner, match="is for instance b, this is instance c"):
        await peers.forward(before, create("t1"))
    with pytest.raises(Unserved, match="this is instance c"):
        await peers.status(before)
    assert owner.got == []


async def test_a_wrong_secret_is_refused(owner: Commands, peers: PeerClient) -> None:
    with pytest.raises(NotOwner, match="not signed"):
        await peers.forward(replace(owner.as_peer(), secret="another"), create("t1"))
    assert owner.got == []


async def test_a_command_whose_answer_was_lost_is_unknown_and_not_repeated(owner: Commands, peers: PeerClient) -> None:
    await peers.forward(owner.as_peer(), create("t1"))  # the connection is kept, and breaks when it is used again
    owner.break_off = True
    with pytest.raises(OutcomeUnknown):
        await peers.forward(owner.as_peer(), create("t2"))
    assert owner.got == ["t1", "t2"], "carried out once"


async def test_a_recorded_request_cannot_be_sent_again(owner: Commands) -> None:
    http = HttpClient()
    body = encode(CommandBatch("b", "eve", 7, [create("t1")]))
    headers = {SIGNATURE: sign("the secret", body)}

    async def post(data: bytes) -> Answer:
        return await http.request(
            "POST", f"http://127.0.0.1:{owner.port}{COMMANDS_PATH}", headers, data, timeout_ms=5_000
        )

    first = await post(body)
    assert (first.status, len(decode_replies(first.body).replies)) == (200, 1)
    assert (await post(body)).status == Conflict.status
    assert (await post(body.replace(b"t1", b"t2"))).status == 401
    assert (await post(b"rubbish")).status == 401
    assert owner.got == ["t1"]
    await http.close()


async def test_the_status_is_what_the_other_says(owner: Commands, peers: PeerClient) -> None:
    assert await peers.status(owner.as_peer()) == STATUS


async def test_a_refusal_by_a_proxy_leaves_the_outcome_unknown(peers: PeerClient) -> None:
    """A proxy may answer 503 after the instance behind it has carried out the command."""

    async def proxy(_: Request) -> Response:
        return Response(503, b"upstream is gone")

    server = await listen(proxy)
    with pytest.raises(OutcomeUnknown, match="upstream is gone"):
        await peers.forward(Peer("b", f"127.0.0.1:{server.port}", "the secret"), create("t1"))
    await server.close(1_000)


async def test_commands_not_sent_when_a_peer_stops_answering_are_returned(owner: Commands, peers: PeerClient) -> None:
    """Five thousand commands for an instance whose connections close: only those that were sent are unknown."""
    owner.break_off = True
    names = [f"t{number}" for number in range(2_000)]
    answers = await asyncio.gather(
        *(peers.forward(owner.as_peer(), create(name)) for name in names), return_exceptions=True
    )
    kinds = {type(answer) for answer in answers}
    assert kinds == {OutcomeUnknown, NotOwner}
    unknown = [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, OutcomeUnknown)]
    assert set(owner.got) <= set(unknown), "no command that was carried out is answered as not applied"


async def test_a_peer_that_got_no_requests_for_long_accepts_commands(owner: Commands, peers: PeerClient) -> None:
    await peers.forward(owner.as_peer(), create("t1"))
    for number in range(100):  # so many others that its line is let go
        with pytest.raises(NotOwner):
            await peers.forward(Peer(f"gone-{number}", "127.0.0.1:1", "?"), create(f"g{number}"))
    await peers.forward(owner.as_peer(), create("t2"))
    assert owner.got == ["t1", "t2"]


async def test_a_peer_that_joined_again_under_a_new_id_accepts_commands_at_once(
    owner: Commands, peers: PeerClient
) -> None:
    """After a freeze an instance has a new id and a new secret, and its peers number their requests from 1 again."""
    for number in range(50):
        await peers.forward(owner.as_peer(), create(f"t{number}"))
    owner.join_again("c")
    assert isinstance(await peers.forward(owner.as_peer(), create("after")), Created)
    assert await peers.status(owner.as_peer()) == STATUS
    assert owner.got[-1] == "after"


async def test_a_sender_that_joined_again_is_accepted_and_so_is_its_next_id(owner: Commands) -> None:
    name = "a"
    peers = PeerClient(lambda: name)
    for name in ("a", "a2", "a3"):
        assert isinstance(await peers.forward(owner.as_peer(), create(f"{name} 1")), Created)
        assert isinstance(await peers.forward(owner.as_peer(), create(f"{name} 2")), Created)
    await peers.close()
    assert owner.got == ["a 1", "a 2", "a2 1", "a2 2", "a3 1", "a3 2"]


async def test_a_command_that_a_peer_received_before_it_joined_again_is_unknown(
    owner: Commands, peers: PeerClient
) -> None:
    """It is asked for under the id it was given to, and refused: it may have been carried out all the same."""
    slow = asyncio.ensure_future(peers.forward(owner.as_peer(), create("slow")))
    while owner.requests < 2:
        await asyncio.sleep(0.001)
    owner.join_again("c")
    with pytest.raises(OutcomeUnknown, match="is for instance b, this is instance c"):
        await slow
    assert owner.got == ["slow"]


async def test_a_command_is_unknown_if_a_copy_of_its_request_came_first(owner: Commands, peers: PeerClient) -> None:
    """Whoever listens on the network may send a copy and hold the request back: it is then refused as a replay."""
    http = HttpClient()
    body = encode(CommandBatch("b", "a", 1, [create("t1")]))
    url, headers = f"http://127.0.0.1:{owner.port}{COMMANDS_PATH}", {SIGNATURE: sign("the secret", body)}
    await http.request("POST", url, headers, body, timeout_ms=5_000)
    with pytest.raises(OutcomeUnknown, match="replayed request number"):
        await peers.forward(owner.as_peer(), create("t1"))
    assert isinstance(await peers.forward(owner.as_peer(), create("t2")), Created)
    await http.close()


@pytest.mark.parametrize(
    "given",
    [
        Response(500, b"Internal Server Error"),
        Response(200, b"not what instances say"),
        Response(200, b""),
        Response(200, encode(ReplyBatch([]))),
        Response(200, encode(ReplyBatch([Reply(error="NotOwner"), Reply(error="NotOwner")]))),
    ],
    ids=["500", "unreadable", "empty", "too few replies", "too many replies"],
)
async def test_a_command_that_was_carried_out_is_unknown_after_an_unexpected_answer(
    owner: Commands, peers: PeerClient, given: Response
) -> None:
    owner.answer_instead = given
    with pytest.raises(OutcomeUnknown):
        await peers.forward(owner.as_peer(), create("t1"))
    assert owner.got == ["t1"]


async def test_a_command_whose_reused_connection_closes_is_unknown_even_if_the_next_is_refused(
    peers: PeerClient,
) -> None:
    """The first connection closed after the command was sent; that the second is refused does not matter."""

    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(ok(encode(ReplyBatch([reply_of(Verdict.CANCELLED)]))))
        await server.read_request(reader)
        listening.close()

    server = Server(one_answer)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    peer = Peer("b", f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", "the secret")
    await peers.forward(peer, delete("t1"))
    with pytest.raises(OutcomeUnknown):
        await peers.forward(peer, delete("t2"))
    await server.stop()
    assert (len(server.requests), server.connections) == (2, 1)


async def test_a_command_whose_reused_connection_closes_is_not_sent_on_another(peers: PeerClient) -> None:
    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(ok(encode(ReplyBatch([reply_of(Verdict.CANCELLED)]))))
        await server.read_request(reader)

    async with serving(one_answer) as server:
        peer = Peer("b", f"127.0.0.1:{server.port}", "the secret")
        await peers.forward(peer, delete("t1"))
        with pytest.raises(OutcomeUnknown, match="closed before the answer"):
            await peers.forward(peer, delete("t2"))
    assert (len(server.requests), server.connections) == (2, 2)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_closing_aborts_running_calls_and_sends_nothing_more(owner: Commands, peers: PeerClient) -> None:
    slow = asyncio.ensure_future(peers.forward(owner.as_peer(), create("slow")))
    while not owner.requests:
        await asyncio.sleep(0.001)
    await peers.close()
    with pytest.raises(OutcomeUnknown):
        await slow
    with pytest.raises(NotOwner, match="closed"):
        await peers.forward(owner.as_peer(), create("late"))
    assert owner.got == ["slow"]


async def test_an_address_that_is_none_means_not_sent(peers: PeerClient) -> None:
    wrong = Peer("b", "not an address", "the secret")
    with pytest.raises(NotOwner, match="the address 'not an address'"):
        await peers.forward(wrong, create("t1"))
    with pytest.raises(Unserved, match="the address 'not an address'"):
        await peers.status(wrong)


async def test_a_refused_request_is_logged_on_both_sides_with_both_ids_and_not_again_and_again(
    owner: Commands, peers: PeerClient, caplog: pytest.LogCaptureFixture
) -> None:
    peer = owner.as_peer()
    owner.secret = "another"
    for number in range(5):
        with pytest.raises(NotOwner):
            await peers.forward(peer, create(f"t{number}"))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        "refused a request from instance 'a' to instance 'b': the request is not signed with this instance's secret",
        f"requests of this instance (a) to instance b at 127.0.0.1:{owner.port} fail: "
        "HTTP 401: the request is not signed with this instance's secret",
    ]
    caplog.clear()
    owner.secret = peer.secret
    with caplog.at_level("INFO"):
        await peers.forward(owner.as_peer(), create("t9"))
        await peers.forward(owner.as_peer(), create("t10"))
    assert [record.getMessage() for record in caplog.records] == [
        f"instance b at 127.0.0.1:{owner.port} accepts requests again"
    ]


async def test_refusals_of_many_peers_are_not_remembered_for_ever(
    owner: Commands, peers: PeerClient, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(200):
        with pytest.raises(Unserved):
            await peers.status(replace(owner.as_peer(), instance_id=f"gone-{number}"))
    assert len(peers._refusals) <= 64
