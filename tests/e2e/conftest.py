"""One real server per module, and a receiver per test: tests that use these run on the module's event loop. And
certificates, for databases that speak TLS."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def certificates() -> Iterator[Path]:
    """Of our own making: an authority, another one, and a certificate for `localhost` only. All may read them."""
    folder = Path(tempfile.mkdtemp(prefix="duetime-tls-"))
    folder.chmod(0o755)
    (folder / "for").write_text("subjectAltName=DNS:localhost")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-subj", "/CN=ours", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", "-x509", *key, "-subj", "/CN=theirs", "-keyout", "other.key", "-out", "other.pem")
    openssl("req", *key, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "for")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")
    java = ("-inkey", "server.key", "-in", "server.pem", "-passout", "pass:secret", "-out", "server.p12")
    openssl("pkcs12", "-export", *java)
    for file in folder.iterdir():
        file.chmod(0o644)
    yield folder
    shutil.rmtree(folder)
