"""Commands to one peer, in virtual time over a scripted transport: what is sent when, and what each one gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from duetime.cluster import peer_client
from duetime.cluster.forwarding import CommandAnswer, CreateCommand, DeleteCommand, Forward, Peer, UpdateCommand
from duetime.cluster.peer_client import PeerClient
from duetime.cluster.peer_protocol import (
    ALLOWANCES_PATH,
    ANSWER_SIGNATURE,
    REFUSED,
    SIGNATURE,
    CommandBatch,
    FlowAllowanceBatch,
    FlowReportBatch,
    Reply,
    ReplyBatch,
    decode_commands,
    decode_flow_reports,
    encode,
    new_secret,
    reply_of,
    sign,
    sign_answer,
)
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery
from duetime.domain.timer import TimerKey, TimerPatch, TimerSpec, Verdict
from duetime.errors import Busy, InvalidField, NotFound, NotOwner, OutcomeUnknown, SetupError, Unserved
from duetime.http.client import Answer, HttpError, Target
from duetime.testing.virtual import VirtualClock, run_virtual

PEER = Peer("b", "b:1", "the secret")
DONE = reply_of(Verdict.CANCELLED)
UNDECIDED = Reply()

Script = Callable[[CommandBatch], Awaitable[Answer | None]]


class Wire:
    """Instead of an HTTP client: what is sent is kept, and answered by the script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[CommandBatch] = []
        self.targets: list[Target] = []
        self.timeouts_ms: list[int] = []
        self.under_way = 0
        self.most_under_way = 0

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
        data = begin()
        assert data is not None
        assert begin() is None, "a request is sent once, on whatever connection"
        head, _, body = data.partition(b"\r\n\r\n")
        assert f"{SIGNATURE}: {sign('the secret', body)}".encode() in head
        self.targets.append(target)
        self.timeouts_ms.append(timeout_ms)
        commands = decode_commands(body)
        self.requests.append(commands)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self.script(commands)
        finally:
            self.under_way -= 1

    async def close(self) -> None: ...


def answers(*replies: Reply) -> Answer:
    return Answer(200, {}, encode(ReplyBatch(list(replies))))


def delete(name: str) -> Forward:
    return Forward(name, 0, 1, DeleteCommand(TimerKey("n", name)))


def create(name: str, payload: str) -> Forward:
    return Forward(name, 0, 1, CreateCommand(TimerSpec(namespace="n", timer_id=name, delay_ms=1, payload=payload)))


def ids(requests: list[CommandBatch]) -> list[tuple[list[str], list[str]]]:
    return [([forward.command_id for forward in commands.new], commands.again) for commands in requests]


def run(script: Script, scenario: Callable[[PeerClient, Wire], Awaitable[None]]) -> None:
    async def run(_: VirtualClock) -> None:
        wire = Wire(script)
        await scenario(PeerClient(lambda: "a", wire), wire)

    run_virtual(run)


def asked(peers: PeerClient, forward: Forward, peer: Peer = PEER) -> asyncio.Task[CommandAnswer]:
    return asyncio.ensure_future(peers.forward(peer, forward))


async def outcome(task: asyncio.Task[CommandAnswer]) -> object:
    try:
        return await task
    except Exception as error:
        return type(error)


async def done(commands: CommandBatch) -> Answer:
    return answers(*[DONE] * (len(commands.new) + len(commands.again)))


# --- what a request says -------------------------------------------------------------------------


def test_a_request_names_receiver_and_sender_and_is_numbered_for_each_receiver() -> None:
    async def scenario(peers: PeerClient, wire: Wire) -> None:
        for name in ("t1", "t2"):
            await peers.forward(PEER, delete(name))
        await peers.forward(Peer("c", "c:1", "the secret"), delete("t3"))
        assert [(o.to, o.sender, o.number) for o in wire.requests] == [("b", "a", 1), ("b", "a", 2), ("c", "a", 1)]
        assert [target.host for target in wire.targets] == ["b", "b", "c"]
        assert wire.timeouts_ms == [5_000] * 3

    run(done, scenario)


