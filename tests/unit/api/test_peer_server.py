"""What an instance accepts from others: addressed to its present id, signed, each request once; and how it answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from duetime.api import peer_server as door_module
from duetime.api.peer_server import PeerServer
from duetime.cluster import peer_protocol
from duetime.cluster.forwarding import CommandAnswer, DeleteCommand, Forward, Peer
from duetime.cluster.peer_protocol import (
    ALLOWANCES_PATH,
    ANSWER_SIGNATURE,
    COMMANDS_PATH,
    FLOWS_PATH,
    FLOWS_PER_REQUEST_MAX,
    FROM,
    SIGNATURE,
    STATUS_PATH,
    TO,
    CommandBatch,
    FlowReportBatch,
    FlowsRequest,
    Reply,
    StatusRequest,
    decode_flow_allowances,
    decode_flows,
    decode_replies,
    encode,
    reply_of,
    sign,
    sign_answer,
)
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowState, FlowStatus
from duetime.domain.timer import TimerKey, Verdict
from duetime.errors import Conflict, DuetimeError, Forbidden, InvalidField, NotOwner, Unauthenticated
from duetime.http.messages import Request, Response
from duetime.service.service import Service

FLOW = FlowStatus(
    namespace="orders",
    flow_key="größe 😀",
    origin="https://shop.example",
    state=FlowState.HALF_OPEN,
    waiting=3,
    in_flight=1,
    until_ms=7,
    last_error="HTTP 500",
    rate=0.5,
    concurrency=2,
)


class Commands:
    """The service. Commands named in `errors` fail at once, those in `pending` are not decided yet."""

    def __init__(self) -> None:
        self.peer = Peer("b", "b:1", "the secret")
        self.forwarded = self.flows = self
        self.got: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.pending: dict[str, asyncio.Future[CommandAnswer]] = {}

    def as_peer(self) -> Peer:
        return self.peer

    def instance_status(self) -> dict[str, str]:
        return {"instance_id": self.peer.instance_id}

    def own(self, query: FlowQuery) -> list[FlowStatus]:
        self.asked = query
        return [FLOW]

    def flow_allowances(self, sender: str, number: int, reports: list[FlowReport]) -> list[FlowAllowance]:
        self.got += [f"{sender} {number} {report.flow_key}" for report in reports]
        return [FlowAllowance(1.0, 1) for _ in reports]

    def receive(self, forward: Forward) -> asyncio.Future[CommandAnswer]:
        return self._answer(forward.command_id, Verdict.CANCELLED)

    def answer_to(self, command_id: str) -> asyncio.Future[CommandAnswer]:
        return self._answer(command_id, Verdict.ALREADY_REACHED)

    def _answer(self, command_id: str, verdict: Verdict) -> asyncio.Future[CommandAnswer]:
        if command_id in self.errors:
            raise self.errors[command_id]
        self.got.append(command_id)
        if command_id in self.pending:
            return self.pending[command_id]
        answer: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        answer.set_result(verdict)
        return answer


@pytest.fixture
def owner() -> Commands:
    return Commands()


@pytest.fixture
def server(owner: Commands) -> PeerServer:
    return PeerServer(cast(Service, owner))


def command(command_id: str) -> Forward:
    return Forward(command_id, 0, 1, DeleteCommand(TimerKey("n", command_id)))


def request(
    number: int, *new: str, sender: str = "a", to: str = "b", secret: str = "the secret", again: tuple[str, ...] = ()
) -> Request:
    body = encode(CommandBatch(to, sender, number, [command(name) for name in new], list(again)))
    headers = {SIGNATURE: sign(secret, body), FROM: sender, TO: to}
    return Request("POST", COMMANDS_PATH, headers={k.encode(): v.encode() for k, v in headers.items()}, body=body)


def signed(body: bytes, secret: str = "the secret") -> Request:
    return Request("POST", COMMANDS_PATH, headers={SIGNATURE.encode(): sign(secret, body).encode()}, body=body)


async def accepts(server: PeerServer, sent: Request) -> bool:
    """False: refused as a replay."""
    try:
        await server.handle(sent)
    except Conflict:
        return False
    return True


def replies(response: Response) -> list[Reply]:
    return decode_replies(response.body).replies


# --- each request once ---------------------------------------------------------------------------


async def test_a_request_is_accepted_once(server: PeerServer, owner: Commands) -> None:
    sent = request(1, "t1")
    assert await accepts(server, sent)
    assert not await accepts(server, sent)
    assert owner.got == ["t1"]


async def test_a_question_about_the_status_is_accepted_once_too(server: PeerServer) -> None:
    body = encode(StatusRequest("b", "a", 1))
    sent = Request("POST", STATUS_PATH, headers={SIGNATURE.encode(): sign("the secret", body).encode()}, body=body)
    assert await accepts(server, sent)
    assert not await accepts(server, sent)
    assert not await accepts(server, request(1)), "commands and status requests are numbered together"


async def test_flows_are_answered_once_and_arrive_with_every_field(server: PeerServer, owner: Commands) -> None:
    query = FlowQuery(namespaces=("orders",), after=("orders", "a"), limit=7, flow_key="größe 😀")
    body = encode(FlowsRequest("b", "a", 1, query))
    sent = Request("POST", FLOWS_PATH, headers={SIGNATURE.encode(): sign("the secret", body).encode()}, body=body)
    assert decode_flows((await server.handle(sent)).body) == [FLOW]
    assert owner.asked == query
    assert not await accepts(server, sent)
    assert not await accepts(server, request(1)), "all requests are numbered together"


async def test_requests_may_overtake_each_other(server: PeerServer) -> None:
    for number in (3, 1, 2, 7, 5):
        assert await accepts(server, request(number))
    for number in (1, 2, 3, 5, 7):
        assert not await accepts(server, request(number))
    assert await accepts(server, request(4))
    assert await accepts(server, request(6))


@pytest.mark.parametrize("number", [0, -1, -(2**63)])
async def test_numbers_start_at_one(server: PeerServer, number: int) -> None:
    assert not await accepts(server, request(number))


async def test_an_instance_that_joins_again_accepts_numbers_from_one_and_refuses_what_was_sent_before(
    server: PeerServer, owner: Commands
) -> None:
    before = [request(number, f"t{number}") for number in range(1, 6)]
    assert all([await accepts(server, sent) for sent in before])
    owner.peer = Peer("b2", "b:1", "another secret")
    after = [request(number, to="b2", secret="another secret") for number in range(1, 6)]
    assert all([await accepts(server, sent) for sent in after])
    assert not any([await accepts(server, sent) for sent in after])
    for sent in before:
        with pytest.raises(Forbidden, match="is for instance b, this is instance b2"):
            await server.handle(sent)
    with pytest.raises(Unauthenticated):
        await server.handle(request(9, to="b2"))
    assert len(owner.got) == 5


async def test_old_requests_stay_refused_after_many_later_ones(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    for number in range(1, 1_000):
        if number != 500:
            assert await accepts(server, request(number))
    assert not any([await accepts(server, request(number)) for number in range(1, 1_000)]), "the missing one too"
    assert await accepts(server, request(1_001))
    assert await accepts(server, request(1_000))


async def test_a_request_may_be_as_late_as_stated_and_no_later(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    assert await accepts(server, request(1_000))
    assert not await accepts(server, request(900))
    assert await accepts(server, request(901))
    assert await accepts(server, request(950))
    assert not await accepts(server, request(950))
    assert await accepts(server, request(1_001))
    assert await accepts(server, request(902))
    assert not await accepts(server, request(901))


async def test_numbers_far_apart_are_kept_in_little_memory(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    for number in (*range(2, 5_000), *range(10_000, 12_000, 2), 2**60, *range(2**60 + 1, 2**60 + 500)):
        assert await accepts(server, request(number))
        assert len(server._numbers._senders["a"]._seen) <= 100
    assert not server._numbers._senders["a"]._seen, "without gaps there is nothing to keep"


# --- many senders --------------------------------------------------------------------------------


async def test_senders_are_distinguished(server: PeerServer) -> None:
    assert await accepts(server, request(1, sender="a"))
    assert await accepts(server, request(1, sender="c"))
    assert not await accepts(server, request(1, sender="a"))


async def test_recorded_requests_stay_refused_after_requests_of_many_other_senders(server: PeerServer) -> None:
    recorded = [request(number, sender="first") for number in (1, 2, 3)]
    assert all([await accepts(server, sent) for sent in recorded])
    for other in range(1_500):
        assert await accepts(server, request(1, sender=f"s{other}"))
    assert not any([await accepts(server, sent) for sent in recorded])
    assert await accepts(server, request(4, sender="first"))
    assert not await accepts(server, request(4, sender="first"))
    assert len(server._numbers._senders) <= 256


async def test_the_sender_without_requests_for_the_longest_time_is_removed(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 2)
    for sender in ("a", "c", "a"):
        assert await accepts(server, request({"c": 5}.get(sender, 5 + len(server._numbers._senders)), sender=sender))
    assert await accepts(server, request(1, sender="d"))  # removes c
    assert await accepts(server, request(3, sender="a")), "a late one"
    assert not await accepts(server, request(3, sender="c")), "a late request of a removed sender is refused"


async def test_a_displaced_sender_starts_anew_too_when_the_receiver_has_joined_again(
    server: PeerServer, owner: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 1)
    for number in range(1, 6):
        assert await accepts(server, request(number, sender="a"))
    assert await accepts(server, request(1, sender="c"))
    owner.peer = Peer("b2", "b:1", "another secret")
    assert await accepts(server, request(1, sender="a", to="b2", secret="another secret"))


async def test_memory_of_displaced_senders_is_bounded(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 2)
    monkeypatch.setattr(door_module, "_SENDERS_RETIRED_MAX", 10)
    for other in range(100):
        assert await accepts(server, request(1, sender=f"s{other}"))
    assert len(server._numbers._retired) == 10
    assert not any([await accepts(server, request(1, sender=f"s{other}")) for other in range(88, 100)])


# --- sender and receiver -------------------------------------------------------------------------


async def test_a_request_for_another_instance_or_without_a_signature_is_refused(
    server: PeerServer, owner: Commands
) -> None:
    with pytest.raises(Forbidden):
        await server.handle(request(1, "t1", to="c"))
    for secret in ("", "the secret of another"):
        with pytest.raises(Unauthenticated):
            await server.handle(request(1, "t1", secret=secret))
    unsigned = Request("POST", COMMANDS_PATH, body=request(1, "t1").body)
    with pytest.raises(Unauthenticated):
        await server.handle(unsigned)
    with pytest.raises(Unauthenticated):
        await server.handle(Request("POST", STATUS_PATH, body=encode(StatusRequest("b", "a", 1))))
    with pytest.raises(InvalidField):
        await server.handle(signed(b"invalid"))
    assert owner.got == []
    assert await accepts(server, request(1, "t1")), "a refused request uses up no number"


async def test_refusals_are_logged_once_a_minute_for_each_kind(
    server: PeerServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.get_running_loop(), 1_000.0
    monkeypatch.setattr(loop, "time", lambda: now)

    async def refused() -> list[str]:
        caplog.clear()
        for _ in range(3):
            for wrong in (request(1, to="c"), request(1, secret="?"), request(0)):
                with pytest.raises(DuetimeError):
                    await server.handle(wrong)
        return [record.getMessage() for record in caplog.records]

    lines = [
        "refused a request from instance 'a' to instance 'c': the request is for instance c, this is instance b",
        "refused a request from instance 'a' to instance 'b': the request is not signed with this instance's secret",
        "refused a request from instance 'a' to instance 'b': replayed request number",
    ]
    assert await refused() == lines
    now += 59.0
    assert await refused() == []
    now += 1.0
    assert await refused() == lines


async def test_a_refusal_cannot_fill_the_log_or_forge_lines(
    server: PeerServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Forbidden):
        await server.handle(request(1, sender="x\n" * 5_000, to="y" * 5_000))
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


# --- the answers ---------------------------------------------------------------------------------


async def test_replies_are_in_the_command_of_the_new_commands_and_then_of_those_asked_for_again(
    server: PeerServer, owner: Commands
) -> None:
    owner.pending = {"t2": asyncio.get_running_loop().create_future()}
    answered = replies(await server.handle(request(1, "t1", "t2", "t3", again=("t4", "t2"))))
    done, reached = reply_of(Verdict.CANCELLED), reply_of(Verdict.ALREADY_REACHED)
    assert answered == [done, Reply(), done, reached, Reply()]
    assert not owner.pending["t2"].cancelled(), "another caller may wait for it too"


async def test_a_command_that_is_decided_soon_is_answered_in_the_same_request(
    server: PeerServer, owner: Commands
) -> None:
    loop = asyncio.get_running_loop()
    owner.pending = {"t1": loop.create_future(), "t2": loop.create_future()}
    server.answer_within_s = 60
    handling = asyncio.ensure_future(server.handle(request(1, "t1", "t2")))
    await asyncio.sleep(0)
    owner.pending["t1"].set_result(Verdict.CANCELLED)
    await asyncio.sleep(0)
    assert not handling.done()
    owner.pending["t2"].set_exception(NotOwner("moved"))
    assert replies(await handling) == [reply_of(Verdict.CANCELLED), reply_of(NotOwner("moved"))]


async def test_a_command_that_fails_at_once_does_not_fail_the_others(
    server: PeerServer, owner: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    """The other commands of its request were started: the request must neither look refused nor unknown."""
    owner.errors = {"t2": NotOwner("moved"), "t3": ZeroDivisionError("a bug"), "t5": NotOwner("moved")}
    first, second, third, fourth, fifth = replies(await server.handle(request(1, "t1", "t2", "t3", again=("t4", "t5"))))
    assert first == reply_of(Verdict.CANCELLED)
    assert second.error == fifth.error == "NotOwner"
    assert third.error == "OutcomeUnknown"
    assert fourth == reply_of(Verdict.ALREADY_REACHED)
    assert "unexpected error" in caplog.text


async def test_a_command_that_was_cancelled_is_unknown(server: PeerServer, owner: Commands) -> None:
    cancelled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    owner.pending = {"t1": cancelled}
    [reply] = replies(await server.handle(request(1, "t1")))
    assert reply.error == "OutcomeUnknown"


# --- before anything is decoded ------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMMANDS_PATH, STATUS_PATH, FLOWS_PATH])
@pytest.mark.parametrize(
    "body", [b"", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\x81\xa2to\xa1\xff", b"x" * 3_000_000]
)
async def test_nothing_of_a_stranger_is_decoded(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    def decode(body: bytes) -> Any:
        pytest.fail("decoded before the signature was verified")

    monkeypatch.setattr(door_module, "decode_commands", decode)
    monkeypatch.setattr(door_module, "decode_status_request", decode)
    monkeypatch.setattr(door_module, "decode_flows_request", decode)
    for signature in (b"", b"0" * 64, b"\xff" * 64, sign("", body).encode()):
        with pytest.raises(Unauthenticated):
            await server.handle(Request("POST", path, headers={SIGNATURE.encode(): signature}, body=body))


async def test_what_cannot_be_decoded_is_refused_without_a_traceback(server: PeerServer) -> None:
    for body in (b"", b"\x91" * 100_000, b"\x81\xa2to\xa1\xff", encode({"to": "b"})):
        with pytest.raises(InvalidField):
            await server.handle(signed(body))


async def test_other_tasks_run_while_a_large_body_is_hashed(server: PeerServer) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    with pytest.raises(Unauthenticated):
        await server.handle(signed(b"x" * 4_000_000, secret="of a stranger"))
    task.cancel()
    assert turns >= 4_000_000 // peer_protocol._SLICE


async def test_an_answer_is_signed_for_its_request(server: PeerServer) -> None:
    sent = request(1, "t1")
    response = await server.handle(sent)
    signature = dict(response.headers)[ANSWER_SIGNATURE]
    assert signature == sign_answer("the secret", sent.header(SIGNATURE.encode()) or "", response.body)
    assert signature != sign_answer("the secret", sign("the secret", b"another request"), response.body)


# --- reports of flows ----------------------------------------------------------------------------


def flows(number: int, count: int = 1, secret: str = "the secret") -> Request:
    body = encode(FlowReportBatch("b", "a", number, [FlowReport("n", f"k{n}", waiting=1) for n in range(count)]))
    return Request("POST", ALLOWANCES_PATH, headers={SIGNATURE.encode(): sign(secret, body).encode()}, body=body)


async def test_reports_of_flows_are_answered_and_the_answer_is_signed(server: PeerServer, owner: Commands) -> None:
    sent = flows(7, 2)
    response = await server.handle(sent)
    assert decode_flow_allowances(response.body).flows == [FlowAllowance(1.0, 1)] * 2
    assert owner.got == ["a 7 k0", "a 7 k1"]
    signature = (sent.header(SIGNATURE.encode())) or ""
    assert dict(response.headers)[ANSWER_SIGNATURE] == sign_answer("the secret", signature, response.body)


async def test_reports_of_flows_are_accepted_once(server: PeerServer, owner: Commands) -> None:
    sent = flows(1)
    assert await accepts(server, sent)
    assert not await accepts(server, sent)
    assert not await accepts(server, request(1)), "they are numbered together with commands"
    assert len(owner.got) == 1


async def test_a_request_reports_a_limited_number_of_flows(server: PeerServer, owner: Commands) -> None:
    await server.handle(flows(1, FLOWS_PER_REQUEST_MAX))
    with pytest.raises(InvalidField):
        await server.handle(flows(2, FLOWS_PER_REQUEST_MAX + 1))
    assert len(owner.got) == FLOWS_PER_REQUEST_MAX


async def test_reports_of_flows_that_are_not_signed_are_refused(server: PeerServer, owner: Commands) -> None:
    with pytest.raises(Unauthenticated):
        await server.handle(flows(1, secret="another secret"))
    assert owner.got == []
