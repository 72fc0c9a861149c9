"""Requests and answers of the HTTP server, as its handlers see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from duetime.errors import DuetimeError
from duetime.wire import encode_problem, problem_of

__all__ = ["JSON", "PROBLEM_JSON", "Admit", "Handler", "Request", "Response", "problem_response"]

JSON = b"application/json"
PROBLEM_JSON = b"application/problem+json"


class Request:
    """One request. `path` is as it was sent, not percent-decoded; the query is dropped.

    `tenant` shares memory with other tenants: the client address until `admit` sets the holder of the token. `admitted`
    is what `admit` found out and the handler needs.
    """

    __slots__ = (
        "admitted",
        "body",
        "body_bytes_counted",
        "keep_alive",
        "method",
        "path",
        "raw_headers",
        "refusal",
        "tenant",
    )

    def __init__(
        self,
        method: str,
        path: str,
        *,
        headers: dict[bytes, bytes] | None = None,
        body: bytes = b"",
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.path = path
        self.body = body
        self.keep_alive = keep_alive
        self.tenant = ""
        self.admitted: Any = None
        self.refusal: Response | None = None
        self.body_bytes_counted = 0
        self.raw_headers = {} if headers is None else headers  # by name in lower case

    def header(self, name: bytes) -> str | None:
        """A header by its name in lower case. The values of a repeated header are joined with ", "."""
        value = self.raw_headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers.items()}


class Response:
    """One answer. `headers` is not checked: it must not contain text from a request."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        content_type: bytes = JSON,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


Handler = Callable[[Request], Awaitable[Response]]
# Called when the head of a request has arrived. Returns the largest body that it may have, or the answer that refuses
# it.
Admit = Callable[[Request], "int | Response"]


def problem_response(status: int, code: str, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """The answer for an error of HTTP, outside of the API."""
    error = DuetimeError(detail, code=code)
    error.status, error.title = status, HTTPStatus(status).phrase
    return Response(status, encode_problem(problem_of(error)), PROBLEM_JSON, headers)
