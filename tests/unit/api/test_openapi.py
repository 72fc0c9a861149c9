"""The OpenAPI document and the page made from it say what the code does."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duetime import wire
from duetime.api.docs import docs_page
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
    assert "schedule" not in properties


def test_the_fields_of_a_namespace_have_texts_of_their_own() -> None:
    properties = openapi()["components"]["schemas"]["CreateNamespace"]["properties"]
    texts = [schema["description"] for schema in properties.values()]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if "left out" in text.lower()]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.add(value or "")
            if name == "href":
                self.links.append(value or "")
            if name == "src" or tag == "link":
                self.loaded.append(value or "")


def test_the_page_is_whole_and_its_links_lead_somewhere() -> None:
    page = docs_page().decode()
    links = _Links()
    links.feed(page)
    assert links.loaded == []
    assert "url(" not in page
    for link in links.links:
        assert link == "/openapi.json" or link.removeprefix("#") in links.ids, link


def test_the_page_has_a_command_to_run_for_every_route() -> None:
    page = docs_page().decode()
    for route in ROUTES:
        assert f"curl http://127.0.0.1:8463{PREFIX}{route.path} " in page
    commands = re.findall(r"-d '(.*?)'</pre>", page.replace("&quot;", '"').replace("&#x27;", "'"))
    assert [json.loads(body) for body in commands] == [route.example for route in ROUTES]
