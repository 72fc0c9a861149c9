"""TLS of the HTTP server, over real sockets, with certificates made by openssl."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from served import connected, post, read_answer, serving

from duetime.errors import SetupError
from duetime.http import server as http_server
from duetime.http.certificates import expires_at_ms
from duetime.http.listeners import TlsFiles
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer

Certificate = tuple[Path, Path]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[Certificate]:
    if shutil.which("openssl") is None:
        pytest.skip("TLS IS NOT TESTED: there is no openssl to make a certificate with")
    made = []
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        command = (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
        )
        subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
        made.append((certificate, key))
    return made


@pytest.fixture
def files(certificates: list[Certificate], tmp_path: Path) -> Certificate:
    """Copies of the first certificate, which a test may replace."""
    copies = tmp_path / "certificate.pem", tmp_path / "key.pem"
    replace(copies, certificates[0])
    return copies


def replace(files: Certificate, by: Certificate) -> None:
    for old, new in zip(files, by, strict=True):
        written = old.with_suffix(".new")
        shutil.copy(new, written)
        written.rename(old)


async def connect(server: HttpServer, trusted: Certificate) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=trusted[0])
    return await asyncio.open_connection("127.0.0.1", server.port, ssl=context)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return (await read_answer(reader))[2]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def use_the_new_certificate_and_keep_connections(files: Certificate, certificates: list[Certificate]) -> None:
    first, second = certificates
    tls = TlsFiles(str(files[0]), str(files[1]))
    async with serving(tls=tls) as server:
        reader, writer = await connect(server, first)
        assert await exchange(reader, writer, post(b"before")) == b"POST /p before"
        assert not tls.reload_if_changed()
        replace(files, second)
        assert tls.reload_if_changed()
        other_reader, other_writer = await connect(server, second)
        assert await exchange(other_reader, other_writer, post(b"new")) == b"POST /p new"
        assert await exchange(reader, writer, post(b"after")) == b"POST /p after"
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(server, first)
        writer.close()
        other_writer.close()


async def keep_the_last_good_certificate(files: Certificate, certificates: list[Certificate]) -> None:
    first, second = certificates
    tls = TlsFiles(str(files[0]), str(files[1]))
    async with serving(tls=tls) as server:
        shutil.copy(second[0], files[0])  # the key does not belong to it yet
        assert not tls.reload()
        reader, writer = await connect(server, first)
        assert await exchange(reader, writer, post(b"x")) == b"POST /p x"
        writer.close()
        shutil.copy(second[1], files[1])
        assert tls.reload()
        reader, writer = await connect(server, second)
        assert await exchange(reader, writer, post(b"y")) == b"POST /p y"
        writer.close()


async def bound_connections_before_their_handshake(files: Certificate, certificates: list[Certificate]) -> None:
    async with serving(tls=TlsFiles(str(files[0]), str(files[1]))) as server, connected(server) as (silent, _):
        await until(lambda: len(server.handshakes) == 1)
        for _ in range(http_server.TLS_HANDSHAKES_MAX - 1):
            server.handshakes[asyncio.create_task(asyncio.sleep(60))] = None
        reader, writer = await connect(server, certificates[0])
        assert await asyncio.wait_for(silent.read(), 10) == b""
        assert await exchange(reader, writer, post(b"x")) == b"POST /p x"
        writer.close()


async def close_what_is_not_tls(files: Certificate, certificates: list[Certificate]) -> None:
    async with serving(tls=TlsFiles(str(files[0]), str(files[1]))) as server:
        async with connected(server) as (reader, writer):
            writer.write(post(b"plain"))
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 10)
        async with connected(server):
            await until(lambda: len(server.handshakes) == 1)
        await until(lambda: not server.handshakes)


async def bound_answers_that_nobody_reads(files: Certificate, certificates: list[Certificate]) -> None:
    async def large(request: Request) -> Response:
        return Response(200, b"x" * (8 << 20))

    async with serving(large, tls=TlsFiles(str(files[0]), str(files[1])), buffered_bytes_max=20 << 20) as server:
        writers = []
        for _ in range(6):
            _, writer = await connect(server, certificates[0])
            before = set(server.unread.connections)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(post() * 3)
            await until(lambda before=before: bool(set(server.unread.connections) - before))  # type: ignore[misc]
            writers.append(writer)
            assert server.unread.bytes <= 20 << 20 or len(server.unread.connections) == 1
        for writer in writers:
            writer.transport.abort()
        await until(lambda: server.unread.bytes == 0)


SCENARIOS = [
    use_the_new_certificate_and_keep_connections,
    keep_the_last_good_certificate,
    bound_connections_before_their_handshake,
    close_what_is_not_tls,
    bound_answers_that_nobody_reads,
]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_server_can(
    scenario: Callable[[Certificate, list[Certificate]], Coroutine[Any, Any, None]],
    loop: str,
    files: Certificate,
    certificates: list[Certificate],
) -> None:
    if loop == "asyncio":
        asyncio.run(scenario(files, certificates))
    elif sys.platform != "win32":
        import uvloop

        uvloop.run(scenario(files, certificates))


async def test_changed_files_are_found_by_the_server(
    files: Certificate, certificates: list[Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.001)
    tls = TlsFiles(str(files[0]), str(files[1]))
    async with serving(tls=tls) as server:
        replace(files, certificates[1])
        swept = server.sweeps + 2 * http_server.TLS_CHECK_SWEEPS
        await until(lambda: server.sweeps > swept)
        _, writer = await connect(server, certificates[1])
        writer.close()


def test_files_that_cannot_be_used_are_named(files: Certificate, certificates: list[Certificate]) -> None:
    certificate, key = map(str, files)
    with pytest.raises(SetupError, match=r"server\.tls_certificate: .*nowhere: No such file"):
        TlsFiles(f"{certificate}.nowhere", key)
    with pytest.raises(SetupError, match=r"server\.tls_key: .*nowhere: No such file"):
        TlsFiles(certificate, f"{key}.nowhere")
    with pytest.raises(SetupError, match="the key does not belong to the certificate"):
        TlsFiles(certificate, str(certificates[1][1]))
    files[1].write_text("not a key")
    with pytest.raises(SetupError, match=r"server\.tls_certificate .* and server\.tls_key"):
        TlsFiles(certificate, key)


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(files: Certificate) -> None:
    locked = files[1].with_suffix(".locked")
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", str(files[1]), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(SetupError, match="the key has a passphrase"):
        TlsFiles(str(files[0]), str(locked))


def test_the_log_warns_once_a_day_before_the_certificate_ends(
    certificates: list[Certificate], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("duetime"), "propagate", True)
    certificate, key = certificates[0]
    tls = TlsFiles(str(certificate), str(key))
    end_ms = expires_at_ms(str(certificate))
    assert end_ms is not None
    hour_ms, day_ms = 3_600_000, 24 * 3_600_000
    tls.warn_before_end(end_ms - 20 * day_ms)
    assert caplog.messages == []
    for hours in range(1, 49):
        tls.warn_before_end(end_ms - 10 * day_ms + hours * hour_ms)
    tls.warn_before_end(end_ms + day_ms)
    said = [message.rpartition(".pem ")[2].partition(":")[0] for message in caplog.messages]
    assert said == ["ends within 10 days", "ends within 9 days", "has ended"]


async def test_the_server_warns_of_its_certificate_by_itself(
    files: Certificate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is valid for two days."""
    monkeypatch.setattr(logging.getLogger("duetime"), "propagate", True)
    tls = TlsFiles(str(files[0]), str(files[1]))
    assert not tls.reload_if_changed()
    assert "ends within 2 days" in caplog.text
