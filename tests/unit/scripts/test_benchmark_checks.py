"""Benchmarks refuse to measure a server that is not theirs, or a disk that is none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from benchmarks import checks
from benchmarks.checks import NotMeasurable, check_disk, check_own, until_answers

_SERVE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_SERVE_IN_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", *arguments], stderr=subprocess.DEVNULL, start_new_session=True
    ) as running:
        try:
            yield running
        finally:
            subprocess.run(["kill", "--", f"-{running.pid}"], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def another_server(port: int) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
class TestServer:
    def test_ones_own_is_measured(self, port: int) -> None:
        with process(_SERVE, str(port)) as server:
            until_answers(f"http://127.0.0.1:{port}/", server)

    def test_a_child_of_ones_own_is_measured(self, port: int) -> None:
        with process(_SERVE_IN_A_CHILD, _SERVE, str(port)) as server:
            until_answers(f"http://127.0.0.1:{port}/", server)

    def test_one_that_cannot_listen_because_of_another_is_not(self, port: int) -> None:
        with another_server(port), process(_SERVE, str(port)) as server:
            server.wait(30)
            with pytest.raises(NotMeasurable, match=f"port {port} has ended with 1: is there another server"):
                until_answers(f"http://127.0.0.1:{port}/", server)

    def test_another_that_answers_while_ones_own_starts_is_not(self, port: int) -> None:
        with (
            another_server(port),
            process("import time; time.sleep(60)") as server,
            pytest.raises(NotMeasurable, match=f"another server answers on port {port}"),
        ):
            until_answers(f"http://127.0.0.1:{port}/", server)

    def test_one_that_does_not_answer_is_told_so(self, port: int) -> None:
        with (
            process("import time; time.sleep(60)") as server,
            pytest.raises(NotMeasurable, match="does not answer within"),
        ):
            until_answers(f"http://127.0.0.1:{port}/", server, within_seconds=0)

    def test_one_on_another_port_is_not_it(self, port: int) -> None:
        with process(_SERVE, str(port)) as server:
            until_answers(f"http://127.0.0.1:{port}/", server)
            with pytest.raises(NotMeasurable, match="another server answers"):
                check_own(server, port + 1)


class TestDisk:
    @pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
    def test_a_folder_in_memory_is_refused(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "_file_system", lambda folder: kind)
        with pytest.raises(NotMeasurable, match=rf"{tmp_path} is in memory \({kind}\).* set TMPDIR"):
            check_disk(tmp_path)

    @pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", ""])
    def test_one_on_a_disk_is_taken(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "_file_system", lambda folder: kind)
        check_disk(tmp_path)

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
    def test_what_the_system_says_is_what_counts(self, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to("/dev/shm")
        with pytest.raises(NotMeasurable, match="tmpfs"):
            check_disk(link)
