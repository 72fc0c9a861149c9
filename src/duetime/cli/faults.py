"""What went wrong, in the words of the command line, as JSON for programs, and as an exit code."""

from __future__ import annotations

import re
import sys

from duetime.errors import Conflict, DuetimeError, NotFound, OutcomeUnknown, Rejected, SetupError, StoreError

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "USAGE", "UsageError", "exit_code", "tell"]

OK, FAILED, USAGE, NOT_FOUND, REFUSED, UNREACHABLE, UNKNOWN = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141

# A field of the HTTP API: what one types for it.
FLAGS = {
    "at": "--at",
    "callbackTimeoutSeconds": "--callback-timeout",
    "callbackUrl": "--to",
    "correlationId": "--correlation-id",
    "delay": "--in",
    "deliveredRetention": "--keep-delivered",
    "dueFrom": "--due-from",
    "dueUntil": "--due-until",
    "executeAt": "--at",
    "failedRetention": "--keep-failed",
    "failIfLateBy": "--fail-if-late-by",
    "headers": "--header",
    "idPrefix": "--prefix",
    "ifAbsent": "--if-absent",
    "initialInterval": "--retry-from",
    "maxDuration": "--retry-for",
    "maxInterval": "--retry-up-to",
    "maxRetries": "--max-retries",
    "namespace": "the namespace",
    "numShards": "--shards",
    "payload": "--payload",
    "payloadBytesMax": "--payload-bytes-max",
    "requireOk": "--require-ok",
    "signingSecrets": "--secret",
    "skipIfLateBy": "--skip-if-late-by",
    "tag": "--tag",
    "tags": "--tag",
    "timerId": "the ID",
}
_NEVER_PROSE = [name for name in FLAGS if not name.islower()]  # in camelCase: a field wherever it stands


class UsageError(DuetimeError):
    """What was typed is wrong, and no server was asked."""

    status = 0
    code = "usage"
    title = "Wrong usage"


def tell(error: DuetimeError, *, as_json: bool) -> None:
    """The error on standard error."""
    if as_json:
        from duetime.cli.connect import print_json

        status = None if isinstance(error, SetupError) else error.status or None  # only what a server answered
        problem = {"code": error.code, "status": status, "detail": _said(error), "field": error.field}
        print_json(problem, file=sys.stderr)
        return
    hint = _hint(error)
    print(f"duetime: {_said(error)}{hint and chr(10) + hint}", file=sys.stderr)


def exit_code(error: DuetimeError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, OutcomeUnknown):
        return UNKNOWN
    if isinstance(error, SetupError | UsageError):
        return USAGE
    if isinstance(error, StoreError):  # of our own store: `serve` could not start
        return FAILED
    elsewhere = error.code in ("path_not_found", "malformed_answer")
    return UNREACHABLE if elsewhere or error.status in (0, 429, 503) else FAILED


def _said(error: DuetimeError) -> str:
    text, field = error.detail, error.field
    if field is None or isinstance(error, NotFound | Conflict):  # those are sentences that name what they are about
        return text
    if field not in text:
        text = f"{field}: {text}"
    names = sorted({field.rpartition(".")[2], *_NEVER_PROSE} & FLAGS.keys(), key=len, reverse=True)
    return re.sub(rf"\b(?:retryPolicy\.|missed\.)?({'|'.join(names)})\b", lambda found: FLAGS[found[1]], text)


def _hint(error: DuetimeError) -> str:
    if error.code == "connection_failed":
        return "Is the server running? `duetime serve` starts one; --url or DUETIME_URL point to one."
    if error.status == 401:
        return "Give a token with --token or DUETIME_TOKEN."
    if error.code == "path_not_found":
        return "Is the URL right? --url and DUETIME_URL take the server alone, as in http://127.0.0.1:8463."
    missing = re.fullmatch("There is no namespace '(.+)'", error.detail)
    if error.code == "namespace_not_found" and missing:
        return f"`duetime namespace create {missing[1]}` makes it."
    return ""
