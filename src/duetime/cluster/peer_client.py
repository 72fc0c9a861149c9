"""Peers over HTTP: the commands for one instance are sent together, many in a request, and each is sent once.

Commands that arrive while requests are running wait for the next request, so that requests grow with the load, as
commits do. A request is answered soon, with the answers that exist by then; for a command that takes longer, the
client asks again by its id. A request whose connection broke is never repeated: the outcome of its commands is unknown.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from duetime.cluster.forwarding import CommandAnswer, Forward, Peer, payload_chars
from duetime.cluster.peer_protocol import (
    ALLOWANCES_PATH,
    ANSWER_SIGNATURE,
    COMMANDS_PATH,
    FLOWS_PATH,
    FROM,
    REFUSED,
    SIGNATURE,
    STATUS_PATH,
    TO,
    CommandBatch,
    FlowReportBatch,
    FlowsRequest,
    StatusRequest,
    decode_flow_allowances,
    decode_flows,
    decode_replies,
    decode_status,
    encode,
    read_reply,
    sign,
    sign_answer,
    signs_answers,
    uses_tls,
)
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowStatus
from duetime.domain.status import InstanceStatus
from duetime.errors import Busy, Conflict, DuetimeError, NotFound, NotOwner, OutcomeUnknown, SetupError, Unserved
from duetime.http.client import Answer, HttpClient, HttpError, Target, parse_target, request_head
from duetime.telemetry import FailureLog, log
from duetime.wire import ProblemJson

__all__ = ["PeerClient"]

_REQUESTS_MAX: Final = 4  # running at the same time, to one instance
_COMMANDS_MAX: Final = 256  # in one request
_PAYLOAD_CHARS_MAX: Final = 2 * 1024 * 1024
_WAITING_MAX: Final = 20_000
_QUEUES_MAX: Final = 64  # above that, the queues that are not in use are removed
_NUMBERED_MAX: Final = 65_536  # an instance id is not in use any more if so many others were used after it
_UNSENT_S: Final = 2.0  # a command not sent within this time goes back to its caller: its shard may have moved
_REQUEST_TIMEOUT_MS: Final = 5_000
_COMMAND_TIMEOUT_S: Final = 15.0
_STATUS_TIMEOUT_MS: Final = 1_000
_FLOWS_TIMEOUT_MS: Final = 1_000  # well within ALLOWANCE_MS: one lost answer costs no allowance
_ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024

Call = Callable[[Peer, list[Forward], list[str]], Awaitable[Answer | None]]


class Http(Protocol):
    """The part of HttpClient that is used here. The simulator has another implementation."""

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None: ...

    async def close(self) -> None: ...


class PeerClient:
    """`own_id` returns this instance's id, which changes when it joins again."""

    def __init__(self, own_id: Callable[[], str], http: Http | None = None, *, ca_file: str = "") -> None:
        self._own_id = own_id
        self._http: Http = http or HttpClient(
            connect_timeout_ms=1_000,
            body_bytes_max=_ANSWER_BYTES_MAX,
            idle_ms=20_000,
            connections_max=4_096,
            ssl_context=_tls_context(ca_file) if ca_file else None,
        )
        self._queues: dict[str, _Queue] = {}
        # The last request number by the peer's id, ordered by last use. A peer gets a new id when it joins again. A
        # number that was used before is refused as a replay.
        self._numbers: dict[str, int] = {}
        self._refusals: dict[str, FailureLog] = {}

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        queue = self._queues.get(peer.instance_id)
        if queue is None:
            self._remove_unused_queues()
            queue = self._queues[peer.instance_id] = _Queue(peer, self._call)
        return await queue.send(forward)

    async def status(self, peer: Peer) -> InstanceStatus:
        request = StatusRequest(peer.instance_id, self._own_id(), self._next_number(peer))
        return decode_status(await self._ask(peer, STATUS_PATH, encode(request)))

    async def flows(self, peer: Peer, query: FlowQuery) -> list[FlowStatus]:
        request = FlowsRequest(peer.instance_id, self._own_id(), self._next_number(peer), query)
        return decode_flows(await self._ask(peer, FLOWS_PATH, encode(request)))

    async def _ask(self, peer: Peer, path: str, body: bytes) -> bytes:
        """The body of the answer to a read. Raises Unserved, with the reason, if there is none."""
        try:
            answer = await self._post(peer, path, body, _STATUS_TIMEOUT_MS)
        except HttpError as error:
            raise Unserved(error.reason) from None
        if answer is None or answer.status != 200:
            raise Unserved("the connection closed before the answer" if answer is None else _refusal(answer))
        return answer.body

    async def flow_allowances(self, peer: Peer, reports: list[FlowReport]) -> list[FlowAllowance]:
        request = FlowReportBatch(peer.instance_id, self._own_id(), self._next_number(peer), reports)
        try:
            answer = await self._post(peer, ALLOWANCES_PATH, encode(request), _FLOWS_TIMEOUT_MS, logs_refusals=False)
        except HttpError as error:
            raise Unserved(error.reason) from None
        if answer is not None and answer.status == NotFound.status:
            raise NotFound(f"instance {peer.instance_id} is of a version that does not divide limits")
        if answer is None or answer.status != 200:
            raise Unserved("the connection closed before the answer" if answer is None else _refusal(answer))
        try:
            allowances = decode_flow_allowances(answer.body).flows
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Unserved(f"the answer cannot be read: {error}") from None
        if len(allowances) != len(reports):
            raise Unserved(f"{len(allowances)} allowances for {len(reports)} flows")
        return allowances

    async def close(self) -> None:
        await self._http.close()

    def _next_number(self, peer: Peer) -> int:
        number = self._numbers[peer.instance_id] = self._numbers.pop(peer.instance_id, 0) + 1
        if len(self._numbers) > _NUMBERED_MAX:
            del self._numbers[next(iter(self._numbers))]
        return number

    async def _call(self, peer: Peer, new: list[Forward], again: list[str]) -> Answer | None:
        commands = CommandBatch(peer.instance_id, self._own_id(), self._next_number(peer), new, again)
        return await self._post(peer, COMMANDS_PATH, encode(commands), _REQUEST_TIMEOUT_MS)

    async def _post(
        self, peer: Peer, path: str, body: bytes, timeout_ms: int, *, logs_refusals: bool = True
    ) -> Answer | None:
        """None: a reused connection closed. The request may have arrived, so it is not sent again."""
        try:
            target = _target("https" if uses_tls(peer.secret) else "http", peer.address, path)
        except ValueError as error:
            raise HttpError(f"the address {peer.address!r} {error}", sent=False) from None
        signature = sign(peer.secret, body)
        headers = {
            "content-type": "application/msgpack",
            FROM: self._own_id(),
            TO: peer.instance_id,
            SIGNATURE: signature,
        }
        head = request_head("POST", target, headers)
        unsent = [b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)]
        answer = await self._http.send(target, lambda: unsent.pop() if unsent else None, timeout_ms=timeout_ms)
        if answer is not None:
            if logs_refusals:
                self._log_refusal(peer, answer)
            if answer.status == 200 and signs_answers(peer.secret):
                _check_answer(peer, signature, answer)
        return answer

    def _log_refusal(self, peer: Peer, answer: Answer) -> None:
        """Log refusals by the peer: while they last, writes to its shards fail."""
        failures = self._refusals.get(peer.instance_id)
        if answer.status == 200:
            if failures is not None:
                failures.recovered()
            return
        if failures is None:
            if len(self._refusals) >= _QUEUES_MAX:
                self._refusals.clear()
            name = f"instance {peer.instance_id} at {peer.address}"
            failures = self._refusals[peer.instance_id] = FailureLog(
                f"requests of this instance ({self._own_id()}) to {name} fail", f"{name} accepts requests again"
            )
        failures.failed(Unserved(_refusal(answer)), int(asyncio.get_running_loop().time() * 1_000))

    def _remove_unused_queues(self) -> None:
        """Most of them belong to instances that have stopped: an instance that joins again has a new id."""
        if len(self._queues) >= _QUEUES_MAX:
            self._queues = {instance_id: queue for instance_id, queue in self._queues.items() if queue.in_use}


