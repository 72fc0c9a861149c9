"""The page /docs."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

from duetime.api.docs import docs_page, docs_policy
from duetime.api.routes import PREFIX, ROUTES


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


def test_the_policy_of_the_page_allows_only_its_own_style_and_script() -> None:
    page, policy = docs_page().decode(), docs_policy()
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert re.search(r"<[^>]* (?:style|on\w+)=", page) is None  # attributes have no hash
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


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
