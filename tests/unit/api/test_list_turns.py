"""Pages of lists are encoded one by one, so that other requests and due timers get their turn between two pages."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, cast

import pytest

from duetime.api import encode
from duetime.api.dispatch import Api
from duetime.api.routes import PREFIX
from duetime.config import load_config
from duetime.http.messages import Request
from duetime.service.service import Service
from duetime.telemetry import Telemetry


class _Quotas:
    def take_request(self, namespace: str) -> None:
        pass


class _Lists:
    """The part of a service that a list needs: an empty page, at once for all who wait."""

    quotas = _Quotas()

    async def list_timers(self, wanted: Any) -> tuple[list[Any], None]:
        await asyncio.sleep(0)
        return [], None


async def test_other_tasks_run_between_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(cast(Service, _Lists()), load_config(environ={}), Telemetry())
    iteration, pages, encode_page = 0, Counter[int](), encode.encode_page

    def counted(*page: Any) -> bytes:
        pages[iteration] += 1
        return encode_page(*page)

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(encode, "encode_page", counted)
    counting = asyncio.create_task(count())
    lists = [
        Request("POST", f"{PREFIX}timers/list", body=json.dumps({"namespace": name}).encode()) for name in "ab" * 20
    ]
    answers = await asyncio.gather(*map(api.handle, lists))
    counting.cancel()
    assert {answer.status for answer in answers} == {200}
    assert (sum(pages.values()), max(pages.values())) == (40, 1)
