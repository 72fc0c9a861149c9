"""The API in front of a service that records what it is asked."""

from __future__ import annotations

import pytest
from recording_service import World, token


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def guarded() -> World:
    return World(
        token("root"),
        token("shop", namespaces=("orders",), verbs=("read", "write")),
        token("eye", verbs=("read",)),
        token("chief", namespaces=("orders",), verbs=("admin",)),
    )