def test_a_peer_that_is_asked_now_and_then_is_never_given_a_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others there were in between, whose numbers are forgotten at last."""
    monkeypatch.setattr(peer_client, "_NUMBERED_MAX", 10)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        for number in range(100):
            await peers.forward(Peer(f"p{number}", "p:1", "the secret"), delete("t"))
            if number % 5 == 0:
                await peers.forward(PEER, delete("t"))
            assert len(peers._numbers) <= 10
        assert [commands.number for commands in wire.requests if commands.to == "b"] == list(range(1, 21))

    run(done, scenario)


def test_each_command_gets_the_reply_at_its_index() -> None:
    async def script(commands: CommandBatch) -> Answer:
        return answers(*(Reply(error="InvalidField", detail=forward.command_id) for forward in commands.new))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        for name, task in [(f"t{n}", asked(peers, delete(f"t{n}"))) for n in range(10)]:
            with pytest.raises(InvalidField, match=f"^{name}$"):
                await task
        assert len(wire.requests) == 1

    run(script, scenario)


def test_new_commands_come_first_in_a_request_even_if_those_asked_for_again_waited_longer() -> None:
    async def script(commands: CommandBatch) -> Answer:
        if commands.new[0].command_id == "old":
            await asyncio.sleep(0.01)
            return answers(UNDECIDED)
        replies = [Reply(error="InvalidField", detail=f"new {forward.command_id}") for forward in commands.new]
        return answers(*replies, *(Reply(error="InvalidField", detail=f"again {name}") for name in commands.again))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        old = asked(peers, delete("old"))
        while not wire.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the answer comes in this moment, and "old" waits to be asked for again
        young = asked(peers, delete("young"))
        with pytest.raises(InvalidField, match=r"^new young$"):
            await young
        with pytest.raises(InvalidField, match=r"^again old$"):
            await old
        assert ids(wire.requests) == [(["old"], []), (["young"], ["old"])]

    run(script, scenario)


def test_a_mixed_request_is_read_in_the_order_it_was_written() -> None:
    calls = 0

    async def script(commands: CommandBatch) -> Answer:
        nonlocal calls
        calls += 1
        if calls <= 4:  # all four requests that may be under way, so that what comes now waits
            await asyncio.sleep(1)
            return answers(*[UNDECIDED] * len(commands.new))
        replies = [Reply(error="InvalidField", detail=f"new {forward.command_id}") for forward in commands.new]
        return answers(*replies, *(Reply(error="InvalidField", detail=f"again {name}") for name in commands.again))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        first = []
        for number in range(4):
            first.append(asked(peers, delete(f"old{number}")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        late = [asked(peers, delete(f"young{number}")) for number in range(3)]
        for number, task in enumerate(late):
            with pytest.raises(InvalidField, match=f"^new young{number}$"):
                await task
        for number, task in enumerate(first):
            with pytest.raises(InvalidField, match=f"^again old{number}$"):
                await task
        assert any(commands.new and commands.again for commands in wire.requests)

    run(script, scenario)


# --- limits --------------------------------------------------------------------------------------


def test_at_most_four_requests_run_at_a_time_and_each_has_at_most_256_commands() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(0.1)
        return await done(commands)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        await asyncio.gather(*(peers.forward(PEER, delete(f"t{number}")) for number in range(3_000)))
        assert wire.most_under_way == 4
        assert max(len(commands.new) for commands in wire.requests) == 256
        assert sum(len(commands.new) for commands in wire.requests) == 3_000

    run(script, scenario)


def test_large_payloads_are_spread_over_requests() -> None:
    payload = "x" * (512 * 1024)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        large = [create(f"t{number}", payload) for number in range(8)]
        patch = [Forward("p", 0, 1, UpdateCommand(TimerKey("n", "p"), TimerPatch(payload=payload)))]
        await asyncio.gather(*(peers.forward(PEER, forward) for forward in large + patch))
        assert [len(commands.new) for commands in wire.requests] == [4, 4, 1]

    run(done, scenario)


def test_payloads_that_were_sent_do_not_count_when_their_commands_are_asked_for_again() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(0.01)
        return answers(*[UNDECIDED] * len(commands.new), *[DONE] * len(commands.again))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        payload = "x" * (512 * 1024)
        await asyncio.gather(*(peers.forward(PEER, create(f"t{number}", payload)) for number in range(16)))
        assert max(len(commands.again) for commands in wire.requests) > 4

    run(script, scenario)


def test_more_than_twenty_thousand_waiting_commands_are_busy() -> None:
    async def scenario(peers: PeerClient, wire: Wire) -> None:
        tasks = [asked(peers, delete(f"t{number}")) for number in range(20_001)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results[-1:]] == [Busy]
        assert all(result is Verdict.CANCELLED for result in results[:-1])

    run(done, scenario)


# --- when it takes long --------------------------------------------------------------------------


def test_a_command_that_was_not_sent_within_two_seconds_is_returned_unsent() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(2.5)
        return await done(commands)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        sent = []
        for number in range(4):
            sent.append(asked(peers, delete(f"t{number}")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        waits = asked(peers, delete("old"))
        await asyncio.sleep(1)
        young = asked(peers, delete("young"))
        with pytest.raises(NotOwner, match="could not be sent to the owner in time"):
            await waits
        assert await young is Verdict.CANCELLED
        assert [await task for task in sent] == [Verdict.CANCELLED] * 4
        assert [new for new, _ in ids(wire.requests)] == [["t0"], ["t1"], ["t2"], ["t3"], ["young"]]

    run(script, scenario)


def test_nothing_is_sent_if_all_commands_were_returned() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(2.5)
        return await done(commands)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        for number in range(4):
            asked(peers, delete(f"t{number}"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(NotOwner):
            await peers.forward(PEER, delete("old"))
        await asyncio.sleep(10)
        assert len(wire.requests) == 4
        assert await peers.forward(PEER, delete("later")) is Verdict.CANCELLED

    run(script, scenario)


def test_a_command_that_was_received_is_asked_for_until_it_is_decided_however_old_it_is() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(0.5)
        decided = asyncio.get_running_loop().time() > 12
        return answers(*[DONE if decided else UNDECIDED] * (len(commands.new) + len(commands.again)))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        assert await peers.forward(PEER, delete("t1")) is Verdict.CANCELLED
        assert ids(wire.requests)[0] == (["t1"], [])
        assert set(map(str, ids(wire.requests)[1:])) == {"([], ['t1'])"}

    run(script, scenario)


def test_a_command_that_is_not_decided_within_fifteen_seconds_is_unknown() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(0.5)
        return answers(*[UNDECIDED] * (len(commands.new) + len(commands.again)))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(OutcomeUnknown, match="did not decide in time"):
            await peers.forward(PEER, delete("t1"))
        assert 15 <= asyncio.get_running_loop().time() - began < 17

    run(script, scenario)


# --- when a request fails ------------------------------------------------------------------------


async def _refused_by_the_door(_: CommandBatch) -> Answer:
    return Answer(403, {REFUSED.encode(): b"not carried out"}, b"this is another")


async def _replayed(_: CommandBatch) -> Answer:
    return Answer(409, {REFUSED.encode(): b"not carried out"}, b"replayed request number")


async def _by_a_proxy(_: CommandBatch) -> Answer:
    return Answer(403, {}, b"not allowed")


async def _not_sent(_: CommandBatch) -> Answer:
    raise HttpError("connection refused", sent=False)


async def _sent(_: CommandBatch) -> Answer:
    raise HttpError("connection closed before the answer", sent=True)


async def _broken(_: CommandBatch) -> None:
    return None


async def _a_bug(_: CommandBatch) -> Answer:
    raise ZeroDivisionError


async def _unreadable(_: CommandBatch) -> Answer:
    return Answer(200, {}, b"\xc1")


FAILURES: list[tuple[Any, type[Exception]]] = [
    (_refused_by_the_door, NotOwner),
    (_not_sent, NotOwner),
    (_replayed, OutcomeUnknown),
    (_by_a_proxy, OutcomeUnknown),
    (_sent, OutcomeUnknown),
    (_broken, OutcomeUnknown),
    (_a_bug, OutcomeUnknown),
    (_unreadable, OutcomeUnknown),
]


@pytest.mark.parametrize(("failure", "kind"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_errors_of_failed_requests(failure: Any, kind: type[Exception]) -> None:
    """A new command is unknown unless it certainly did not arrive; one that was received before is unknown."""

    async def script(commands: CommandBatch) -> Answer | None:
        await asyncio.sleep(0.01)
        if len(wires[0].requests) == 1:
            return answers(*[UNDECIDED] * len(commands.new))
        return await failure(commands)  # type: ignore[no-any-return]

    wires: list[Wire] = []

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        wires.append(wire)
        taken = asked(peers, delete("taken"))
        await asyncio.sleep(0.0099)
        assert len(wire.requests) == 1
        assert await outcome(taken) is OutcomeUnknown
        assert ids(wire.requests) == [(["taken"], []), ([], ["taken"])]
        assert await outcome(asked(peers, delete("new"))) is kind
        assert len(wire.requests) == 3, "never repeated"

    run(script, scenario)


def test_after_a_failed_request_unsent_commands_are_returned_and_received_ones_are_not() -> None:
    calls = 0

    async def script(commands: CommandBatch) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 1:  # taken, and asked for again when the others have failed
            await asyncio.sleep(0.5)
            return answers(UNDECIDED)
        if calls <= 4:
            await asyncio.sleep(0.5)
            raise HttpError("no answer", sent=True)
        return await done(commands)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        tasks = []
        for name in ("taken", "t1", "t2", "t3"):
            tasks.append(asked(peers, delete(name)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        unsent = [asked(peers, delete(f"unsent{number}")) for number in range(3)]
        await asyncio.sleep(0.4)
        assert len(wire.requests) == 4
        assert [await outcome(task) for task in tasks] == [Verdict.CANCELLED] + [OutcomeUnknown] * 3
        for task in unsent:
            # Those that left with the request after the first failure are answered; none is unknown.
            assert await outcome(task) in (NotOwner, Verdict.CANCELLED)
        assert ["taken"] in [again for _, again in ids(wire.requests)]

    run(script, scenario)


def test_a_failed_request_tells_those_that_wait_that_they_were_not_sent() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(1 if commands.new[0].command_id == "t0" else 1.5)
        raise HttpError("no answer", sent=True)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        sent = []
        for number in range(4):
            sent.append(asked(peers, delete(f"t{number}")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        unsent = [asked(peers, delete(f"unsent{number}")) for number in range(3)]
        began = asyncio.get_running_loop().time()
        assert [await outcome(task) for task in unsent] == [NotOwner] * 3
        assert asyncio.get_running_loop().time() - began == pytest.approx(1, abs=0.1)
        assert [await outcome(task) for task in sent] == [OutcomeUnknown] * 4
        assert len(wire.requests) == 4

    run(script, scenario)


def test_a_caller_that_stops_waiting_does_not_affect_the_answers_of_others() -> None:
    async def script(commands: CommandBatch) -> Answer:
        await asyncio.sleep(0.1)
        if commands.new:
            return answers(DONE, DONE, UNDECIDED)
        return answers(*[DONE] * len(commands.again))

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        first, second, third = (asked(peers, delete(name)) for name in ("t1", "t2", "t3"))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second is Verdict.CANCELLED
        assert await third is Verdict.CANCELLED

    run(script, scenario)


def test_lines_of_many_peers_are_let_go_but_not_those_in_use() -> None:
    release = asyncio.Event()

    async def script(commands: CommandBatch) -> Answer:
        if commands.to.startswith("slow"):
            await release.wait()
        return await done(commands)

    async def scenario(peers: PeerClient, wire: Wire) -> None:
        slow = [asked(peers, delete("t"), Peer(f"slow{number}", "b:1", "the secret")) for number in range(3)]
        await asyncio.sleep(0.1)
        for number in range(300):
            await peers.forward(Peer(f"p{number}", "b:1", "the secret"), delete("t"))
        assert len(peers._queues) <= 64
        assert {f"slow{number}" for number in range(3)} <= set(peers._queues)
        release.set()
        assert [await task for task in slow] == [Verdict.CANCELLED] * 3

    run(script, scenario)


# --- the status ----------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [failure for failure, _ in FAILURES if failure not in (_a_bug, _unreadable)])
@pytest.mark.parametrize("asked", ["status", "flows"])
def test_a_read_that_is_not_answered_is_unserved_with_the_reason(failure: Any, asked: str) -> None:
    async def scenario(_: VirtualClock) -> None:
        wire = Wire(failure)
        peers = PeerClient(lambda: "a", wire)

        async def send(target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
            assert (target.path, timeout_ms) == (f"/peer/v1/{asked}", 1_000)
            assert begin() is not None
            return await failure(CommandBatch("", "", 0, []))  # type: ignore[no-any-return]

        wire.send = send  # type: ignore[method-assign]
        with pytest.raises(Unserved, match=r"refused|another|replayed|allowed|closed|broke"):
            await (peers.status(PEER) if asked == "status" else peers.flows(PEER, FlowQuery(namespaces=None, limit=1)))

    run_virtual(scenario)


# --- signed answers ------------------------------------------------------------------------------

SIGNING = Peer("b", "b:1", new_secret(17, tls=False))


class SignedWire(Wire):
    """The other instance signs its answers; `forge` may change one on its way."""

    def __init__(self, forge: Callable[[Answer], Answer]) -> None:
        super().__init__(done)
        self.forge = forge

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
        self.targets.append(target)
        data = begin()
        assert data is not None
        body = data.partition(b"\r\n\r\n")[2]
        batch = decode_commands(body) if b"new" in body else CommandBatch("b", "a", 1, [])
        answer = await done(batch)
        signature = sign_answer(SIGNING.secret, sign(SIGNING.secret, body), answer.body)
        return self.forge(Answer(200, {ANSWER_SIGNATURE.encode(): signature.encode()}, answer.body))


FORGERIES: dict[str, Callable[[Answer], Answer]] = {
    "unsigned": lambda answer: Answer(200, {}, answer.body),
    "of another request": lambda answer: Answer(
        200,
        {
            ANSWER_SIGNATURE.encode(): sign_answer(
                SIGNING.secret, sign(SIGNING.secret, b"another"), answer.body
            ).encode()
        },
        answer.body,
    ),
    "changed": lambda answer: Answer(200, answer.raw_headers, encode(ReplyBatch([reply_of(Verdict.ALREADY_REACHED)]))),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_after_an_answer_that_the_instance_did_not_sign_the_outcome_is_unknown(forgery: str) -> None:
    async def scenario(_: VirtualClock) -> None:
        peers = PeerClient(lambda: "a", SignedWire(FORGERIES[forgery]))
        assert await outcome(asked(peers, delete("t1"), SIGNING)) is OutcomeUnknown
        with pytest.raises(Unserved, match="not signed with the secret of instance b"):
            await peers.status(SIGNING)

    run_virtual(scenario)


def test_a_signed_answer_is_taken_and_an_older_instance_need_not_sign() -> None:
    async def scenario(_: VirtualClock) -> None:
        peers = PeerClient(lambda: "a", SignedWire(lambda answer: answer))
        assert await outcome(asked(peers, delete("t1"), SIGNING)) is Verdict.CANCELLED
        older = PeerClient(lambda: "a", Wire(done))
        assert await outcome(asked(older, delete("t1"), PEER)) is Verdict.CANCELLED

    run_virtual(scenario)


def test_an_instance_with_a_certificate_is_reached_with_https() -> None:
    async def scenario(_: VirtualClock) -> None:
        for tls in (True, False):
            wire = SignedWire(lambda answer: answer)
            peer = Peer("b", "b:1", new_secret(17, tls=tls))
            await outcome(asked(PeerClient(lambda: "a", wire), delete("t1"), peer))
            assert wire.targets[0].tls is tls

    run_virtual(scenario)


def test_a_file_of_authorities_that_cannot_be_used_is_named() -> None:
    with pytest.raises(SetupError, match=r"cluster\.ca_file: /no/such/file: No such file"):
        PeerClient(lambda: "a", ca_file="/no/such/file")


# --- allowances of flows -------------------------------------------------------------------------


class FlowWire:
    """Answers reports of flows with what the test says."""

    def __init__(self, answer: Callable[[FlowReportBatch], Answer | None]) -> None:
        self.answer = answer
        self.paths: list[str] = []

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
        data = begin()
        assert data is not None
        assert timeout_ms == 1_000
        self.paths.append(data.split(b" ", 2)[1].decode())
        return self.answer(decode_flow_reports(data.partition(b"\r\n\r\n")[2]))

    async def close(self) -> None: ...


def allowances_of(answer: Callable[[FlowReportBatch], Answer | None]) -> list[FlowAllowance]:
    async def run(_: VirtualClock) -> list[FlowAllowance]:
        wire = FlowWire(answer)
        peers = PeerClient(lambda: "a", wire)
        reports = [FlowReport("n", "k", waiting=2, rate=0.5), FlowReport("n", "l", in_flight=1, concurrency=1)]
        try:
            return await peers.flow_allowances(PEER, reports)
        finally:
            assert wire.paths == [ALLOWANCES_PATH]

    return run_virtual(run)


def test_reports_of_flows_are_answered_with_an_allowance_for_each() -> None:
    got: list[FlowReportBatch] = []
    given = [FlowAllowance(2.5, None), FlowAllowance(undecided=True)]

    def answer(sent: FlowReportBatch) -> Answer:
        got.append(sent)
        return Answer(200, {}, encode(FlowAllowanceBatch(given)))

    assert allowances_of(answer) == given
    assert (got[0].to, got[0].sender, got[0].number) == ("b", "a", 1)
    assert got[0].flows[0] == FlowReport("n", "k", 2, 0, 0.5, 0)
    assert got[0].flows[1] == FlowReport("n", "l", 0, 1, 0.0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Answer(503, {}, b"away"),
        Answer(200, {}, b"\xc1"),
        Answer(200, {}, encode(FlowAllowanceBatch([FlowAllowance()]))),
    ],
    ids=["no answer", "refused", "unreadable", "too few"],
)
def test_reports_of_flows_without_a_usable_answer_are_unserved(answer: Answer | None) -> None:
    with pytest.raises(Unserved):
        allowances_of(lambda _: answer)


def test_an_instance_of_a_version_that_divides_no_limits_is_told_apart() -> None:
    with pytest.raises(NotFound, match="does not divide limits"):
        allowances_of(lambda _: Answer(404, {}, b"{}"))
