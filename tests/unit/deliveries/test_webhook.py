"""Webhook delivery: what a receiver gets, and what each kind of answer, silence and refusal becomes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from open_files import no_more_files
from raw_server import serving

from duetime import __version__
from duetime.clock import SystemClock
from duetime.config import Config, load_config
from duetime.deliveries.egress import LOOPBACK, Resolver
from duetime.deliveries.webhook import Webhook
from duetime.delivery import Attempt, Deliverer
from duetime.domain.instants import parse_instant
from duetime.domain.settle import AttemptResult, Contact, Settlement, settle
from duetime.domain.timer import Extras, Namespace, Timer, uuid_of
from duetime.errors import SetupError
from duetime.http.client import HttpClient, parse_target
from duetime.signing import SignatureError, new_secret, verify

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n" + b'{"ok":true}'
FIRED_AT_MS = parse_instant("2027-01-01T09:00:00.012Z")
NAMESPACE = Namespace(name="orders", num_shards=16, created_at_ms=0, callback_timeout_seconds=5)


class FixedClock:
    def wall_ms(self) -> int:
        return FIRED_AT_MS

    def boot_ms(self) -> int:
        return 0


class Receiver:
    """Answers each request with what `answer` makes of it, and keeps the requests. None: closes instead."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[], Awaitable[bytes | None]] | bytes = OK
        self.connections = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
                request_line, *lines = head.strip().split("\r\n")
                assert request_line == "POST /hook?x=1 HTTP/1.1"
                headers = dict(line.split(": ", 1) for line in lines)
                assert len(headers) == len(lines), "no header twice"
                self.requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
                answer = self.answer if isinstance(self.answer, bytes) else await self.answer()
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await receiver.handle(reader, writer)
        tasks.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?x=1"
    yield receiver
    server.close()
    running = tuple(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def config(**delivery: object) -> Config:
    return load_config(environ={}, flags={f"delivery.{key}": value for key, value in delivery.items()})


@asynccontextmanager
async def webhooks(
    *, resolver: Resolver | None = None, loopback: bool = True, **delivery: Any
) -> AsyncIterator[Webhook]:
    webhook = Webhook(config(**delivery), FixedClock(), loopback_allowed=loopback, resolver=resolver)
    yield webhook
    await webhook.close()


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    async with webhooks() as webhook:
        yield webhook


def timer(url: str, **fields: Any) -> Timer:
    high, low = uuid_of("orders", "order-17")
    defaults: dict[str, Any] = {
        "execute_at_ms": FIRED_AT_MS,
        "scheduled_at_ms": parse_instant("2027-01-01T09:00:00Z"),
        "generation": 5 << 32,
        "payload": '{"order": 17,  "n":1.50}',
    }
    return Timer(
        namespace="orders",
        timer_id="order-17",
        uuid_high=high,
        uuid_low=low,
        created_at_ms=0,
        callback_url=url,
        **(defaults | fields),
    )


def attempt(
    timer: Timer, namespace: Namespace = NAMESPACE, begin: Callable[[], int | None] = lambda: FIRED_AT_MS
) -> Attempt:
    return Attempt(timer, namespace, "3.9", begin)


# --- what is sent --------------------------------------------------------------------------------


async def test_the_body_is_exactly_that_of_the_design(webhook: Webhook, receiver: Receiver) -> None:
    result = await webhook.deliver(attempt(timer(receiver.url, correlation_id='c"1', attempts=2)))
    assert result == AttemptResult(Contact.ANSWERED, 200, b'{"ok":true}')
    assert receiver.requests[0][1] == (
        b'{"namespace":"orders","timerId":"order-17","scheduledAt":"2027-01-01T09:00:00.000Z",'
        b'"executeAt":"2027-01-01T09:00:00.012Z",'
        b'"firedAt":"2027-01-01T09:00:00.012Z","attempt":3,"payload":{"order": 17,  "n":1.50},"correlationId":"c\\"1"}'
    )


async def test_payload_and_correlation_are_null_when_there_are_none(webhook: Webhook, receiver: Receiver) -> None:
    await webhook.deliver(attempt(timer(receiver.url, payload=None)))
    body = msgspec.json.decode(receiver.requests[0][1])
    assert list(body) == [
        "namespace",
        "timerId",
        "scheduledAt",
        "executeAt",
        "firedAt",
        "attempt",
        "payload",
        "correlationId",
    ]
    assert (body["payload"], body["correlationId"], body["attempt"]) == (None, None, 1)


async def test_the_headers_are_those_of_the_design(webhook: Webhook, receiver: Receiver) -> None:
    due = timer(receiver.url)
    await webhook.deliver(attempt(due))
    headers, body = receiver.requests[0]
    traceparent = headers.pop("traceparent")
    assert headers == {
        "host": receiver.url.split("/")[2],
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": f"Duetime/{__version__}",
        "webhook-id": due.delivery_id,
        "webhook-timestamp": str(FIRED_AT_MS // 1_000),
        "idempotency-key": due.delivery_id,
        "duetime-fence": "3.9",
        "content-length": str(len(body)),
    }
    version, trace, span, flags = traceparent.split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")
    assert int(trace, 16)
    assert int(span, 16)


async def test_retries_keep_the_id_and_the_trace_and_a_new_occurrence_changes_both(
    webhook: Webhook, receiver: Receiver
) -> None:
    due = timer(receiver.url)
    for one in (due, timer(receiver.url, attempts=1), timer(receiver.url, extras=Extras(occurrence=1))):
        await webhook.deliver(attempt(one))
    assert [h["traceparent"][-7:] for h, _ in receiver.requests] == ["0001-01", "0002-01", "0001-01"]
    first, retry, later = ((h["webhook-id"], *h["traceparent"].split("-")[1:3]) for h, _ in receiver.requests)
    assert (first[0], first[1]) == (retry[0], retry[1])
    assert first[2] != retry[2]
    assert first[0] != later[0]
    assert first[1] != later[1]


async def test_a_callback_is_signed_with_every_secret_of_the_namespace(webhook: Webhook, receiver: Receiver) -> None:
    secrets = (new_secret(), new_secret())
    namespace = msgspec.structs.replace(NAMESPACE, signing_secrets=secrets)
    for _ in range(2):
        await webhook.deliver(attempt(timer(receiver.url), namespace))
    for headers, body in receiver.requests:
        for secret in secrets:
            assert verify(body, headers, [secret], now_s=FIRED_AT_MS / 1_000) == headers["webhook-id"]
    rotated = msgspec.structs.replace(namespace, signing_secrets=(new_secret(),), revision=1)
    await webhook.deliver(attempt(timer(receiver.url), rotated))
    headers, body = receiver.requests[2]
    verify(body, headers, rotated.signing_secrets, now_s=FIRED_AT_MS / 1_000)


async def test_after_each_rotation_of_secrets_a_callback_has_the_signatures_of_those_and_of_no_others(
    webhook: Webhook, receiver: Receiver
) -> None:
    """Also of secrets whose keys are known from before, and after a namespace without secrets."""
    old, new, other = (new_secret() for _ in range(3))
    rotations: list[tuple[str, ...]] = [(old,), (old, new), (new,), (), (new, old), (other,), (old,), (new,)]
    for revision, secrets in enumerate(rotations):
        namespace = msgspec.structs.replace(NAMESPACE, signing_secrets=secrets, revision=revision)
        await webhook.deliver(attempt(timer(receiver.url), namespace))
        headers, body = receiver.requests.pop()
        assert len(headers.get("webhook-signature", "").split()) == len(secrets)
        for secret in (old, new, other):
            if secret in secrets:
                verify(body, headers, [secret], now_s=FIRED_AT_MS / 1_000)
            else:
                with pytest.raises(SignatureError):
                    verify(body, headers, [secret], now_s=FIRED_AT_MS / 1_000)


async def test_the_timers_own_headers_are_sent_and_bad_ones_in_an_old_row_are_not(
    webhook: Webhook, receiver: Receiver
) -> None:
    await webhook.deliver(attempt(timer(receiver.url, extras=Extras(headers={"Authorization": "Bearer x y"}))))
    assert receiver.requests[0][0]["Authorization"] == "Bearer x y"
    for bad in ({"Host": "evil"}, {"WEBHOOK-ID": "x"}, {"a": "b\r\nc: d"}, {"Content-Length": "0"}):
        await webhook.deliver(attempt(timer(receiver.url, extras=Extras(headers=bad))))
        headers = receiver.requests[-1][0]
        assert not set(bad) & set(headers)
        assert "c" not in headers


async def test_instants_are_formatted_alike_over_a_day_of_odd_times(webhook: Webhook, receiver: Receiver) -> None:
    for at in ("1970-01-01T00:00:00.000Z", "2000-02-29T23:59:59.999Z", "2000-02-29T23:59:59.001Z"):
        for field, name in (("scheduled_at_ms", "scheduledAt"), ("execute_at_ms", "executeAt")):
            await webhook.deliver(attempt(timer(receiver.url, **{field: parse_instant(at)})))
            assert msgspec.json.decode(receiver.requests[-1][1])[name] == at


# --- begin ---------------------------------------------------------------------------------------


async def test_nothing_is_sent_when_begin_declines(webhook: Webhook, receiver: Receiver) -> None:
    assert (await webhook.deliver(attempt(timer(receiver.url), begin=lambda: None))).contact is Contact.NOT_SENT
    await webhook.deliver(attempt(timer(receiver.url)))
    assert len(receiver.requests) == 1


async def test_a_callback_sent_once_and_not_allowed_a_second_time_was_an_attempt(
    webhook: Webhook, receiver: Receiver
) -> None:
    """The keep-alive race, and the lease is over when it should be sent again: NOT_SENT would be a lie."""
    await webhook.deliver(attempt(timer(receiver.url)))

    async def close() -> None:
        return None

    receiver.answer = close
    times = iter([FIRED_AT_MS, None])
    result = await webhook.deliver(attempt(timer(receiver.url), begin=lambda: next(times)))
    assert (result.contact, result.error) == (Contact.BROKEN, "connection closed before the answer")
    assert len(receiver.requests) == 2


async def test_the_keep_alive_race_is_repaired(webhook: Webhook, receiver: Receiver) -> None:
    await webhook.deliver(attempt(timer(receiver.url)))
    answers = iter([None, OK])

    async def first_close() -> bytes | None:
        return next(answers)

    receiver.answer = first_close
    assert (await webhook.deliver(attempt(timer(receiver.url)))).status == 200
    assert (len(receiver.requests), receiver.connections) == (3, 2)


# --- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "result"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", AttemptResult(Contact.ANSWERED, 204)),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\nno", AttemptResult(Contact.ANSWERED, 500, b"no")),
        (
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 302),
        ),
        (
            b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 429, b"", 7_000),
        ),
        (
            b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 2027 09:01:00 GMT\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503, b"", 59_988),
        ),
        (
            b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 2027 09:01:00 -0000\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503, b"", 59_988),
        ),
        (
            b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 1999 00:00:00 GMT\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503, b"", 0),
        ),
        (b"HTTP/1.1 503 X\r\nretry-after: soon\r\ncontent-length: 0\r\n\r\n", AttemptResult(Contact.ANSWERED, 503)),
        (
            b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 2027 11:01:00 +0200\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503, b"", 59_988),
        ),
        (
            b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 99999999999 09:01:00 GMT\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503),
        ),
        (b"HTTP/1.1 503 X\r\nx-sequences: 7\r\ncontent-length: 0\r\n\r\n", AttemptResult(Contact.ANSWERED, 503)),
        (
            b"HTTP/1.1 503 X\r\nretry-after:  7 \t\r\ncontent-length: 0\r\n\r\n",
            AttemptResult(Contact.ANSWERED, 503, b"", 7_000),
        ),
        (b"HTTP/1.1 503 X\r\nretry-after: -5\r\ncontent-length: 0\r\n\r\n", AttemptResult(Contact.ANSWERED, 503)),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000,
            AttemptResult(Contact.ANSWERED, 200, b"x" * 65_536, truncated=True),
        ),
        (b"rubbish\r\n", AttemptResult(Contact.BROKEN, error="malformed answer: Expected HTTP/, RTSP/ or ICE/")),
    ],
)
async def test_an_answer_becomes_an_outcome(
    webhook: Webhook, receiver: Receiver, raw: bytes, result: AttemptResult
) -> None:
    receiver.answer = raw
    assert await webhook.deliver(attempt(timer(receiver.url))) == result


