"""Peers over HTTP: orders for one instance travel together, many in a request, and no order travels twice.

What is asked for while requests are under way waits for the next one, so that requests grow with the load,
as commits do. A request is answered soon, with what is decided by then; an order that takes longer is asked
for again by its id alone. A request that broke off is never repeated: its orders are unknown.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from duetime.cluster.forwarding import CommandAnswer, Forward, Peer, payload_chars
from duetime.cluster.peer_protocol import (
    COMMANDS_PATH,
    REFUSED,
    SIGNATURE,
    STATUS_PATH,
    CommandBatch,
    StatusRequest,
    decode_replies,
    decode_status,
    encode,
    read_reply,
    sign,
)
from duetime.domain.status import InstanceStatus
from duetime.errors import Busy, Conflict, DuetimeError, NotOwner, OutcomeUnknown, Unserved
from duetime.http.client import Answer, HttpClient, HttpError, Target, parse_target, request_head
from duetime.telemetry import FailureLog, log
from duetime.wire import ProblemJson

__all__ = ["PeerClient"]

_REQUESTS_MAX: Final = 4  # under way to one instance
_ORDERS_MAX: Final = 256  # in one request
_PAYLOAD_CHARS_MAX: Final = 2 * 1024 * 1024
_WAITING_MAX: Final = 20_000
_LINES_MAX: Final = 64  # before those that nobody waits on are dropped
_NUMBERED_MAX: Final = 65_536  # an id after which so many others were used is not in use any more
_UNSENT_S: Final = 2.0  # an order that could not be sent for so long goes back: its shard may have moved
_REQUEST_TIMEOUT_MS: Final = 5_000
_ORDER_TIMEOUT_S: Final = 15.0
_STATUS_TIMEOUT_MS: Final = 1_000
_ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024

Call = Callable[[Peer, list[Forward], list[str]], Awaitable[Answer | None]]


class Http(Protocol):
    """The part of HttpClient that is used here. The simulator has its own implementation."""

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None: ...

    async def close(self) -> None: ...


class PeerClient:
    """`me` answers this instance's id, which changes when it joins again."""

    def __init__(self, me: Callable[[], str], http: Http | None = None) -> None:
        self._me = me
        self._http: Http = http or HttpClient(
            connect_timeout_ms=1_000, body_bytes_max=_ANSWER_BYTES_MAX, idle_ms=20_000, connections_max=4_096
        )
        self._lines: dict[str, _Line] = {}
        # The last request number by the peer's id, ordered by last use. A peer gets a new id when it joins again. A
        # number that was used before is refused as a replay.
        self._numbers: dict[str, int] = {}
        self._refusals: dict[str, FailureLog] = {}

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        line = self._lines.get(peer.instance_id)
        if line is None:
            self._hang_up()
            line = self._lines[peer.instance_id] = _Line(peer, self._call)
        return await line.ask(forward)

    async def status(self, peer: Peer) -> InstanceStatus:
        question = StatusRequest(peer.instance_id, self._me(), self._next_number(peer))
        try:
            answer = await self._post(peer, STATUS_PATH, encode(question), _STATUS_TIMEOUT_MS)
        except HttpError as error:
            raise Unserved(error.reason) from None
        if answer is None or answer.status != 200:
            raise Unserved("the connection broke before the answer" if answer is None else _refusal(answer))
        return decode_status(answer.body)

    async def close(self) -> None:
        await self._http.close()

    def _next_number(self, peer: Peer) -> int:
        number = self._numbers[peer.instance_id] = self._numbers.pop(peer.instance_id, 0) + 1
        if len(self._numbers) > _NUMBERED_MAX:
            del self._numbers[next(iter(self._numbers))]
        return number

    async def _call(self, peer: Peer, new: list[Forward], again: list[str]) -> Answer | None:
        commands = CommandBatch(peer.instance_id, self._me(), self._next_number(peer), new, again)
        return await self._post(peer, COMMANDS_PATH, encode(commands), _REQUEST_TIMEOUT_MS)

    async def _post(self, peer: Peer, path: str, body: bytes, timeout_ms: int) -> Answer | None:
        """None: a kept connection broke; the request may have arrived, so it is not sent again."""
        try:
            target = _target(peer.address, path)
        except ValueError as error:
            raise HttpError(f"the address {peer.address!r} {error}", sent=False) from None
        headers = {"content-type": "application/msgpack", SIGNATURE: sign(peer.secret, body)}
        head = request_head("POST", target, headers)
        once = [b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)]
        answer = await self._http.send(target, lambda: once.pop() if once else None, timeout_ms=timeout_ms)
        if answer is not None:
            self._log_refusal(peer, answer)
        return answer

    def _log_refusal(self, peer: Peer, answer: Answer) -> None:
        """When it begins, when its reason changes and once a minute: meanwhile writes to that peer's shards fail."""
        trouble = self._refusals.get(peer.instance_id)
        if answer.status == 200:
            if trouble is not None:
                trouble.recovered()
            return
        if trouble is None:
            if len(self._refusals) >= _LINES_MAX:
                self._refusals.clear()
            names = f"instance {peer.instance_id} at {peer.address}"
            trouble = self._refusals[peer.instance_id] = FailureLog(
                f"requests of this instance ({self._me()}) to {names} fail", f"{names} answers requests again"
            )
        trouble.failed(Unserved(_refusal(answer)), int(asyncio.get_running_loop().time() * 1_000))

    def _hang_up(self) -> None:
        """Ids of instances are never used again: lines that nobody waits on are dropped."""
        if len(self._lines) >= _LINES_MAX:
            self._lines = {name: line for name, line in self._lines.items() if line.in_use}


