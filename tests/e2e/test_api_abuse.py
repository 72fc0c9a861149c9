"""The API under abuse: a real server answers everything it is sent as its contract says, and stays well.

Schemathesis plays the published document against it; Hypothesis makes up JSON, headers and cursors, cuts
and bends the bytes on the wire. No answer is a 5xx, none is undocumented, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from contract import FAR, SPEC, URL, Asker
from fuzz import TIMES, examples
from hypothesis import example, given
from hypothesis import strategies as st
from real_server import RealServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = sorted(path for path in json.loads(SPEC.read_bytes())["paths"] if path.startswith("/api/"))
TAKE_AN_EMPTY_BODY = ["flows/list", "namespaces/list", "cluster/status", "cluster/map"]

# --- the published document ----------------------------------------------------------------------

# Not `positive_data_acceptance`: rules between fields (one of executeAt and delay) are no part of a JSON Schema here.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,missing_required_header,unsupported_method,allow_header_conformance,"
    "use_after_free,ensure_resource_availability"
)


async def schemathesis(server: RealServer, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and report of a run in a process of its own, in a folder where it may leave its traces."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(SPEC), "--url", server.url),
        *("--max-examples", str(25 * TIMES), "--no-color"),
        *(("--seed", "8463", "--generation-deterministic") if TIMES == 1 else ("--generation-database", "none")),
        *options,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(120 * TIMES):
            report, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, report.decode()


async def test_schemathesis_finds_no_server_error_and_no_undocumented_answer(
    server: RealServer, tmp_path: Path
) -> None:
    code, report = await schemathesis(server, tmp_path, "--checks", CHECKS)
    assert code == 0, report
    assert f"Tested: {len(PATHS) + 3}" in report, report  # and the three that are read with GET


async def test_schemathesis_finds_no_bad_request_that_is_taken(server: RealServer, tmp_path: Path) -> None:
    """Not of createMany and deleteMany, which answer for each item by itself."""
    options = ("--checks", "negative_data_rejection", "--mode", "negative", "--phases", "coverage,fuzzing")
    code, report = await schemathesis(server, tmp_path, *options, "--exclude-path-regex", "Many$")
    assert code == 0, report


# --- JSON that no client would send --------------------------------------------------------------

FIELDS = sorted(
    {
        name
        for schema in json.loads(SPEC.read_bytes())["components"]["schemas"].values()
        for name in schema.get("properties", ())
    }
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-2, 20_000),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(["default", "a", "1s", FAR, URL, "whsec_…abcd", "whsec_" + "A" * 32, "scheduled", "inFlight"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=9)), inner)
    ),
    max_leaves=8,
)
# A name that exists often enough for the request to get past its first check.
OBJECTS = st.builds(
    lambda fields, key: fields | key,
    st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.sampled_from(FIELDS), st.text(max_size=9)), VALUES),
    st.sampled_from([{}, {"timerId": "a"}, {"timerId": "a", "delay": "1d", "callbackUrl": URL}, {"namespace": "a"}]),
)


@given(path=st.sampled_from(PATHS), body=st.one_of(OBJECTS, OBJECTS, VALUES))
@examples(500)
async def test_any_json_is_answered_as_the_contract_says(api: Asker, path: str, body: Any) -> None:
    status, problem = await api.ask(path.removeprefix("/api/v1/"), body)
    assert status < 500, problem


@given(path=st.sampled_from(PATHS), body=st.binary(max_size=40))
@examples(150)
async def test_any_bytes_are_answered_as_the_contract_says(server: RealServer, path: str, body: bytes) -> None:
    answer = await server.post(path.removeprefix("/api/v1/"), body)
    assert answer.status in (200, 400), answer.body
    if answer.status == 200:
        assert path.removeprefix("/api/v1/") in TAKE_AN_EMPTY_BODY


CURSORS = st.one_of(
    st.text(max_size=40),
    st.binary(max_size=40).map(lambda raw: base64.urlsafe_b64encode(raw).decode()),
    st.lists(st.one_of(st.integers(), st.integers(-1, 2), VALUES), max_size=6).map(
        lambda parts: base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()
    ),
)


@given(cursor=CURSORS)
@example(cursor=base64.urlsafe_b64encode(b"[" * 100_000).decode())
@example(cursor=base64.urlsafe_b64encode(b"[0,1,2,3," + b"[" * 100_000).decode())
@example(cursor=base64.urlsafe_b64encode(b"[0,9223372036854775808,0,0]").decode())
@examples(200)
async def test_a_cursor_that_was_made_up_is_refused_or_leads_somewhere(api: Asker, cursor: str) -> None:
    status, answer = await api.ask("timers/list", {"cursor": cursor})
    assert status == 200 or (status, answer["field"]) == (400, "cursor")


# --- headers -------------------------------------------------------------------------------------

HEADER_VALUES = st.one_of(
    st.from_regex(rb"[ -~\t\x80-\xff]{0,60}", fullmatch=True),
    st.sampled_from([b"http://[", b"http://[::1", b"http://]", b"http://127.0.0.1:99999999", b"null", b"Bearer"]),
    st.sampled_from([b"Bearer \xff", b"application/json; charset=utf-16", b"application/x+json", b"100-continue"]),
)
HEADER_NAMES = st.one_of(
    st.sampled_from([b"origin", b"authorization", b"content-type", b"accept", b"expect", b"content-encoding", b"te"]),
    st.sampled_from([b"cookie", b"range", b"if-match", b"x-forwarded-for", b"traceparent", b"upgrade", b"connection"]),
)


@given(headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), min_size=1, max_size=4))
@example(headers=[(b"origin", b"http://[")])
@example(headers=[(b"content-type", b"text/plain")])
@example(headers=[(b"expect", b"100-continue"), (b"upgrade", b"h2c"), (b"connection", b"upgrade")])
@examples(250)
async def test_no_header_brings_the_server_down(server: RealServer, headers: list[tuple[bytes, bytes]]) -> None:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    path = "/api/v1/timers/get"
    (status,) = statuses(await talk(server, [request(path, b'{"timerId":"a"}', lines)]))
    assert status in documented(path)
    assert status < 500


def documented(path: str) -> set[int]:
    return {int(status) for status in json.loads(SPEC.read_bytes())["paths"][path]["post"]["responses"]}


# --- bytes on the wire ---------------------------------------------------------------------------

WITHIN_SECONDS = 10  # an answer or a close: far more than either takes, far less than a timeout of the server


def request(path: str, body: bytes | None = None, lines: bytes = b"") -> bytes:
    if body is None:
        return b"GET %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % (path.encode(), lines)
    length = b"content-length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\n%s%s\r\n%s" % (path.encode(), length, lines, body)


def chunked(path: str, *chunks: bytes, trailers: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n%s\r\n" % trailers


async def talk(server: RealServer, parts: Sequence[bytes]) -> bytes:
    """Sends the parts, each in a packet of its own as far as the system allows, then the end; all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()

    async with asyncio.timeout(WITHIN_SECONDS):
        sending = asyncio.create_task(send())
        try:
            received = await reader.read()
        except ConnectionError:
            received = b""  # closed without a word
        finally:
            await asyncio.gather(sending, return_exceptions=True)  # it may have been cut short by a refusal
            writer.close()
    return received


