"""The OpenAPI document: complete, valid, and the same as its copy in the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duetime import wire
from duetime.api.openapi import openapi, openapi_document
from duetime.api.routes import PREFIX, ROUTES, Route

REPOSITORY = Path(__file__).parents[3]


def test_the_copy_in_the_repository_is_up_to_date() -> None:
    stored = (REPOSITORY / "spec" / "openapi.json").read_bytes()
    assert stored == openapi_document(), "run: python -m duetime.api.openapi > spec/openapi.json"


def test_every_route_is_described() -> None:
    document = openapi()
    assert set(document["paths"]) == {PREFIX + route.path for route in ROUTES} | {"/healthz", "/readyz", "/metrics"}
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert operation["operationId"]
            assert operation["responses"]["200"]


def test_every_reference_leads_somewhere() -> None:
    document = openapi()
    for reference in re.findall(r'"\$ref":\s*"#/([^"]+)"', openapi_document().decode()):
        found: Any = document
        for step in reference.split("/"):
            found = found[step]
        assert found


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_example_is_a_valid_request(route: Route) -> None:
    msgspec.json.decode(json.dumps(route.example), type=route.request)


def test_requests_forbid_what_they_do_not_know_and_answers_may_grow() -> None:
    schemas = openapi()["components"]["schemas"]
    for route in ROUTES:
        request = schemas[route.request.__name__.removesuffix("Json")]
        assert request["additionalProperties"] is False
        answer = schemas[route.answer.__name__.removesuffix("Json")]
        assert "additionalProperties" not in answer


def test_every_field_of_a_create_is_explained() -> None:
    properties = openapi()["components"]["schemas"]["CreateTimer"]["properties"]
    assert list(properties) == list(wire.CreateTimerJson.__struct_encode_fields__)
    for name, schema in properties.items():
        assert schema.get("description"), name


def test_the_fields_of_a_namespace_have_texts_of_their_own() -> None:
    properties = openapi()["components"]["schemas"]["CreateNamespace"]["properties"]
    texts = [schema["description"] for schema in properties.values()]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if "left out" in text.lower()]