_target = lru_cache(1_024)(lambda scheme, address, path: parse_target(f"{scheme}://{address}{path}"))


def _check_answer(peer: Peer, signature: str, answer: Answer) -> None:
    """Before it is decoded. The request may have arrived whoever has answered it."""
    expected = sign_answer(peer.secret, signature, answer.body)
    if not hmac.compare_digest(expected.encode(), (answer.header(ANSWER_SIGNATURE) or "").encode()):
        raise HttpError(f"the answer is not signed with the secret of instance {peer.instance_id}", sent=True)


def _tls_context(ca_file: str) -> ssl.SSLContext:
    """Only these authorities, not those of the system: the certificates of instances are often from a private one."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SetupError(f"cluster.ca_file: {ca_file}: {getattr(error, 'strerror', None) or error}") from None


def _refusal(answer: Answer) -> str:
    try:
        detail = msgspec.json.decode(answer.body, type=ProblemJson).detail
    except (msgspec.MsgspecError, UnicodeDecodeError):  # not from an instance of Duetime
        detail = answer.body[:200].decode(errors="replace").strip()
    return f"HTTP {answer.status}: {detail}"


# --- the commands for one instance ---------------------------------------------------------------


class _Waiting:
    """A command that is not answered yet. `received`: the other instance has it, and is asked for it by its id."""

    __slots__ = ("forward", "future", "queued_at", "received")

    def __init__(self, forward: Forward, future: asyncio.Future[CommandAnswer], queued_at: float) -> None:
        self.forward = forward
        self.future = future
        self.queued_at = queued_at
        self.received = False

    def resolve(self, answer: CommandAnswer | DuetimeError) -> None:
        if self.future.done():  # its caller has stopped waiting
            return
        if isinstance(answer, DuetimeError):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class _Queue:
    """The commands that wait to be sent to one instance, and the requests that carry them."""

    def __init__(self, peer: Peer, call: Call) -> None:
        self._peer = peer
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._requests: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    @property
    def in_use(self) -> bool:
        return bool(self._waiting or self._requests)

    async def send(self, forward: Forward) -> CommandAnswer:
        if len(self._waiting) >= _WAITING_MAX:
            raise Busy
        waiting = _Waiting(forward, self._loop.create_future(), self._loop.time())
        self._waiting.append(waiting)
        self._schedule()
        return await waiting.future

    def _schedule(self) -> None:
        """Start a request in the next iteration of the event loop, so that commands of this one are sent together."""
        if self._waiting and not self._is_scheduled and len(self._requests) < _REQUESTS_MAX:
            self._is_scheduled = True
            self._loop.call_soon(self._start_request)

    def _start_request(self) -> None:
        self._is_scheduled = False
        commands = self._next()
        if commands:
            task = self._loop.create_task(self._send(commands))
            self._requests.add(task)
            task.add_done_callback(self._request_done)
        self._schedule()

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        self._schedule()

    def _next(self) -> list[_Waiting]:
        """The oldest commands, as many as one request may have."""
        commands: list[_Waiting] = []
        chars_left = _PAYLOAD_CHARS_MAX
        too_old = self._loop.time() - _UNSENT_S
        while self._waiting and len(commands) < _COMMANDS_MAX and chars_left > 0:
            waiting = self._waiting.popleft()
            if not waiting.received and waiting.queued_at < too_old:
                waiting.resolve(NotOwner("the command could not be sent to the owner in time"))
                continue
            commands.append(waiting)
            chars_left -= 0 if waiting.received else payload_chars(waiting.forward.command)
        return commands

    async def _send(self, commands: list[_Waiting]) -> None:
        """One request and its answer. Every command gets a result, or waits again."""
        new = [command for command in commands if not command.received]
        again = [command for command in commands if command.received]
        try:
            answer = await self._call(self._peer, [c.forward for c in new], [c.forward.command_id for c in again])
            if answer is None:
                raise HttpError("the connection closed before the answer", sent=True)
            if answer.status != 200:
                # A request that the peer itself refused (REFUSED) was not carried out. After an error of a proxy the
                # outcome is unknown; after a refused replay too: a copy of this request may have arrived first.
                refused = answer.header(REFUSED) is not None and answer.status != Conflict.status
                raise HttpError(_refusal(answer), sent=not refused)
            self._read(new + again, answer)
        except HttpError as error:
            _resolve(new, OutcomeUnknown(error.reason) if error.sent else NotOwner(error.reason))
            _resolve(again, OutcomeUnknown(error.reason))
            self._give_back(error.reason)
        except Exception as error:  # no caller may wait for ever
            log.exception("unexpected error in a request to the instance at %s", self._peer.address)
            _resolve(commands, OutcomeUnknown(f"the answer cannot be read: {error!r}"))

    def _give_back(self, reason: str) -> None:
        """The instance does not answer: commands that were not sent yet go back to their callers."""
        unsent = [waiting for waiting in self._waiting if not waiting.received]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.received)
        _resolve(unsent, NotOwner(reason))

    def _read(self, commands: list[_Waiting], answer: Answer) -> None:
        replies = decode_replies(answer.body).replies
        if len(replies) != len(commands):  # then it is unknown which command a reply belongs to
            raise ValueError(f"{len(replies)} replies to {len(commands)} commands")
        overdue = self._loop.time() - _COMMAND_TIMEOUT_S
        for command, reply in zip(commands, replies, strict=True):
            try:
                decided = read_reply(reply)
            except DuetimeError as error:
                command.resolve(error)
                continue
            if decided is not None:
                command.resolve(decided)
            elif command.queued_at < overdue:
                command.resolve(OutcomeUnknown("the owner did not decide in time"))
            else:
                command.received = True
                self._waiting.append(command)


def _resolve(commands: Iterable[_Waiting], error: DuetimeError) -> None:
    for command in commands:
        command.resolve(error)
