"""A server that answers what a test told it, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from scripted_server import Peer

from duetime.client import (
    AsyncClient,
)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(peer.url, retries=2) as client:
        yield client
