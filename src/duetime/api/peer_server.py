"""Requests from other instances: checks the sender, hands them to the service, and answers soon.

A refused request is refused before any of its commands is carried out, so the sender knows that none was applied. After
that each command has its own answer, and the outcome of one that fails unexpectedly is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from duetime.cluster.forwarding import CommandAnswer, Peer
from duetime.cluster.peer_protocol import (
    ALLOWANCES_PATH,
    ANSWER_SIGNATURE,
    COMMANDS_PATH,
    FLOWS_PATH,
    FROM,
    MSGPACK,
    SIGNATURE,
    STATUS_PATH,
    TO,
    CommandBatch,
    FlowAllowanceBatch,
    FlowReportBatch,
    FlowsRequest,
    Reply,
    ReplyBatch,
    StatusRequest,
    decode_commands,
    decode_flow_reports,
    decode_flows_request,
    decode_status_request,
    encode,
    is_signed,
    reply_of,
    sign_answer,
)
from duetime.errors import Conflict, DuetimeError, Forbidden, InvalidField, OutcomeUnknown, Unauthenticated
from duetime.http.messages import Request, Response
from duetime.service.service import Service
from duetime.telemetry import log

__all__ = ["PeerServer"]

# A request of a sender is accepted if its number is at most this far below the highest number of that sender.
_NUMBERS_KEPT: Final = 16_384
_SENDERS_MAX: Final = 256
_SENDERS_RETIRED_MAX: Final = 65_536
_LOG_EVERY_S: Final = 60.0
_UNDECIDED: Final = Reply()

_SIGNATURE: Final = SIGNATURE.encode()
_FROM: Final = FROM.encode()
_TO: Final = TO.encode()

Sent = CommandBatch | FlowReportBatch | FlowsRequest | StatusRequest
S = TypeVar("S", CommandBatch, FlowReportBatch, FlowsRequest, StatusRequest)
T = TypeVar("T")


class PeerServer:
    paths = frozenset({ALLOWANCES_PATH, COMMANDS_PATH, FLOWS_PATH, STATUS_PATH})
    # A command that takes longer than this must not delay the answers to the others of its request.
    answer_within_s = 0.025

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = _RequestNumbers()
        self._logged_at: dict[type[DuetimeError], float] = {}

    async def handle(self, request: Request) -> Response:
        own = self._service.as_peer()
        if request.path == STATUS_PATH:
            await self._accepted(own, request, decode_status_request)
            body = encode(self._service.instance_status())
        elif request.path == FLOWS_PATH:
            body = encode(self._service.flows.own((await self._accepted(own, request, decode_flows_request)).query))
        elif request.path == ALLOWANCES_PATH:
            sent = await self._accepted(own, request, decode_flow_reports)
            allowances = self._service.flow_allowances(sent.sender, sent.number, sent.flows)
            body = encode(FlowAllowanceBatch(allowances))
        else:
            commands = await self._accepted(own, request, decode_commands)
            body = encode(ReplyBatch(await self._answer(commands)))
        signature = sign_answer(own.secret, request.header(_SIGNATURE) or "", body)
        return Response(200, body, MSGPACK, ((ANSWER_SIGNATURE, signature),))

    async def _accepted(self, own: Peer, request: Request, decode: Callable[[bytes], S]) -> S:
        """The request, if another instance sent it to this one. Nothing is decoded before its signature is verified."""
        sent: Sent | None = None
        try:
            await _check_signature(own, request)
            sent = decoded = _read(decode, request.body)
            if sent.to != own.instance_id:
                raise Forbidden(f"the request is for instance {sent.to}, this is instance {own.instance_id}")
            if not self._numbers.is_new(own.instance_id, sent.sender, sent.number):
                raise Conflict("replayed request number")
            return decoded
        except DuetimeError as error:
            self._log_refusal(request, sent, error)
            raise

    def _log_refusal(self, request: Request, sent: Sent | None, error: DuetimeError) -> None:
        """At most once a minute for each kind of refusal: anyone who can reach the port can cause them."""
        now = asyncio.get_running_loop().time()
        if now - self._logged_at.get(type(error), -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at[type(error)] = now
            sender, to = (request.header(_FROM), request.header(_TO)) if sent is None else (sent.sender, sent.to)
            log.warning("refused a request from instance %.64r to instance %.64r: %.200s", sender, to, error.detail)

    async def _answer(self, commands: CommandBatch) -> list[Reply]:
        answers = [_begin(self._service.forwarded.receive, forward) for forward in commands.new]
        answers += [_begin(self._service.forwarded.answer_to, command_id) for command_id in commands.again]
        waiting = {answer for answer in answers if not answer.done()}
        if waiting:
            await asyncio.wait(waiting, timeout=self.answer_within_s)  # does not cancel those that are not done
        return [_reply(answer) if answer.done() else _UNDECIDED for answer in answers]


async def _check_signature(own: Peer, request: Request) -> None:
    to = request.header(_TO)
    if to is not None and to != own.instance_id:  # not needed for safety, but it tells the operator why
        shown = to if to.isalnum() and to.isascii() else ascii(to)  # anyone can send it
        raise Forbidden(f"the request is for instance {shown[:64]}, this is instance {own.instance_id}")
    if not await is_signed(own.secret, request.body, request.header(_SIGNATURE) or ""):
        raise Unauthenticated("the request is not signed with this instance's secret")


def _read(decode: Callable[[bytes], S], body: bytes) -> S:
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(None, f"the body is not a request between instances: {error}") from None


def _begin(call: Callable[[T], asyncio.Future[CommandAnswer]], command: T) -> asyncio.Future[CommandAnswer]:
    """An error raised here is the answer to this command only. Other commands of the request may have been started, so
    the request as a whole must not fail and must not look refused."""
    try:
        return call(command)
    except Exception as error:
        failed: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        return failed


def _reply(answer: asyncio.Future[CommandAnswer]) -> Reply:
    if answer.cancelled():
        return reply_of(OutcomeUnknown("the owner stopped before the command was decided"))
    error = answer.exception()
    if error is None:
        return reply_of(answer.result())
    if isinstance(error, DuetimeError):
        return reply_of(error)
    log.error(
        "unexpected error in a command forwarded by another instance; its sender is told that the outcome is unknown",
        exc_info=error,
    )
    return reply_of(OutcomeUnknown(repr(error)))


# --- replayed requests ---------------------------------------------------------------------------


class _RequestNumbers:
    """The numbers of the requests that were accepted under this instance's current id, by sender.

    They are discarded when this instance joins again under a new id: senders number their requests from 1 for each
    receiver id, and requests to the previous id are refused because they name that id.
    """

    def __init__(self) -> None:
        self._receiver = ""
        self._senders: dict[str, _Numbers] = {}  # the sender with the latest request last
        # Senders removed from `_senders` to save memory: every number up to the highest counts as seen.
        self._retired: dict[str, int] = {}

    def is_new(self, receiver: str, sender: str, number: int) -> bool:
        if receiver != self._receiver:
            self._receiver = receiver
            self._senders = {}
            self._retired = {}
        return self._of(sender).is_new(number)

    def _of(self, sender: str) -> _Numbers:
        numbers = self._senders.pop(sender, None)
        if numbers is None:
            numbers = _Numbers(self._retired.pop(sender, 0))
        self._senders[sender] = numbers
        if len(self._senders) > _SENDERS_MAX:
            longest_unused = next(iter(self._senders))
            self._retired[longest_unused] = self._senders.pop(longest_unused).highest
            if len(self._retired) > _SENDERS_RETIRED_MAX:
                del self._retired[next(iter(self._retired))]
        return numbers


class _Numbers:
    """The numbers of one sender. All up to `_floor` count as seen; above it, those in `_seen`."""

    __slots__ = ("_floor", "_seen", "highest")

    def __init__(self, floor: int) -> None:
        self.highest = floor
        self._floor = floor
        self._seen: set[int] = set()

    def is_new(self, number: int) -> bool:
        if number <= self._floor or number in self._seen:
            return False
        self._seen.add(number)
        self.highest = max(self.highest, number)
        self._raise_floor(self.highest - _NUMBERS_KEPT)  # a request with a lower number is refused from now on
        while self._floor + 1 in self._seen:
            self._floor += 1
            self._seen.remove(self._floor)
        return True

    def _raise_floor(self, floor: int) -> None:
        rise = floor - self._floor
        if rise <= 0:
            return
        if rise <= len(self._seen):  # the cheaper of the two
            self._seen.difference_update(range(self._floor + 1, floor + 1))
        else:
            self._seen = {number for number in self._seen if number > floor}
        self._floor = floor
