"""The OpenAPI 3.1 document, generated from the routes and the types of `wire`.

`python -m duetime.api.openapi > spec/openapi.json` writes the copy in the repository; a test fails if it differs from
what the code generates.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import msgspec

from duetime import __version__, wire
from duetime.api.routes import PREFIX, ROUTES, Route

__all__ = ["openapi", "openapi_document"]

Json = dict[str, Any]

_DESCRIPTION = """\
Duetime is a durable timer service: you tell it what to call and when, and it calls back at least once.

All operations are `POST` with a JSON object, and answer with a JSON object. Field names are camelCase. An unknown \
field is an error, so that a misspelled name is not silently ignored. Instants are RFC 3339 with an offset; durations \
are strings such as `90s` or `PT1H30M`.

Errors are `application/problem+json` (RFC 9457): programs should use `code`; `field` names the wrong field. With \
`not_applied` nothing was changed and the request may be repeated. With `outcome_unknown` the write may or may not \
have been applied. Then, and if there was no answer at all, reads, deletes and creates with `ifAbsent` may be \
repeated. A plain create should not be repeated: if the timer has fired in the meantime, it would fire again.

If the server has tokens, send one as `Authorization: Bearer TOKEN`. A token allows some namespaces and some of the \
verbs `read`, `write` and `admin`; `admin` includes the other two.
"""

_PROBLEMS = {
    400: "The request is wrong; `field` names the wrong field.",
    401: "A valid token is required.",
    403: "The token does not allow the verb or the namespace, or (`cross_origin`) a page of another site sent this, or "
    "(`unknown_host`) it was sent to a name that is not this server's.",
    404: "There is no such timer or namespace (`timer_not_found`, `namespace_not_found`).",
    408: "The request did not arrive completely in time; nothing was applied.",
    409: "The state of the timer or namespace does not allow this.",
    413: "The body or the payload is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many writes are waiting, or a quota of the namespace is used up: `code` says which. Nothing was applied. "
    "Retry after the time in `Retry-After`.",
    431: "The head of the request is too large.",
    500: "An internal error; the server's log has the details under `requestId`.",
    503: "`not_applied`: nothing was changed, retry later. `outcome_unknown`: the write may have been applied.",
}
# 408, 431 and (too many connections) 503 may be answered before the path is read.
_EVERYWHERE = (400, 401, 403, 408, 413, 415, 431, 500, 503)


@cache
def openapi_document() -> bytes:
    return msgspec.json.format(msgspec.json.encode(openapi()), indent=2) + b"\n"


def openapi() -> Json:
    shapes = [shape for route in ROUTES for shape in (route.request, route.answer)]
    _, components = msgspec.json.schema_components(
        [*shapes, wire.ProblemJson], ref_template="#/components/schemas/{name}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Duetime",
            "version": __version__,
            "summary": "A durable timer service.",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "tags": [
            {"name": "timers", "description": "Future callbacks."},
            {"name": "schedules", "description": "Local times in a time zone, once or repeated."},
            {"name": "namespaces", "description": "Scopes of timer ids, with defaults for their timers."},
            {"name": "flows", "description": "Limits, breakers and pauses of the timers that belong together."},
            {"name": "cluster", "description": "The status of the service itself."},
            {"name": "server", "description": "For load balancers, monitoring and people."},
        ],
        "paths": {**{PREFIX + route.path: {"post": _operation(route)} for route in ROUTES}, **_documents()},
        "components": {
            "schemas": {_short(name): _tidy(schema) for name, schema in sorted(components.items())},
            "responses": {f"Problem{status}": _problem(status) for status in _PROBLEMS},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> Json:
    group, _, name = route.path.partition("/")
    statuses = sorted({*_EVERYWHERE, *route.errors})
    return {
        "operationId": f"{group}.{name}",
        "tags": [group],
        "summary": route.summary,
        "description": f"{route.description}\n\nVerb: `{route.verb}`.".strip(),
        "requestBody": {
            "required": route.request not in (wire.EmptyJson, wire.ClusterQueryJson, wire.ListFlowsJson),
            "content": {"application/json": {"schema": _reference(route.request), "example": route.example}},
        },
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": _reference(route.answer)}}},
            **{str(status): {"$ref": f"#/components/responses/Problem{status}"} for status in statuses},
        },
    }


def _documents() -> Json:
    """The paths for GET."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    ready = {
        "200": {"description": "Ready.", "content": text},
        "503": {"description": "Not ready; the body says why.", "content": text},
    }
    return {
        "/healthz": _document("healthz", "Is the process running?", {"200": {"description": "Yes.", "content": text}}),
        "/readyz": _document("readyz", "Can the instance serve requests and fire timers?", ready),
        "/metrics": _document(
            "metrics",
            "Metrics in the Prometheus text format",
            {
                "200": {"description": "All metrics of this instance.", "content": text},
                "401": {"$ref": "#/components/responses/Problem401"},
                "403": {"$ref": "#/components/responses/Problem403"},
            },
            security=[{}, {"token": []}],
        ),
    }


def _document(name: str, summary: str, responses: Json, security: list[Json] | None = None) -> Json:
    return {
        "get": {
            "operationId": f"server.{name}",
            "tags": ["server"],
            "summary": summary,
            "security": security or [],
            "responses": responses,
        }
    }


def _problem(status: int) -> Json:
    headers = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return {
        "description": _PROBLEMS[status],
        **({"headers": headers} if status in (429, 503) else {}),
        "content": {"application/problem+json": {"schema": _reference(wire.ProblemJson)}},
    }


def _reference(shape: type) -> Json:
    return {"$ref": f"#/components/schemas/{_short(shape.__name__)}"}


def _short(name: str) -> str:
    return name.removesuffix("Json")


def _tidy(schema: Any) -> Any:
    """The schema of msgspec without titles, with short names, and with `null` as one of two types instead of anyOf."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy: Json = {}
    for key, value in schema.items():
        if key == "properties":
            tidy[key] = {name: _tidy(part) for name, part in value.items()}
        elif key == "$ref":
            tidy[key] = _short(value)
        elif key == "description":
            tidy[key] = " ".join(value.split())
        elif key in ("examples", "default", "enum"):
            if value is not None:
                tidy[key] = value
        elif key != "title" and not (key == "required" and not value):
            tidy[key] = _tidy(value)
    choices = tidy.get("anyOf", [])
    if len(choices) == 2 and choices[1] == {"type": "null"} and isinstance(choices[0].get("type"), str):
        del tidy["anyOf"]
        tidy = {**choices[0], "type": [choices[0]["type"], "null"], **tidy}
    return tidy


if __name__ == "__main__":
    sys.stdout.write(openapi_document().decode())
