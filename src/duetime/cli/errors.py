"""How a command reports an error: as text that names the flag, as JSON for programs, and as an exit code."""

from __future__ import annotations

import re
import sys

from duetime.errors import Conflict, DuetimeError, NotFound, OutcomeUnknown, Rejected, SetupError, StoreError

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "USAGE", "UsageError", "exit_code", "print_error"]

OK, FAILED, USAGE, NOT_FOUND, REFUSED, UNREACHABLE, UNKNOWN = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141

# Fields of the HTTP API, and the flag of each on the command line.
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
_CAMEL_CASE = [name for name in FLAGS if not name.islower()]  # certainly a field, wherever it is in a text


class UsageError(DuetimeError):
    """The arguments are wrong. No request was sent."""

    status = 0
    code = "usage"
    title = "Wrong usage"


def print_error(error: DuetimeError, *, as_json: bool) -> None:
    """Prints the error on standard error."""
    if as_json:
        from duetime.cli.output import print_json

        status = None if isinstance(error, SetupError) else error.status or None  # only if a server answered it
        problem = {"code": error.code, "status": status, "detail": _text(error), "field": error.field}
        print_json(problem, file=sys.stderr)
        return
    hint = _hint(error)
    print(f"duetime: {_text(error)}{hint and chr(10) + hint}", file=sys.stderr)


def exit_code(error: DuetimeError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, OutcomeUnknown):
        return UNKNOWN
    if isinstance(error, SetupError | UsageError):
        return USAGE
    if isinstance(error, StoreError):  # `serve` could not start, because of its store
        return FAILED
    no_duetime = error.code in ("path_not_found", "malformed_answer")
    return UNREACHABLE if no_duetime or error.status in (0, 429, 503) else FAILED


def _text(error: DuetimeError) -> str:
    text, field = error.detail, error.field
    if field is None or isinstance(error, NotFound | Conflict):  # their texts already name the timer or namespace
        return text
    if field not in text:
        text = f"{field}: {text}"
    names = sorted({field.rpartition(".")[2], *_CAMEL_CASE} & FLAGS.keys(), key=len, reverse=True)
    return re.sub(rf"\b(?:retryPolicy\.|missed\.)?({'|'.join(names)})\b", lambda found: FLAGS[found[1]], text)


def _hint(error: DuetimeError) -> str:
    if error.code == "connection_failed":
        return "Is the server running? `duetime serve` starts one. Set its URL with --url or DUETIME_URL."
    if error.status == 401:
        return "Give a token with --token or DUETIME_TOKEN."
    if error.code == "path_not_found":
        return "Is the URL right? --url and DUETIME_URL take a URL without a path, such as http://127.0.0.1:8463."
    missing = re.search(r"\bnamespace '([^']+)'", error.detail)
    if error.code == "namespace_not_found" and missing:
        return f"`duetime namespace create {missing[1]}` creates it."
    return ""
