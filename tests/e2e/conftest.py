"""One real server per module, and a receiver per test. Tests that use these run on the module's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from contract import Asker
from real_server import RealReceiver, RealServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("server"))
    try:
        await server.start()
        yield server
        assert await server.stop() == 0, server.log.read_text()[-2_000:]
        assert "Traceback" not in server.log.read_text()
    finally:
        await server.close()


@pytest.fixture
def api(server: RealServer) -> Asker:
    return Asker(server)


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest_asyncio.fixture(loop_scope="module")
async def namespace(api: Asker, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own, so that tests that share a server share nothing else."""
    name = request.node.name[:200]
    await api.ok("namespaces/create", namespace=name, numShards=4)
    return str(name)
