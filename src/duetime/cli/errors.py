"""How a command reports an error: as text that names the flag, as JSON for programs, and as an exit code."""

from __future__ import annotations

import re
import shlex
import sys

from duetime.errors import Conflict, DuetimeError, NotFound, OutcomeUnknown, Rejected, SetupError, StoreError
from duetime.printable import printable

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "USAGE", "StoppedWaiting", "UsageError", "exit_code", "print_error"]

OK, FAILED, USAGE, NOT_FOUND, REFUSED, UNREACHABLE, UNKNOWN = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141

# Fields of the HTTP API, and the flag of each on the command line.
FLAGS = {
    "at": "--at",
    "callbackTimeoutSeconds": "--callback-timeout",
    "callbackUrl": "--to",
    "allNamespaces": "--all-namespaces",
    "correlationId": "--correlation-id",
    "delay": "--in",
    "deliveredRetention": "--keep-delivered",
    "dueFrom": "--due-from",
    "dueUntil": "--due-until",
    "executeAt": "--at",
    "failedRetention": "--keep-failed",
    "failIfLateBy": "--fail-if-late-by",
    "flowKey": "the flow key",
    "rate": "--rate",
    "concurrency": "--concurrency",
    "headers": "--header",
    "idPrefix": "--prefix",
    "ifAbsent": "--if-absent",
    "ifReached": "--if-reached",
    "initialInterval": "--retry-from",
    "maxDuration": "--retry-for",
    "maxInterval": "--retry-up-to",
    "maxRetries": "--max-retries",
    "namespace": "the namespace",
    "numShards": "--shards",
    "payload": "--payload",
    "payloadBytesMax": "--payload-bytes-max",
    "createsPerSecond": "--creates-per-second",
    "requestsPerSecond": "--requests-per-second",
    "requireOk": "--require-ok",
    "signingSecrets": "--secret",
    "size": "--size",
    "skipIfLateBy": "--skip-if-late-by",
    "tag": "--tag",
    "tags": "--tag",
    "timerId": "the ID",
}
_OF_CLIENT = {
    "call get() first": "look with `duetime timer get` first",
    "With if_absent=True a create is safe to retry, and the client retries it": "With --if-absent a create is safe to "
    "repeat, and the command repeats it",
    "with if_absent again": "with --if-absent again",
}
_CAMEL_CASE = [name for name in FLAGS if not name.islower()]  # certainly a field, wherever it is in a text


class UsageError(DuetimeError):
    """The arguments are wrong. No request was sent."""

    status = 0
    code = "usage"
    title = "Wrong usage"


class StoppedWaiting(DuetimeError):
    """The time that the user allowed is over, and what the command waits for has not happened."""

    status = 0
    code = "timeout"
    title = "Stopped waiting"


def print_error(error: DuetimeError, *, as_json: bool) -> None:
    """Prints the error on standard error."""
    if as_json:
        from duetime.cli.output import print_json

        status = None if isinstance(error, SetupError) else error.status or None  # only if a server answered it
        problem = {"code": error.code, "status": status, "detail": _text(error), "field": error.field}
        print_json(problem, file=sys.stderr)
        return
    for line in (f"duetime: {_text(error)}", _hint(error)):
        if line:
            print(printable(line), file=sys.stderr)


def exit_code(error: DuetimeError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, OutcomeUnknown):
        return UNKNOWN
    if isinstance(error, SetupError | UsageError):
        return USAGE
    if isinstance(error, StoreError | StoppedWaiting):  # `serve` could not start, because of its store
        return FAILED
    no_duetime = error.code in ("path_not_found", "malformed_answer")
    return UNREACHABLE if no_duetime or error.status in (0, 429, 503) else FAILED


def _text(error: DuetimeError) -> str:
    text, field = error.detail, error.field
    if isinstance(error, OutcomeUnknown):  # the client names its own functions and arguments
        for of_client, of_command in _OF_CLIENT.items():
            text = text.replace(of_client, of_command)
    if field is None or isinstance(error, NotFound | Conflict):  # their texts already name the timer or namespace
        return text
    if field not in text:
        text = f"{field}: {text}"
    if field.startswith("schedule."):  # the options of `schedule preview` have the names of the fields
        return re.sub(r"\bschedule\.(\w+)", r"--\1", text)
    names = sorted({field.rpartition(".")[2], *_CAMEL_CASE} & FLAGS.keys(), key=len, reverse=True)
    text = re.sub(rf"\b(?:retryPolicy\.|missed\.)?({'|'.join(names)})\b", lambda found: FLAGS[found[1]], text)
    return text.replace("the the ", "the ")


def _hint(error: DuetimeError) -> str:
    if error.code == "connection_failed":
        if "TLS: certificate" in error.detail:
            return "If a private authority has signed its certificate, set SSL_CERT_FILE to the file of that authority."
        if "connection closed before the answer" in error.detail:
            return "Does the server use TLS (server.tls_certificate)? Then its URL begins with https://."
        return "Is the server running? `duetime serve` starts one. Set its URL with --url or DUETIME_URL."
    if error.status == 401 and error.code != "malformed_answer":
        return "Give a token with --token or DUETIME_TOKEN."
    if error.code == "path_not_found":
        return "Is the URL right? --url and DUETIME_URL take a URL without a path, such as http://127.0.0.1:8463."
    if "(is this a Duetime server?)" in error.detail:
        return "--url and DUETIME_URL are the URL of the Duetime server; --to is that of the receiver of callbacks."
    missing = re.search(r"\bnamespace '([^']+)'", error.detail)
    if error.code == "namespace_not_found" and missing:
        return f"`duetime namespace create {shlex.quote(missing[1])}` creates it."
    return ""