def statuses(received: bytes) -> list[int]:
    """Of all answers but `100 Continue`."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received) if status != b"100"]


def without_dates(received: bytes) -> bytes:
    return re.sub(rb"\r\ndate: [^\r]*", b"", received)


GET = b'{"timerId":"nobody"}'
LARGE = b'{"timerId":"nobody","unknown":"' + b"x" * 30_000 + b'"}'
STREAM = b"".join(
    [
        request("/healthz"),
        request("/api/v1/timers/get", GET),
        b"\r\n",  # before a request line, which is allowed
        request("/api/v1/timers/get", LARGE),
        chunked("/api/v1/timers/get", GET[:7], GET[7:8], GET[8:], trailers=b"x-checksum: 17\r\n"),
        request("/api/v1/timers/get", LARGE, b"x-long: " + b"y" * 3_000 + b"\r\n"),
        request("/nowhere?a=b"),
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://h/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
        request("/api/v1/timers/get", GET, b"connection: upgrade\r\nupgrade: websocket\r\n"),
        request("/api/v1/timers/get", LARGE, b"x-other: " + b"z" * 5_000 + b"\r\n"),
        request("/api/v1/timers/get", b"{", b"connection: close\r\n"),
    ]
)
ANSWERS = [200, 404, 400, 404, 400, 404, 404, 200, 404, 400, 400]
CUTS = st.lists(st.integers(0, len(STREAM)), max_size=30)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends) if start < end]


@pytest.fixture(scope="module")
def in_one_piece() -> dict[str, bytes]:
    return {}


@given(cuts=CUTS)
@example(cuts=[STREAM.index(LARGE) - 40, STREAM.index(LARGE) + len(LARGE) + 30])
@example(cuts=list(range(0, len(STREAM), 1_000)))
@example(cuts=list(range(400)))
@examples(120)
async def test_a_pipelined_stream_is_answered_alike_however_it_is_cut(
    server: RealServer, in_one_piece: dict[str, bytes], cuts: list[int]
) -> None:
    if not in_one_piece:
        in_one_piece["answers"] = without_dates(await talk(server, [STREAM]))
        assert statuses(in_one_piece["answers"]) == ANSWERS
    assert without_dates(await talk(server, pieces(STREAM, cuts))) == in_one_piece["answers"]


async def test_a_large_request_between_two_cut_heads_is_not_taken_for_a_large_head(server: RealServer) -> None:
    """What arrives at once may end one request, hold a large one and begin a third: only heads count as heads."""
    small, large = request("/healthz"), request("/api/v1/timers/get", LARGE)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(WITHIN_SECONDS):
        for sent in (small + large[:30], large[30:] + small[:20], small[20:]):
            writer.write(sent)
            assert await answered(reader) in (200, 400)  # so all that was sent has been read
    writer.close()


async def answered(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    return statuses(head)[0]


SHORT = b"".join(
    [
        request("/api/v1/timers/get", GET, b"content-type: application/json\r\nexpect: 100-continue\r\n"),
        chunked("/api/v1/timers/get", GET[:9], GET[9:], trailers=b"x: y\r\n"),
        request("/healthz"),
        request("/api/v1/timers/get", GET),
    ]
)
TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"\xff",
    b"0",
    b"-1",
    b"99999999999999999999",
    b"HTTP/2.0",
    b"HTTP/1.0",
]
TOKENS += [b"transfer-encoding: chunked\r\n", b"content-length: 5\r\n", b"\r\n\r\n", b";ext=1", b"GET / HTTP/1.1\r\n"]
TOKENS += [
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"x: " + b"y" * 20_000 + b"\r\n",
    b"fffffff",
]
MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, len(SHORT)), st.integers(0, 12), st.one_of(st.sampled_from(TOKENS), st.binary(max_size=6))
    ),
    min_size=1,
    max_size=4,
)


def mutated(stream: bytes, mutations: list[tuple[int, int, bytes]]) -> bytes:
    for at, cut, put in mutations:
        stream = stream[:at] + put + stream[at + cut :]
    return stream


@given(mutations=MUTATIONS, cuts=st.lists(st.integers(0, len(SHORT)), max_size=3))
@examples(400)
async def test_a_bent_stream_is_answered_or_closed_in_time(
    server: RealServer, mutations: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    received = await talk(server, pieces(mutated(SHORT, mutations), cuts))
    assert not received or received.startswith(b"HTTP/1.1 ")
    assert all(status < 500 or status in (501, 505) for status in statuses(received)), received


@given(stream=st.binary(max_size=200))
@examples(100)
async def test_any_bytes_are_answered_or_closed_in_time(server: RealServer, stream: bytes) -> None:
    assert statuses(await talk(server, [stream])) in ([], [400])


async def test_trailers_are_no_headers_and_have_an_end(server: RealServer) -> None:
    path, body = "/api/v1/timers/get", GET
    assert statuses(await talk(server, [chunked(path, body, trailers=b"content-type: text/plain\r\n")])) == [404]
    many = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 90) for number in range(400))
    long = b"x: " + b"y" * 40_000 + b"\r\n"
    for trailers in (many, long):
        sent = chunked(path, body, trailers=trailers)
        assert statuses(await talk(server, pieces(sent, list(range(0, len(sent), 4_000))))) == [431]


async def test_chunks_of_a_byte_hold_no_more_memory_than_they_bring(server: RealServer) -> None:
    """Two million of them, of two bytes each, and not yet the end: kept one by one they took twenty times as much."""
    before = resident_bytes(server.pid)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /api/v1/timers/createMany HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(200):
        writer.write(b"2\r\nxx\r\n" * 10_000)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    async with asyncio.timeout(30):
        assert b" 400 Bad Request\r\n" in await reader.readuntil(b"\r\n\r\n")
    grown = peak_bytes(server.pid) - before
    writer.close()
    assert grown < 60_000_000, grown


def resident_bytes(pid: int) -> int:
    return _status_kib(pid, "VmRSS") * 1_024


def peak_bytes(pid: int) -> int:
    return _status_kib(pid, "VmHWM") * 1_024


def _status_kib(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("only Linux tells the memory of a process in /proc")
    match = re.search(rf"{name}:\s+(\d+) kB", status.read_text())
    assert match is not None
    return int(match[1])


async def test_the_server_is_as_well_as_before(api: Asker, server: RealServer) -> None:
    await api.ok("timers/create", timerId="a", delay="1d", callbackUrl=URL)
    assert (await api.timer(timerId="a"))["state"] == "scheduled"
    assert (await server.read("/readyz")).status == 200
    log = server.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
