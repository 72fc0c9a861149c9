"""Every operation of the API answers its own example."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recording_service import World

from duetime.api.routes import ROUTES


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_every_route_answers_its_own_example_in_its_own_shape(world: World, route: Any) -> None:
    response, _ = await world.ask(route.path, route.example)
    assert response.status == 200, response.body
    msgspec.json.decode(response.body, type=route.answer)
