"""The door for other instances: checks who is calling, hands the orders to the service, answers soon.

Every refusal happens before any order is looked at, so that the caller may take it for "not applied".
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final

import msgspec

from duetime.errors import Conflict, DuetimeError, Forbidden, InvalidField, OutcomeUnknown, Unauthenticated
from duetime.http_server import Request, Response
from duetime.peer_wire import (
    MSGPACK,
    ORDERS_PATH,
    SIGNATURE,
    STATUS_PATH,
    Answers,
    Orders,
    Question,
    Reply,
    decode_orders,
    decode_question,
    encode,
    reply_of,
    sign,
)
from duetime.peers import OrderAnswer
from duetime.service import Service
from duetime.telemetry import log

__all__ = ["PeerDoor"]

# An order that takes longer than this must not keep the others of its request waiting.
_ANSWER_WITHIN_S: Final = 0.025
_NUMBERS_KEPT: Final = 16_384
_SENDERS_MAX: Final = 1_024
_UNDECIDED: Final = Reply()


class PeerDoor:
    paths = frozenset({ORDERS_PATH, STATUS_PATH})

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seen: dict[str, _Numbers] = {}

    async def handle(self, request: Request) -> Response:
        if request.path == STATUS_PATH:
            self._admit(request, self._read(decode_question, request))
            return Response(200, encode(self._service.instance_status()), MSGPACK)
        orders = self._read(decode_orders, request)
        self._admit(request, orders)
        return Response(200, encode(Answers(await self._answer(orders))), MSGPACK)

    def _read(self, decode: Any, request: Request) -> Any:
        try:
            return decode(request.body)
        except msgspec.MsgspecError as error:
            raise InvalidField(None, f"not what instances say to each other: {error}") from None

    def _admit(self, request: Request, said: Orders | Question) -> None:
        me = self._service.as_peer()
        signature = request.header(SIGNATURE.encode()) or ""
        if said.to != me.instance_id:
            raise Forbidden(f"this is instance {me.instance_id}, not {said.to}")
        if not hmac.compare_digest(sign(me.secret, request.body).encode(), signature.encode("latin-1")):
            raise Unauthenticated("not signed with this instance's secret")
        if not self._numbers_of(said.sender).is_new(said.number):
            raise Conflict("a request with this number was here before")

    def _numbers_of(self, sender: str) -> _Numbers:
        numbers = self._seen.get(sender)
        if numbers is None:
            numbers = self._seen[sender] = _Numbers()
            if len(self._seen) > _SENDERS_MAX:
                del self._seen[next(iter(self._seen))]
        return numbers

    async def _answer(self, orders: Orders) -> list[Reply]:
        answers = [self._service.take(forward) for forward in orders.new]
        answers += [self._service.taken(order_id) for order_id in orders.again]
        waiting = {answer for answer in answers if not answer.done()}
        if waiting:
            await asyncio.wait(waiting, timeout=_ANSWER_WITHIN_S)  # leaves those alone that are not done by then
        return [_reply(answer) if answer.done() else _UNDECIDED for answer in answers]


def _reply(answer: asyncio.Future[OrderAnswer]) -> Reply:
    error = answer.exception()
    if error is None:
        return reply_of(answer.result())
    if isinstance(error, DuetimeError):
        return reply_of(error)
    log.error("an order of another instance failed", exc_info=error)
    return reply_of(OutcomeUnknown(repr(error)))


class _Numbers:
    """The numbers of a sender's requests that were here. Below the window everything counts as seen."""

    def __init__(self) -> None:
        self._highest = 0
        self._seen: set[int] = set()

    def is_new(self, number: int) -> bool:
        lowest = self._highest - _NUMBERS_KEPT
        if number <= lowest or number in self._seen:
            return False
        self._seen.add(number)
        if number > self._highest:
            self._highest = number
            if len(self._seen) > 2 * _NUMBERS_KEPT:
                self._seen = {n for n in self._seen if n > self._highest - _NUMBERS_KEPT}
        return True