async def test_a_time_of_an_unknown_zone_is_utc_wherever_this_machine_is(
    webhook: Webhook, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        receiver.answer = b"HTTP/1.1 503 X\r\nretry-after: Fri, 01 Jan 2027 09:01:00 -0000\r\ncontent-length: 0\r\n\r\n"
        assert (await webhook.deliver(attempt(timer(receiver.url)))).retry_after_ms == 59_988
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_receivers_are_checked_against_the_authorities_of_the_configuration_too(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("TLS IS NOT TESTED: there is no openssl to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    await asyncio.to_thread(subprocess.run, command.split(), check=True, capture_output=True)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await reader.read()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with serving(handler, context) as server:
        url = server.url.replace("http://", "https://")
        async with webhooks(ca_file=str(certificate)) as webhook:
            assert (await webhook.deliver(attempt(timer(url)))).status == 200
        async with webhooks() as webhook:
            result = await webhook.deliver(attempt(timer(url)))
            assert result.contact is Contact.UNREACHABLE
            assert "not accepted" in str(result.error)


def padded(size: int, ok: str = "false") -> bytes:
    """An object of exactly `size` bytes that says ok at its end."""
    start, end = b'{"filler":"', f'","ok":{ok}}}'.encode()
    return start + b"x" * (size - len(start) - len(end)) + end


def with_length(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes) -> bytes:
    pieces = [body[start : start + 5_000] for start in range(0, len(body), 5_000)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def until_close(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + body


@pytest.mark.parametrize("framed", [with_length, chunked, until_close])
async def test_case_13_an_object_larger_than_the_limit_is_never_a_success(
    webhook: Webhook, framed: Callable[[bytes], bytes]
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(framed(body))
        writer.close()  # after everything was written: this ends a body that has no length
        await writer.wait_closed()

    async with serving(handler) as server:
        for ok in ("true", "false"):
            body = padded(65_536, ok)
            assert (await settled(webhook, server.url)).succeeded is (ok == "true")
            body = padded(65_537, ok)
            larger = await settled(webhook, server.url)
            assert not larger.succeeded
            assert larger.rearmed is not None
            assert (
                larger.rearmed.extras.last_error == "the answer is larger than 65536 bytes and was not read to the end"
            )


async def settled(webhook: Webhook, url: str) -> Settlement:
    called = timer(url)
    result = await webhook.deliver(attempt(called))
    return settle(called, result, NAMESPACE, started_at_ms=FIRED_AT_MS, now_ms=FIRED_AT_MS, jitter=lambda: 0.5)


@pytest.mark.parametrize(("of_timer", "of_namespace"), [(1, 60), (None, 1)])
async def test_case_12_a_receiver_that_hangs_is_given_up_at_the_timers_or_the_namespaces_deadline(
    webhook: Webhook, receiver: Receiver, of_timer: int | None, of_namespace: int
) -> None:
    async def hang() -> bytes:
        await asyncio.Event().wait()
        return b""

    receiver.answer = hang
    namespace = msgspec.structs.replace(NAMESPACE, callback_timeout_seconds=of_namespace)
    result = await webhook.deliver(attempt(timer(receiver.url, callback_timeout_seconds=of_timer), namespace))
    assert result == AttemptResult(Contact.BROKEN, error="no answer within 1 s")


async def test_a_dead_destination_is_an_attempt_without_contact_and_has_a_reason(webhook: Webhook) -> None:
    listening = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    result = await webhook.deliver(attempt(timer(f"http://127.0.0.1:{port}/")))
    assert result == AttemptResult(Contact.UNREACHABLE, error=f"connection refused by 127.0.0.1:{port}")


async def test_a_timers_own_deadline_that_ends_connecting_says_nothing_about_the_origin(webhook: Webhook) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await reader.read()

    async with serving(silent) as server:
        called = timer(server.url.replace("http://", "https://"), callback_timeout_seconds=1)
        result = await webhook.deliver(attempt(called))
        assert result == AttemptResult(Contact.TIMED_OUT, error="connect timeout after 1 s")
    settled = settle(called, result, NAMESPACE, started_at_ms=FIRED_AT_MS, now_ms=FIRED_AT_MS, jitter=lambda: 0.5)
    assert settled.rearmed is not None
    assert settled.rearmed.attempts == 1


async def test_a_timers_own_deadline_that_ends_a_look_up_says_nothing_about_the_origin() -> None:
    async def lookup(host: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    async with webhooks(resolver=Resolver(LOOPBACK, lookup=lookup)) as webhook:
        result = await webhook.deliver(attempt(timer("http://slow.example/", callback_timeout_seconds=1)))
        error = "cannot resolve slow.example: no answer within 1 s"
        assert result == AttemptResult(Contact.TIMED_OUT, error=error)


async def test_a_name_that_does_not_exist_is_an_attempt_without_contact(webhook: Webhook) -> None:
    result = await webhook.deliver(attempt(timer("http://nowhere.invalid/")))
    assert result.contact is Contact.UNREACHABLE
    assert (result.error or "").startswith("cannot resolve nowhere.invalid: ")


async def test_a_target_that_the_policy_forbids_is_refused_whatever_was_stored(receiver: Receiver) -> None:
    async def lookup(host: str) -> Sequence[str]:
        return ["127.0.0.1"]

    async with webhooks(loopback=False, resolver=Resolver(lookup=lookup)) as webhook:
        result = await webhook.deliver(attempt(timer(receiver.url)))
        assert (result.contact, result.error) == (
            Contact.REFUSED,
            "callbackUrl must not point at 127.0.0.1, a loopback address (delivery.allow_networks)",
        )
        by_name = await webhook.deliver(attempt(timer("http://inside.example/")))
        assert by_name.contact is Contact.REFUSED
        assert "inside.example is 127.0.0.1, a loopback address" in (by_name.error or "")
    assert not receiver.requests


async def test_a_bug_is_a_broken_attempt_and_logged_once(
    webhook: Webhook, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("duetime"), "propagate", True)

    def begin() -> int:
        raise ZeroDivisionError

    for _ in range(3):
        result = await webhook.deliver(attempt(timer(receiver.url), begin=begin))
        assert result == AttemptResult(Contact.BROKEN, error="internal error: ZeroDivisionError")
    assert len(caplog.records) == 1
    assert (await webhook.deliver(attempt(timer(receiver.url)))).status == 200


async def test_case_15_a_redirect_is_not_followed(webhook: Webhook, receiver: Receiver) -> None:
    receiver.answer = b"HTTP/1.1 307 Go\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % receiver.url.encode()
    assert (await webhook.deliver(attempt(timer(receiver.url)))).status == 307
    assert len(receiver.requests) == 1


# --- targets -------------------------------------------------------------------------------------


async def test_it_is_a_deliverer() -> None:
    async with webhooks() as webhook:
        deliverer: Deliverer = webhook
        deliverer.check("https://shop.example/hooks", "orders")


@pytest.mark.parametrize(
    ("url", "destination"),
    [
        ("https://Shop.Example/a", "https://shop.example:443"),
        ("https://shop.example:443/b?c", "https://shop.example:443"),
        ("http://shop.example/a", "http://shop.example:80"),
        ("http://[2606:4700::0:1]:8080/", "http://[2606:4700::1]:8080"),
        ("not a url", "not a url"),
    ],
)
async def test_targets_of_one_origin_are_one_destination(webhook: Webhook, url: str, destination: str) -> None:
    for _ in range(2):
        assert webhook.origin(url) == destination


async def test_check_raises_what_is_wrong_each_time() -> None:
    async with webhooks(allow_http=False, loopback=False) as webhook:
        webhook.check("https://shop.example/", "orders")
        for _ in range(2):
            with pytest.raises(ValueError, match="must start with https://"):
                webhook.check("http://shop.example/", "orders")
            with pytest.raises(ValueError, match=r"must not point at 127\.0\.0\.1, a loopback address"):
                webhook.check("https://0x7f.1/", "orders")
            with pytest.raises(ValueError, match="user name"):
                webhook.check("https://u:p@shop.example/", "orders")


async def test_allowed_networks_and_loopback_are_let_through() -> None:
    async with webhooks(allow_networks=["10.1.0.0/16"], loopback=False) as webhook:
        webhook.check("http://10.1.2.3/", "orders")
        webhook.check("http://[::ffff:10.1.2.3]/", "orders")
        webhook.check("http://mylocalhost/", "orders")
        for url in ("http://10.2.0.1/", "http://localhost/", "http://127.0.0.1/"):
            with pytest.raises(ValueError, match="must not point at"):
                webhook.check(url, "orders")
    async with webhooks() as webhook:
        for url in ("http://localhost:8080/", "http://127.0.0.1/", "http://[::1]/"):
            webhook.check(url, "orders")


async def test_what_is_known_of_origins_is_bounded(webhook: Webhook) -> None:
    for number in range(10_000):
        webhook.check(f"https://shop.example/{number}", "orders")
        webhook.check(f"https://shop{number}.example/", "orders")
    assert len(webhook._origins) + len(webhook._older_origins) <= 2 * 4_096


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"allow_networks": ["10.0.0.1/8"]}, "delivery.allow_networks: '10.0.0.1/8' is not a network"),
        ({"ca_file": "no/such/file.pem"}, "delivery.ca_file"),
        ({"user_agent": "a\r\nb: c"}, "delivery.user_agent"),
    ],
)
def test_a_wrong_setting_stops_the_start(setting: dict[str, Any], problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        Webhook(config(**setting), SystemClock(), loopback_allowed=True)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost.", "a.localhost", "a.LOCALHOST.", "127.0.0.1", "[::1]", "127.1"]
)
async def test_the_machine_itself_is_refused_by_name_when_a_timer_is_created(host: str) -> None:
    async with webhooks(loopback=False) as webhook:
        with pytest.raises(ValueError, match="a loopback address"):
            webhook.check(f"http://{host}/hook", "orders")
        for other in ("localhost.example", "notlocalhost"):
            webhook.check(f"http://{other}/hook", "orders")
    async with webhooks(loopback=True) as webhook:
        webhook.check(f"http://{host}/hook", "orders")


async def test_the_resolver_of_a_webhook_is_closed_with_it() -> None:
    async def lookup(host: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    resolver = Resolver(lookup=lookup)
    webhook = Webhook(config(), FixedClock(), loopback_allowed=True, resolver=resolver)
    call = asyncio.create_task(webhook.deliver(attempt(timer("http://a.example/hook"))))
    while not resolver._lookups:
        await asyncio.sleep(0)
    (looking_up,) = resolver._lookups.values()
    async with asyncio.timeout(10):
        await webhook.close()
    assert looking_up.cancelled()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_the_client_of_a_webhook_is_closed_with_it(receiver: Receiver) -> None:
    webhook = Webhook(config(), FixedClock(), loopback_allowed=True)
    await webhook.deliver(attempt(timer(receiver.url)))
    await webhook.close()
    result = await webhook.deliver(attempt(timer(receiver.url)))
    assert result == AttemptResult(Contact.NOT_SENT)


async def test_a_resolver_can_be_shared_with_a_client_of_ones_own(receiver: Receiver) -> None:
    resolver = Resolver(LOOPBACK)
    client = HttpClient(resolve=resolver)
    answer = await client.request("POST", receiver.url.replace("127.0.0.1", "localhost"), timeout_ms=5_000)
    assert answer.status == 200
    await client.close()
    await resolver.close()


# --- what is known by origin ---------------------------------------------------------------------

BAD_PATHS = [
    "/a b",
    "/a\r\nx: y",
    "/a\nb",
    "/a\tb",
    "/\x00",
    "/\x7f",
    "/ü",
    "/#part",
    "/a#",
    "?a b",
    "?\r\n",
    "/" + "a" * 2_048,
]
GOOD_PATHS = ["", "/", "/a", "/a?b=c&d", "?x=1", "?x=/y", "/%20/~!$'()*,;:@", "/a//b/../c", "/?a?b", "/" + "a" * 1_900]


@pytest.mark.parametrize("path", BAD_PATHS + GOOD_PATHS)
@pytest.mark.parametrize("known", [True, False])
async def test_a_url_of_a_known_origin_is_checked_like_any_other(webhook: Webhook, path: str, known: bool) -> None:
    if known:
        webhook.check("https://shop.example/", "orders")
    url = f"https://shop.example{path}"
    if path in GOOD_PATHS:
        webhook.check(url, "orders")
        assert webhook.origin(url) == "https://shop.example:443"
        return
    with pytest.raises(ValueError) as expected:
        parse_target(url)
    with pytest.raises(ValueError) as caught:
        webhook.check(url, "orders")
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("path", BAD_PATHS)
async def test_what_could_end_the_first_line_of_a_request_is_never_sent_whatever_was_stored(
    webhook: Webhook, receiver: Receiver, path: str
) -> None:
    await webhook.deliver(attempt(timer(receiver.url)))
    result = await webhook.deliver(attempt(timer(receiver.url.removesuffix("/hook?x=1") + path), begin=never_begun))
    assert result.contact is Contact.REFUSED
    assert (result.error or "").startswith("callbackUrl must ")
    assert len(receiver.requests) == 1


def never_begun() -> int | None:
    raise AssertionError("nothing may be sent")


@given(st.text("/?#:@[] a1.\r\n\\%é", max_size=20), st.sampled_from(["http://", "https://", "http:/", "https://a", ""]))
def test_a_url_is_accepted_if_and_only_if_it_can_be_parsed(rest: str, start: str) -> None:
    webhook = Webhook(config(), FixedClock(), loopback_allowed=False, resolver=Resolver())
    for origin in ("http://a", "https://a", "https://a1", "http://a:1"):
        webhook.check(origin, "orders")
    url = start + rest
    wrong = ""
    try:
        target = parse_target(url)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        with pytest.raises(ValueError) as caught:
            webhook.check(url, "orders")
        assert str(caught.value) == wrong
    else:
        assert webhook.origin(url) == target.origin
        origin_known, path = webhook._split(url)
        assert (origin_known.target.host_header, path) == (target.host_header, target.path)


async def test_a_host_without_a_path_is_not_taken_for_a_shorter_known_one(webhook: Webhook) -> None:
    webhook.check("https://shop.exampl", "orders")
    assert webhook.origin("https://shop.example") == "https://shop.example:443"


async def test_a_url_for_each_timer_is_one_origin(webhook: Webhook) -> None:
    for number in range(1_000):
        webhook.check(f"https://shop.example/hook?id={number}", "orders")
    assert list(webhook._origins) == ["https://shop.example"]


async def test_an_origin_in_use_stays_known_however_many_others_are_called_once(webhook: Webhook) -> None:
    known = webhook._split("https://shop.example/")[0]
    for number in range(20_000):
        webhook.origin(f"https://other{number}.example/")
        if number % 1_000 == 0:
            assert webhook._split("https://shop.example/")[0] is known


async def test_a_query_without_a_path_is_sent_with_one(webhook: Webhook) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        while True:
            requests.append(await server.read_request(reader))
            writer.write(OK)

    requests: list[bytes] = []
    async with serving(handler) as server:
        for query in ("?id=1", "?id=2/3"):
            url = server.url.replace("/hook", query)
            assert (await webhook.deliver(attempt(timer(url)))).status == 200
    assert [request.split(b"\r\n")[0] for request in requests] == [
        b"POST /?id=1 HTTP/1.1",
        b"POST /?id=2/3 HTTP/1.1",
    ]


# --- a shortage of ours --------------------------------------------------------------------------


async def test_without_a_file_descriptor_nothing_begins_and_it_is_no_attempt(
    webhook: Webhook, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("duetime"), "propagate", True)
    with no_more_files():
        for _ in range(3):
            result = await webhook.deliver(attempt(timer(receiver.url), begin=never_begun))
            assert result.contact is Contact.SHORTAGE
    assert [record.message for record in caplog.records] == [
        "callbacks have to wait: no socket for a call: Too many open files; this does not count as an attempt"
    ]
    assert (await webhook.deliver(attempt(timer(receiver.url)))).status == 200


async def test_a_shortage_after_the_callback_was_sent_is_an_attempt(webhook: Webhook, receiver: Receiver) -> None:
    await webhook.deliver(attempt(timer(receiver.url)))

    async def close() -> None:
        webhook._client._sockets_max = 0

    receiver.answer = close
    result = await webhook.deliver(attempt(timer(receiver.url)))
    assert (result.contact, result.error) == (Contact.BROKEN, "all 0 sockets for calls are in use")
    assert len(receiver.requests) == 2


async def test_names_that_hang_are_a_shortage_of_their_namespace_only(receiver: Receiver) -> None:
    answering = asyncio.Event()

    async def lookup(host: str) -> Sequence[str]:
        if host.startswith("hang"):
            await answering.wait()
        return ["127.0.0.1"]

    resolver = Resolver(LOOPBACK, lookup=lookup, lookups_max=8)
    hostile = msgspec.structs.replace(NAMESPACE, name="hostile")
    async with webhooks(resolver=resolver) as webhook:
        calls = [
            asyncio.create_task(webhook.deliver(attempt(timer(f"http://hang{n}.example"), hostile))) for n in range(20)
        ]
        while len(resolver._lookups) < 7:
            await asyncio.sleep(0)
        refused = await webhook.deliver(attempt(timer("http://hang.example/"), hostile, begin=never_begun))
        assert refused.contact is Contact.SHORTAGE
        assert "too many names of namespace 'hostile'" in (refused.error or "")
        url = receiver.url.replace("127.0.0.1", "healthy.example")
        assert (await webhook.deliver(attempt(timer(url)))).contact is Contact.ANSWERED
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