_target = lru_cache(1_024)(lambda address, path: parse_target(f"http://{address}{path}"))


def _refusal(answer: Answer) -> str:
    try:
        said = msgspec.json.decode(answer.body, type=ProblemJson).detail
    except (msgspec.MsgspecError, UnicodeDecodeError):  # no instance of ours
        said = answer.body[:200].decode(errors="replace").strip()
    return f"HTTP {answer.status}: {said}"


# --- the orders for one instance -----------------------------------------------------------------


class _Waiting:
    """An order that is not answered yet. `taken`: the other side has it, and is asked for it by its id."""

    __slots__ = ("asked_at", "forward", "future", "taken")

    def __init__(self, forward: Forward, future: asyncio.Future[CommandAnswer], asked_at: float) -> None:
        self.forward = forward
        self.future = future
        self.asked_at = asked_at
        self.taken = False

    def tell(self, answer: CommandAnswer | DuetimeError) -> None:
        if self.future.done():  # whoever asked has gone
            return
        if isinstance(answer, DuetimeError):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class _Line:
    def __init__(self, peer: Peer, call: Call) -> None:
        self._peer = peer
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._planned = False

    @property
    def in_use(self) -> bool:
        return bool(self._waiting or self._under_way)

    async def ask(self, forward: Forward) -> CommandAnswer:
        if len(self._waiting) >= _WAITING_MAX:
            raise Busy
        waiting = _Waiting(forward, self._loop.create_future(), self._loop.time())
        self._waiting.append(waiting)
        self._plan()
        return await waiting.future

    def _plan(self) -> None:
        """One turn of the loop, so that what was asked for together travels together."""
        if self._waiting and not self._planned and len(self._under_way) < _REQUESTS_MAX:
            self._planned = True
            self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        self._planned = False
        commands = self._next()
        if commands:
            task = self._loop.create_task(self._carry(commands))
            self._under_way.add(task)
            task.add_done_callback(self._back)
        self._plan()

    def _back(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._plan()

    def _next(self) -> list[_Waiting]:
        """The oldest, as many as fit a request."""
        commands: list[_Waiting] = []
        room = _PAYLOAD_CHARS_MAX
        too_old = self._loop.time() - _UNSENT_S
        while self._waiting and len(commands) < _ORDERS_MAX and room > 0:
            waiting = self._waiting.popleft()
            if not waiting.taken and waiting.asked_at < too_old:
                waiting.tell(NotOwner("the owner does not answer"))
                continue
            commands.append(waiting)
            room -= 0 if waiting.taken else payload_chars(waiting.forward.command)
        return commands

    async def _carry(self, commands: list[_Waiting]) -> None:
        """One request and what comes of it. Every order is told, or waits again."""
        new = [command for command in commands if not command.taken]
        again = [command for command in commands if command.taken]
        try:
            answer = await self._call(self._peer, [o.forward for o in new], [o.forward.command_id for o in again])
            if answer is None:
                raise HttpError("the connection broke before the answer", sent=True)
            if answer.status != 200:
                # A request that the peer itself refused (REFUSED) was not carried out. After an error of a proxy the
                # outcome is unknown; after a refused replay too, because a copy of this request may have come first.
                refused = answer.header(REFUSED) is not None and answer.status != Conflict.status
                raise HttpError(_refusal(answer), sent=not refused)
            self._read(new + again, answer)
        except HttpError as error:
            _tell(new, OutcomeUnknown(error.reason) if error.sent else NotOwner(error.reason))
            _tell(again, OutcomeUnknown(error.reason))
            self._give_back(error.reason)
        except Exception as error:  # nobody may wait for ever, whatever it was
            log.exception("unexpected error in a request to the instance at %s", self._peer.address)
            _tell(commands, OutcomeUnknown(f"the answer cannot be read: {error!r}"))

    def _give_back(self, reason: str) -> None:
        """What has not been sent yet need not be sent to where nobody answers."""
        unsent = [waiting for waiting in self._waiting if not waiting.taken]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.taken)
        _tell(unsent, NotOwner(reason))

    def _read(self, commands: list[_Waiting], answer: Answer) -> None:
        replies = decode_replies(answer.body).replies
        if len(replies) != len(commands):  # then it is not known which order a reply belongs to
            raise ValueError(f"{len(replies)} replies to {len(commands)} orders")
        overdue = self._loop.time() - _ORDER_TIMEOUT_S
        for command, reply in zip(commands, replies, strict=True):
            try:
                decided = read_reply(reply)
            except DuetimeError as error:
                command.tell(error)
                continue
            if decided is not None:
                command.tell(decided)
            elif command.asked_at < overdue:
                command.tell(OutcomeUnknown("the owner has not decided in time"))
            else:
                command.taken = True
                self._waiting.append(command)


def _tell(commands: Iterable[_Waiting], error: DuetimeError) -> None:
    for command in commands:
        command.tell(error)
