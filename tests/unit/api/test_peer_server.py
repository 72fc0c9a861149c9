"""What an instance accepts from others: addressed to its present id, signed, each request once; and how it answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from duetime.api import peer_server as door_module
from duetime.api.peer_server import PeerServer
from duetime.cluster.forwarding import CommandAnswer, DeleteCommand, Forward, Peer
from duetime.cluster.peer_protocol import (
    COMMANDS_PATH,
    SIGNATURE,
    STATUS_PATH,
    CommandBatch,
    Reply,
    StatusRequest,
    decode_replies,
    encode,
    reply_of,
    sign,
)
from duetime.domain.timer import TimerKey, Verdict
from duetime.errors import Conflict, DuetimeError, Forbidden, InvalidField, NotOwner, Unauthenticated
from duetime.http.server import Request, Response
from duetime.service.service import Service


class Commands:
    """The service behind the door. Orders named in `errors` fail at once, those in `pending` are not decided yet."""

    def __init__(self) -> None:
        self.peer = Peer("b", "b:1", "the secret")
        self.forwarded = self
        self.got: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.pending: dict[str, asyncio.Future[CommandAnswer]] = {}

    def as_peer(self) -> Peer:
        return self.peer

    def instance_status(self) -> dict[str, str]:
        return {"instance_id": self.peer.instance_id}

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
def door(owner: Commands) -> PeerServer:
    return PeerServer(cast(Service, owner))


def command(command_id: str) -> Forward:
    return Forward(command_id, 0, 1, DeleteCommand(TimerKey("n", command_id)))


def request(
    number: int, *new: str, sender: str = "a", to: str = "b", secret: str = "the secret", again: tuple[str, ...] = ()
) -> Request:
    body = encode(CommandBatch(to, sender, number, [command(name) for name in new], list(again)))
    return Request("POST", COMMANDS_PATH, headers={SIGNATURE.encode(): sign(secret, body).encode()}, body=body)


async def accepts(door: PeerServer, sent: Request) -> bool:
    """False: refused as a replay."""
    try:
        await door.handle(sent)
    except Conflict:
        return False
    return True


def replies(response: Response) -> list[Reply]:
    return decode_replies(response.body).replies


# --- each request once ---------------------------------------------------------------------------


async def test_a_request_is_accepted_once(door: PeerServer, owner: Commands) -> None:
    sent = request(1, "t1")
    assert await accepts(door, sent)
    assert not await accepts(door, sent)
    assert owner.got == ["t1"]


async def test_a_question_about_the_status_is_accepted_once_too(door: PeerServer) -> None:
    body = encode(StatusRequest("b", "a", 1))
    sent = Request("POST", STATUS_PATH, headers={SIGNATURE.encode(): sign("the secret", body).encode()}, body=body)
    assert await accepts(door, sent)
    assert not await accepts(door, sent)
    assert not await accepts(door, request(1)), "orders and questions are numbered together"


async def test_requests_may_overtake_each_other(door: PeerServer) -> None:
    for number in (3, 1, 2, 7, 5):
        assert await accepts(door, request(number))
    for number in (1, 2, 3, 5, 7):
        assert not await accepts(door, request(number))
    assert await accepts(door, request(4))
    assert await accepts(door, request(6))


@pytest.mark.parametrize("number", [0, -1, -(2**63)])
async def test_numbers_start_at_one(door: PeerServer, number: int) -> None:
    assert not await accepts(door, request(number))


async def test_an_instance_that_joins_again_accepts_numbers_from_one_and_refuses_what_was_sent_before(
    door: PeerServer, owner: Commands
) -> None:
    before = [request(number, f"t{number}") for number in range(1, 6)]
    assert all([await accepts(door, sent) for sent in before])
    owner.peer = Peer("b2", "b:1", "another secret")
    after = [request(number, to="b2", secret="another secret") for number in range(1, 6)]
    assert all([await accepts(door, sent) for sent in after])
    assert not any([await accepts(door, sent) for sent in after])
    for sent in before:
        with pytest.raises(Forbidden, match="is for instance b, this is instance b2"):
            await door.handle(sent)
    with pytest.raises(Unauthenticated):
        await door.handle(request(9, to="b2"))
    assert len(owner.got) == 5


async def test_old_requests_stay_refused_when_many_have_come_since(
    door: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    for number in range(1, 1_000):
        if number != 500:
            assert await accepts(door, request(number))
    assert not any([await accepts(door, request(number)) for number in range(1, 1_000)]), "the missing one too"
    assert await accepts(door, request(1_001))
    assert await accepts(door, request(1_000))


async def test_a_request_may_be_as_late_as_stated_and_no_later(
    door: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    assert await accepts(door, request(1_000))
    assert not await accepts(door, request(900))
    assert await accepts(door, request(901))
    assert await accepts(door, request(950))
    assert not await accepts(door, request(950))
    assert await accepts(door, request(1_001))
    assert await accepts(door, request(902))
    assert not await accepts(door, request(901))


async def test_numbers_far_apart_are_kept_in_little_memory(door: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_NUMBERS_KEPT", 100)
    for number in (*range(2, 5_000), *range(10_000, 12_000, 2), 2**60, *range(2**60 + 1, 2**60 + 500)):
        assert await accepts(door, request(number))
        assert len(door._numbers._senders["a"]._seen) <= 100
    assert not door._numbers._senders["a"]._seen, "without gaps there is nothing to keep"


# --- many senders --------------------------------------------------------------------------------


async def test_senders_are_told_apart(door: PeerServer) -> None:
    assert await accepts(door, request(1, sender="a"))
    assert await accepts(door, request(1, sender="c"))
    assert not await accepts(door, request(1, sender="a"))


async def test_what_was_overheard_stays_refused_when_many_other_senders_have_come(door: PeerServer) -> None:
    overheard = [request(number, sender="first") for number in (1, 2, 3)]
    assert all([await accepts(door, sent) for sent in overheard])
    for other in range(1_500):
        assert await accepts(door, request(1, sender=f"s{other}"))
    assert not any([await accepts(door, sent) for sent in overheard])
    assert await accepts(door, request(4, sender="first"))
    assert not await accepts(door, request(4, sender="first"))
    assert len(door._numbers._senders) <= 256


async def test_the_sender_that_is_displaced_is_the_one_not_heard_from_for_longest(
    door: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 2)
    for sender in ("a", "c", "a"):
        assert await accepts(door, request({"c": 5}.get(sender, 5 + len(door._numbers._senders)), sender=sender))
    assert await accepts(door, request(1, sender="d"))  # displaces c
    assert await accepts(door, request(3, sender="a")), "a late one"
    assert not await accepts(door, request(3, sender="c")), "whoever was displaced may not be late"


async def test_a_displaced_sender_starts_anew_too_when_the_receiver_has_joined_again(
    door: PeerServer, owner: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 1)
    for number in range(1, 6):
        assert await accepts(door, request(number, sender="a"))
    assert await accepts(door, request(1, sender="c"))
    owner.peer = Peer("b2", "b:1", "another secret")
    assert await accepts(door, request(1, sender="a", to="b2", secret="another secret"))


async def test_memory_of_displaced_senders_is_bounded(door: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_SENDERS_MAX", 2)
    monkeypatch.setattr(door_module, "_SENDERS_RETIRED_MAX", 10)
    for other in range(100):
        assert await accepts(door, request(1, sender=f"s{other}"))
    assert len(door._numbers._retired) == 10
    assert not any([await accepts(door, request(1, sender=f"s{other}")) for other in range(88, 100)])


# --- who is asked, and by whom -------------------------------------------------------------------


async def test_nothing_is_looked_at_that_is_for_another_or_not_signed(door: PeerServer, owner: Commands) -> None:
    with pytest.raises(Forbidden):
        await door.handle(request(1, "t1", to="c"))
    for secret in ("", "the secret of another"):
        with pytest.raises(Unauthenticated):
            await door.handle(request(1, "t1", secret=secret))
    unsigned = Request("POST", COMMANDS_PATH, body=request(1, "t1").body)
    with pytest.raises(Unauthenticated):
        await door.handle(unsigned)
    with pytest.raises(Unauthenticated):
        await door.handle(Request("POST", STATUS_PATH, body=encode(StatusRequest("b", "a", 1))))
    with pytest.raises(InvalidField):
        await door.handle(Request("POST", COMMANDS_PATH, body=b"rubbish"))
    assert owner.got == []
    assert await accepts(door, request(1, "t1")), "a refused request uses up no number"


async def test_refusals_are_logged_once_a_minute_for_each_kind(
    door: PeerServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.get_running_loop(), 1_000.0
    monkeypatch.setattr(loop, "time", lambda: now)

    async def refused() -> list[str]:
        caplog.clear()
        for _ in range(3):
            for wrong in (request(1, to="c"), request(1, secret="?"), request(0)):
                with pytest.raises(DuetimeError):
                    await door.handle(wrong)
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


async def test_a_refusal_cannot_fill_the_log_or_forge_lines(door: PeerServer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Forbidden):
        await door.handle(request(1, sender="x\n" * 5_000, to="y" * 5_000))
    [record] = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


# --- the answers ---------------------------------------------------------------------------------


async def test_replies_are_in_the_order_of_the_new_orders_and_then_of_those_asked_for_again(
    door: PeerServer, owner: Commands
) -> None:
    owner.pending = {"t2": asyncio.get_running_loop().create_future()}
    answered = replies(await door.handle(request(1, "t1", "t2", "t3", again=("t4", "t2"))))
    done, reached = reply_of(Verdict.CANCELLED), reply_of(Verdict.ALREADY_REACHED)
    assert answered == [done, Reply(), done, reached, Reply()]
    assert not owner.pending["t2"].cancelled(), "somebody else may wait for it too"


async def test_an_order_that_is_decided_soon_is_answered_in_the_same_request(door: PeerServer, owner: Commands) -> None:
    loop = asyncio.get_running_loop()
    owner.pending = {"t1": loop.create_future(), "t2": loop.create_future()}
    door.answer_within_s = 60
    handling = asyncio.ensure_future(door.handle(request(1, "t1", "t2")))
    await asyncio.sleep(0)
    owner.pending["t1"].set_result(Verdict.CANCELLED)
    await asyncio.sleep(0)
    assert not handling.done()
    owner.pending["t2"].set_exception(NotOwner("moved"))
    assert replies(await handling) == [reply_of(Verdict.CANCELLED), reply_of(NotOwner("moved"))]


async def test_an_order_that_fails_at_once_fails_alone(
    door: PeerServer, owner: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    """The others of its request were taken: it must neither look refused as a whole, nor unknown as a whole."""
    owner.errors = {"t2": NotOwner("moved"), "t3": ZeroDivisionError("a bug"), "t5": NotOwner("moved")}
    first, second, third, fourth, fifth = replies(await door.handle(request(1, "t1", "t2", "t3", again=("t4", "t5"))))
    assert first == reply_of(Verdict.CANCELLED)
    assert second.error == fifth.error == "NotOwner"
    assert third.error == "OutcomeUnknown"
    assert fourth == reply_of(Verdict.ALREADY_REACHED)
    assert "unexpected error" in caplog.text


async def test_an_order_that_was_cancelled_is_unknown(door: PeerServer, owner: Commands) -> None:
    cancelled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    owner.pending = {"t1": cancelled}
    [reply] = replies(await door.handle(request(1, "t1")))
    assert reply.error == "OutcomeUnknown"
