"""The published contract, spec/openapi.json, held against every request and answer of a real server.

Stricter than the document says: an object may only have fields that the document names. So neither the
server can grow a field that nobody wrote down, nor the document promise one that has another shape.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from real_server import RealServer, until

from duetime.http.client import Answer

__all__ = ["ATTEMPTED", "ENDED", "FAR", "INSTANT", "PLAIN", "PROBLEM_KEYS", "SPEC", "URL", "Asker", "ended", "exists"]

SPEC = Path(__file__).parents[2] / "spec" / "openapi.json"
PROBLEM_KEYS = {"type", "title", "status", "detail", "code"}

# The fields of a timer: always; of one that was tried; of one that is over.
PLAIN = {"namespace", "timerId", "state", "executeAt", "scheduledAt", "createdAt", "attempts", "callbackUrl"}
ATTEMPTED = {"firstAttemptAt", "lastAttemptAt", "lateByMs"}
ENDED = {"outcome", "reachedAt"}
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)

FAR = "2127-01-01T09:00:00.000Z"
URL = "http://127.0.0.1:9/hooks"  # nobody is there, and nobody is called: used for timers that are far off

Json = dict[str, Any]


class Asker:
    """Asks a server, and checks what it asks and what it is answered against the contract."""

    def __init__(self, server: RealServer) -> None:
        self.server = server

    async def ask(self, path: str, body: Json, headers: dict[str, str] | None = None) -> tuple[int, Json]:
        return await self.ask_raw(path, json.dumps(body).encode(), headers)

    async def ask_raw(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Json]:
        answer = await self.server.post(path, body, headers)
        return answer.status, checked(path, body, answer)

    async def ok(self, path: str, **body: Any) -> Json:
        """What the call answers; it has to succeed."""
        status, answer = await self.ask(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, **body: Any) -> tuple[int, str, str | None]:
        """Status, code and field of the problem; it has to be one."""
        status, problem = await self.ask(path, body)
        assert status != 200, problem
        return status, problem["code"], problem.get("field")

    async def timer(self, path: str = "timers/get", **body: Any) -> Json:
        """The timer that the call answers."""
        timer = (await self.ok(path, **body))["timer"]
        assert isinstance(timer, dict)
        return timer


async def ended(api: Asker, **key: str) -> dict[str, Any]:
    """The timer, once it is over."""
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update(await api.timer(**key))
        return found["state"] not in ("scheduled", "inFlight")

    await until(is_over, f"the end of {key}")
    return await api.timer(**key)


async def exists(api: Asker, **key: str) -> bool:
    return (await api.ask("timers/get", key))[0] == 200


def checked(path: str, request: bytes, answer: Answer) -> Json:
    operation = _contract()["paths"][f"/api/v1/{path}"]["post"]
    response = operation["responses"].get(str(answer.status))
    assert response is not None, f"{path} answers {answer.status}, which the contract does not have"
    if "$ref" in response:
        response = _contract()["components"]["responses"][response["$ref"].rpartition("/")[2]]
    content_type = answer.header("content-type")
    assert content_type in response["content"], f"{path} answers {answer.status} as {content_type}"
    document: Json = json.loads(answer.body)
    _validate(response["content"][content_type]["schema"], document)
    if answer.status == 200 and not any("error" in result for result in document.get("results", ())):
        _validate(operation["requestBody"]["content"]["application/json"]["schema"], json.loads(request or b"{}"))
    if answer.status != 200:
        assert PROBLEM_KEYS <= document.keys() <= PROBLEM_KEYS | {"field"}, document
        assert document["status"] == answer.status
        assert document["type"] == f"urn:duetime:problem:{document['code']}"
    return document


def _validate(schema: Json, document: Any) -> None:
    whole = {**schema, "components": _contract()["components"]}
    for error in Draft202012Validator(whole).iter_errors(document):
        raise AssertionError(f"against the contract at {error.json_path}: {error.message}")


@cache
def _contract() -> Json:
    contract: Json = json.loads(SPEC.read_bytes())
    for schema in contract["components"]["schemas"].values():
        if "properties" in schema or schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
    return contract
