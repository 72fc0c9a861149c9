"""What can go wrong with a call, and whether it may be repeated. Pure.

Problems become the errors of errors.py again: the same tree on both sides of the wire.
"""

from __future__ import annotations

import enum
import random

import msgspec

from duetime.errors import (
    Busy,
    Conflict,
    DuetimeError,
    Forbidden,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    Rejected,
    TooLarge,
    Unauthenticated,
    Unserved,
)
from duetime.http.client import Answer
from duetime.wire import ProblemJson

PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0


class ConnectionFailed(DuetimeError):
    """No answer, and nothing was changed: no connection was made, or only a read was lost."""

    status = 0
    code = "connection_failed"
    title = "The server cannot be reached; nothing was applied"


class Kind(enum.Enum):
    """What a lost answer means."""

    READ = "changes nothing: repeat"
    REPEATABLE = "may have been applied; doing it twice is the same as once: repeat"
    ONCE = "may have been applied: do not repeat"


_decode_problem = msgspec.json.Decoder(ProblemJson).decode

_BY_STATUS: dict[int, type[DuetimeError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: Busy,
}


def error_of_problem(problem: ProblemJson | None) -> DuetimeError:
    if problem is None:
        return DuetimeError("the server answered neither a result nor an error", code="malformed_answer")
    error: DuetimeError
    if problem.code == "outcome_unknown":
        error = OutcomeUnknown(problem.detail)
    elif problem.code == "invalid_field":
        error = InvalidField(problem.field, problem.detail)
    elif problem.code == "path_not_found":
        # Not NotFound: that would read as "there is no such timer", but there is no Duetime at this URL.
        error = DuetimeError(problem.detail, code=problem.code)
    else:
        otherwise = Rejected if 400 <= problem.status < 500 else DuetimeError
        kind = Unserved if problem.code == "not_applied" else _BY_STATUS.get(problem.status, otherwise)
        error = kind(problem.detail, field=problem.field, code=problem.code)
    error.status = problem.status
    error.retry_after_seconds = None  # only what the server says counts: see error_of_answer
    return error


def in_doubt(detail: str) -> DuetimeError:
    """OutcomeUnknown, because the answer was lost on the way; nobody asked for a pause."""
    error: DuetimeError = OutcomeUnknown(detail)
    error.retry_after_seconds = None
    return error


def error_of_answer(answer: Answer, kind: Kind) -> DuetimeError:
    try:
        error = error_of_problem(_decode_problem(answer.body))
    except msgspec.MsgspecError:  # not Duetime: a proxy, or another server
        error = _error_of_stranger(answer.status, kind)
    after = answer.header("retry-after")
    if after is not None and after.isdecimal():
        error.retry_after_seconds = int(after)
    return error


def _error_of_stranger(status: int, kind: Kind) -> DuetimeError:
    text = f"HTTP {status} without an explanation; is this a Duetime server?"
    if status in (502, 503, 504):  # a gateway between us: it may have lost the answer
        return Unserved(text) if kind is Kind.READ else in_doubt(text)
    kind_of_error = _BY_STATUS[status] if status in (401, 403, 413, 429) else DuetimeError
    error = kind_of_error(text, code="malformed_answer")
    error.status = status
    return error


def may_repeat(error: DuetimeError, kind: Kind) -> bool:
    if isinstance(error, OutcomeUnknown):
        return kind is not Kind.ONCE
    return isinstance(error, Busy | Unserved | ConnectionFailed)


def pause_s(repeats: int, retry_after_seconds: int | None) -> float:
    pause: float = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0**repeats) * random.uniform(0.5, 1.0)
    return max(pause, retry_after_seconds or 0)
