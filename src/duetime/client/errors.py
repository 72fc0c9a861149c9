"""Errors of a call, and whether the call may be retried. Pure.

The problem documents of the server become the classes of duetime.errors again: the server and the client use the
same classes.
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
    """No response, and nothing was changed: no connection could be made, or the response to a read was lost."""

    status = 0
    code = "connection_failed"
    title = "The server cannot be reached; nothing was applied"


class CallKind(enum.Enum):
    """What is to be done when the response to a call was lost."""

    READ = "changes nothing: retry"
    IDEMPOTENT = "may have been applied; applying it twice has the same effect as once: retry"
    NOT_IDEMPOTENT = "may have been applied: do not retry"


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
        return DuetimeError("the response has neither a result nor an error", code="malformed_answer")
    error: DuetimeError
    if problem.code == "outcome_unknown":
        error = OutcomeUnknown(problem.detail)
    elif problem.code == "invalid_field":
        error = InvalidField(problem.field, problem.detail)
    elif problem.code == "path_not_found":
        # Not NotFound, which means that a timer does not exist. Here there is no Duetime at this URL.
        error = DuetimeError(problem.detail, code=problem.code)
    else:
        otherwise = Rejected if 400 <= problem.status < 500 else DuetimeError
        kind = Unserved if problem.code == "not_applied" else _BY_STATUS.get(problem.status, otherwise)
        error = kind(problem.detail, field=problem.field, code=problem.code)
    error.status = problem.status
    error.retry_after_seconds = None  # set by error_of_answer if the server sent Retry-After
    return error


def outcome_unknown(detail: str) -> DuetimeError:
    """OutcomeUnknown for a lost response. It has no Retry-After, because no server sent one."""
    error: DuetimeError = OutcomeUnknown(detail)
    error.retry_after_seconds = None
    return error


def error_of_answer(answer: Answer, kind: CallKind) -> DuetimeError:
    try:
        error = error_of_problem(_decode_problem(answer.body))
    except msgspec.MsgspecError:  # not from Duetime: from a proxy or another server
        error = _error_without_problem(answer.status, kind)
    after = answer.header("retry-after")
    if after is not None and after.isdecimal():
        error.retry_after_seconds = int(after)
    return error


def _error_without_problem(status: int, kind: CallKind) -> DuetimeError:
    text = f"HTTP {status} without a problem document (is this a Duetime server?)"
    if status in (502, 503, 504):  # from a gateway, which may have lost the response of the server
        return Unserved(text) if kind is CallKind.READ else outcome_unknown(text)
    kind_of_error = _BY_STATUS[status] if status in (401, 403, 413, 429) else DuetimeError
    error = kind_of_error(text, code="malformed_answer")
    error.status = status
    return error


def may_retry(error: DuetimeError, kind: CallKind) -> bool:
    if isinstance(error, OutcomeUnknown):
        return kind is not CallKind.NOT_IDEMPOTENT
    return isinstance(error, Busy | Unserved | ConnectionFailed)


def pause_s(retries_made: int, retry_after_seconds: int | None) -> float:
    pause: float = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0**retries_made) * random.uniform(0.5, 1.0)
    return max(pause, retry_after_seconds or 0)
