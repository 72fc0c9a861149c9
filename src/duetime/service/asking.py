"""Asking another instance about itself: what it answers in time, or why there is no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from duetime.errors import DuetimeError

__all__ = ["NoAnswer", "answer_of"]

_WITHIN_S: Final = 1.25  # the peer client has a limit of one second, and its error says more

T = TypeVar("T")


class NoAnswer(Struct, frozen=True):
    reason: str


async def answer_of(request: Awaitable[T]) -> T | NoAnswer:
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await request
    except TimeoutError:
        return NoAnswer("no answer in time")
    except DuetimeError as error:
        return NoAnswer(error.detail)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # an instance of another version
        return NoAnswer(f"the answer cannot be decoded: {error}")
