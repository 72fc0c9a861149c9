"""The examples of the documents run: Python against a real server, the checks of signatures in every language."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from documents import Block, blocks, check_each

from duetime.app import App
from duetime.client import Client
from duetime.config import load_config

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A whole Duetime on a free port and a file of its own, on a loop in another thread."""
    config = load_config(
        environ={}, flags={"store.url": f"sqlite:///{tmp_path}/docs.db", "server.listen": "127.0.0.1:0"}
    )
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def serve() -> None:
        app = App(config)
        await app.start()
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop, app.address[1]))
        await stop.wait()
        await app.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, stop, port = started.result(timeout=10)
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("DUETIME_URL", url)
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    try:
        with Client() as client:
            client.namespaces.update("default", signing_secrets=[SECRET])
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def run(block: Block, names: dict[str, Any]) -> None:
    exec(compile(block.text, str(block), "exec"), names)


@pytest.mark.parametrize("document", ["README.md", "docs/quickstart.md", "docs/reference/python.md"])
def test_the_python_of_a_document_runs(document: str, server: str) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python", document):
        run(block, names)
    assert names


def test_the_receiver_of_the_quickstart_is_called_and_says_done(server: str) -> None:
    names: dict[str, Any] = {}
    run(blocks("python", "docs/quickstart.md")[-1], names)
    with receiving(names["on_timer"]) as url, Client() as client:
        client.create("example", delay=0, callback_url=url, payload={"invoice": 9})
        deadline = time.monotonic() + 10
        while not (timer := client.get("example")).is_over:
            assert time.monotonic() < deadline, timer
            time.sleep(0.01)
    assert (timer.state, timer.last_error) == ("delivered", None)
    assert len(names["seen"]) == 1


class receiving:
    """An HTTP server that hands what it gets to a function, as a web framework would."""

    def __init__(self, on_timer: Callable[[bytes, dict[str, str]], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answer = on_timer(self.rfile.read(int(self.headers["content-length"])), dict(self.headers))
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


# --- signatures, by hand -------------------------------------------------------------------------

BODY = (
    '{"namespace":"default","timerId":"Grüße","scheduledAt":"2027-01-01T09:00:00.000Z",'
    '"executeAt":"2027-01-01T09:00:00.000Z",'
    '"firedAt":"2027-01-01T09:00:00.002Z","attempt":1,"payload":null,"correlationId":null}'
).encode()


def signed(body: bytes = BODY, age_s: int = 0) -> dict[str, str]:
    """Headers made here from the specification, not by the code that the examples are to agree with."""
    timestamp = int(time.time()) - age_s
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    mac = hmac.new(key, f"msg_1.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,bm90IHRoaXMgb25l v1,{base64.b64encode(mac).decode()}",
    }


CASES: list[tuple[str, Callable[[], dict[str, str]], bool]] = [
    ("genuine", signed, True),
    ("of another body", lambda: signed(b"{}"), False),
    ("too old", lambda: signed(age_s=301), False),
    ("from the future", lambda: signed(age_s=-320), False),
]
GUIDE = "docs/howto/receive-callbacks.md"


def test_the_python_checks_distinguish_genuine_from_forged_callbacks() -> None:
    def check(each: tuple[Block, int]) -> None:
        block, number = each
        _, headers, genuine = CASES[number]
        names: dict[str, Any] = {}
        run(block, names)
        assert names["is_genuine"](BODY, headers(), SECRET) is genuine, CASES[number][0]

    check_each([(block, number) for block in blocks("python", GUIDE) for number in range(len(CASES))], check)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: its example is not checked")
def test_the_node_check_distinguishes_genuine_from_forged_callbacks(tmp_path: Path) -> None:
    [block] = blocks("js", GUIDE)
    cases = [[headers(), genuine] for _, headers, genuine in CASES]
    script = tmp_path / "check.js"
    script.write_text(
        f"{block.text}\n"
        f"const body = Buffer.from({json.dumps(BODY.decode())});\n"
        f"for (const [headers, genuine] of {json.dumps(cases)})\n"
        f"  if (isGenuine(body, headers, {json.dumps(SECRET)}) !== genuine) throw new Error(JSON.stringify(headers));\n"
    )
    subprocess.run(["node", str(script)], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("go") is None, reason="go is not installed: its example is not checked")
def test_the_go_check_distinguishes_genuine_from_forged_callbacks(tmp_path: Path) -> None:
    [block] = blocks("go", GUIDE)
    (tmp_path / "check.go").write_text("package main\n\n" + block.text)
    (tmp_path / "main.go").write_text(GO_MAIN)
    environ = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GO111MODULE": "off"}
    subprocess.run(["go", "build", "-o", "check", "check.go", "main.go"], cwd=tmp_path, env=environ, check=True)
    for name, headers, genuine in CASES:  # signed after the build, which may take as long as a signature is good
        said = subprocess.run([tmp_path / "check", BODY, SECRET, *headers().values()], check=True, capture_output=True)
        assert said.stdout.decode() == str(genuine).lower(), name


GO_MAIN = """package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	header := http.Header{}
	for i, name := range []string{"webhook-id", "webhook-timestamp", "webhook-signature"} {
		header.Set(name, os.Args[i+3])
	}
	fmt.Print(isGenuine([]byte(os.Args[1]), header, os.Args[2]))
}
"""


# --- SQL -----------------------------------------------------------------------------------------


def test_the_query_of_the_sqlite_page_works(server: str, tmp_path: Path) -> None:
    import apsw

    [block] = blocks("sql", "docs/operating/sqlite.md")
    with Client() as client:
        client.create("order-17", delay="1h", callback_url="http://127.0.0.1:9000/")
    db = apsw.Connection(f"{tmp_path}/docs.db", flags=apsw.SQLITE_OPEN_READONLY)
    [row] = db.execute(block.text).fetchall()
    db.close()
    assert (row[0], row[2]) == ("order-17", "Scheduled")
