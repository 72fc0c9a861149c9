"""The adapters of NATS, on a real server: the connection, commands that are received, events that are published.

Each test begins without any stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from duetime.brokers.connection import KeptOpen
from duetime.brokers.nats import NatsConnection
from duetime.brokers.nats_session import ApiError, NatsSession
from duetime.clock import SystemClock
from duetime.config import Nats, load_config
from duetime.deliveries.nats import NatsDeliverer
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Extras, Namespace, Timer, uuid_of
from duetime.errors import BrokerAway, SetupError
from duetime.ingress.nats import NatsCommands
from duetime.ingress.source import Backlog, Message, Refusal
from duetime.telemetry import Telemetry
from servers import own, require

DUE_MS = 1_800_000_000_000
MEGABYTE = 1 << 20

# --- what the tests are made of ------------------------------------------------------------------


def settings(url: str, **fields: object) -> Nats:
    return load_config(environ={}, flags={f"nats.{name}": value for name, value in {"url": url, **fields}.items()}).nats


@asynccontextmanager
async def connected(config: Nats) -> AsyncIterator[NatsConnection]:
    connection = NatsConnection(config)
    try:
        await connection.open()
        yield connection
    finally:
        await connection.close()


def session_of(connection: NatsConnection) -> NatsSession:
    session = connection.session
    assert session is not None
    return session


@asynccontextmanager
async def admin(url: str, **login: str) -> AsyncIterator[NatsSession]:
    """A connection that needs no stream."""
    async with connected(settings(url, allow_subjects=[], command_subject="", **login)) as connection:
        yield session_of(connection)


@pytest.fixture
async def url() -> str:
    url = require("nats").url()
    async with admin(url) as session:
        for name in (await session.api("STREAM.NAMES"))["streams"] or ():
            await session.api(f"STREAM.DELETE.{name}")
    return url


async def add_stream(session: NatsSession, name: str, *subjects: str, **fields: Any) -> None:
    await session.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": subjects, "storage": "memory", **fields})


async def stream(session: NatsSession, name: str) -> dict[str, Any]:
    return await session.api(f"STREAM.INFO.{name}")


async def stored(session: NatsSession, name: str, sequence: int = 1) -> dict[str, Any]:
    message: dict[str, Any] = (await session.api(f"STREAM.MSG.GET.{name}", {"seq": sequence}))["message"]
    return message


async def consumer(session: NatsSession) -> dict[str, Any]:
    return await session.api("CONSUMER.INFO.TIMER_COMMANDS.duetime")


async def send(session: NatsSession, *bodies: bytes, subject: str = "timers.commands.orders") -> None:
    for body in bodies:
        reply = await session.request(subject, body, timeout=5)
        assert b'"seq"' in reply.data


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def receive(commands: NatsCommands, count: int, limit: int = 10) -> list[Message]:
    """This many, from as many calls as it takes."""
    messages: list[Message] = []
    async with asyncio.timeout(20):
        while len(messages) < count:
            messages += await commands.receive(limit, MEGABYTE)
    assert len(messages) == count
    return messages


def bodies(messages: Sequence[Message]) -> list[bytes]:
    return [message.body for message in messages]


@asynccontextmanager
async def receiving(config: Nats) -> AsyncIterator[tuple[NatsCommands, NatsSession]]:
    async with connected(config) as connection:
        commands = NatsCommands(config, connection)
        await commands.open()
        yield commands, session_of(connection)
        await commands.close()


# --- the connection ------------------------------------------------------------------------------


async def test_streams_and_the_consumer_are_created(url: str) -> None:
    async with receiving(settings(url, duplicate_window="90s", ack_wait="7s")) as (_, session):
        events = (await stream(session, "TIMER_EVENTS"))["config"]
        assert events["subjects"] == ["timers.events.*"]
        assert (events["storage"], events["duplicate_window"], events["retention"]) == ("file", 90 * 10**9, "limits")
        dead = (await stream(session, "TIMER_DEAD_LETTERS"))["config"]
        assert (dead["subjects"], dead["storage"]) == (["timers.dead.*"], "file")
        commands = (await stream(session, "TIMER_COMMANDS"))["config"]
        assert (commands["subjects"], commands["storage"]) == (["timers.commands.*"], "file")
        made = (await consumer(session))["config"]
        assert (made["ack_policy"], made["ack_wait"], made["max_deliver"]) == ("explicit", 7 * 10**9, -1)
        assert (made["deliver_policy"], made["filter_subject"]) == ("all", "timers.commands.*")
        assert made["max_ack_pending"] >= 10_000
    async with receiving(settings(url, duplicate_window="90s", ack_wait="7s")):  # all of it is used again
        pass


async def test_nothing_is_created_without_permission_to_do_so(url: str) -> None:
    config = settings(url, create_streams=False)
    async with admin(url) as session:
        with pytest.raises(SetupError, match=r"nats stream add TIMER_EVENTS .*timers\.events\.\*"):
            await NatsConnection(config).open()
        await add_stream(session, "MINE", "timers.events.>")
        with pytest.raises(SetupError, match=r"nats stream add TIMER_DEAD_LETTERS .*timers\.dead\.\*"):
            await NatsConnection(config).open()
        await add_stream(session, "DEAD", "timers.dead.>")
        async with connected(config) as connection:
            with pytest.raises(SetupError, match="nats stream add TIMER_COMMANDS"):
                await NatsCommands(config, connection).open()
            await add_stream(session, "TIMER_COMMANDS", "timers.commands.>")
            with pytest.raises(SetupError, match=r"nats consumer add TIMER_COMMANDS duetime --pull"):
                await NatsCommands(config, connection).open()
        assert (await session.api("STREAM.NAMES"))["streams"] == ["DEAD", "MINE", "TIMER_COMMANDS"]


async def test_streams_that_cover_a_subject_are_used(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with admin(url) as session:
        await add_stream(session, "EVENTS", "timers.events.>", duplicate_window=10**9)
        await add_stream(session, "PARTLY", "timers.dead.orders")
        await session.api("STREAM.DELETE.PARTLY")
        with caplog.at_level(logging.WARNING, "duetime"):
            async with connected(settings(url)):
                pass
        assert "EVENTS drops duplicates within 1 s" in caplog.text
        assert (await session.api("STREAM.NAMES"))["streams"] == ["EVENTS", "TIMER_DEAD_LETTERS"]


async def test_only_subjects_that_no_stream_stores_get_one(url: str) -> None:
    async with admin(url) as session:
        await add_stream(session, "MINE", "a.>")
        async with connected(settings(url, allow_subjects=["a.{tenant}", "b.c.{tenant}", "b.>", "b.c.d"])):
            assert (await stream(session, "TIMER_EVENTS"))["config"]["subjects"] == ["b.>"]


async def test_a_stream_with_a_part_of_the_subjects(url: str) -> None:
    async with admin(url) as session:
        await add_stream(session, "TIMER_EVENTS", "timers.events.orders")
        with pytest.raises(SetupError, match=r"TIMER_EVENTS exists with other subjects"):
            await NatsConnection(settings(url)).open()
        await session.api("STREAM.DELETE.TIMER_EVENTS")
        await add_stream(session, "OTHER", "timers.events.orders")
        with pytest.raises(SetupError, match=r"cannot be created: subjects overlap"):
            await NatsConnection(settings(url)).open()


async def test_the_command_subject_is_in_another_stream(url: str) -> None:
    async with admin(url) as session:
        await add_stream(session, "OTHER", "timers.commands.>")
    async with connected(settings(url)) as connection:
        with pytest.raises(SetupError, match=r"stored by the stream OTHER: set nats\.stream"):
            await NatsCommands(settings(url), connection).open()


JETSTREAM = ["$JS.API.>", "$JS.ACK.>"]
USERS = [
    {"user": "admin", "password": "secret"},
    {"user": "no_api", "password": "secret", "permissions": {"publish": ["timers.>"], "subscribe": ["_INBOX.>"]}},
    {"user": "no_inbox", "password": "secret", "permissions": {"publish": [">"], "subscribe": ["timers.>"]}},
    {"user": "no_events", "password": "secret", "permissions": {"publish": JETSTREAM, "subscribe": ["_INBOX.>"]}},
    {
        "user": "no_pull",
        "password": "secret",
        "permissions": {
            "publish": {"allow": [">"], "deny": ["$JS.API.CONSUMER.MSG.NEXT.>"]},
            "subscribe": ["_INBOX.>"],
        },
    },
]


async def test_logins_and_permissions(caplog: pytest.LogCaptureFixture) -> None:
    def of(user: str, password: str = "secret") -> Nats:
        return settings(server.url(), user=user, password=password)

    with own("nats", users=USERS) as server:
        for config in (of("admin", "wrong"), of("unknown"), settings(server.url()), settings(server.url(), token="x")):
            with pytest.raises(SetupError, match=r"refused the login \('Authorization Violation'\)"):
                await NatsConnection(config).open()
        with pytest.raises(SetupError, match=r"no permission to publish to '\$js\.api\.stream\.names'"):
            await NatsConnection(of("no_api")).open()
        with pytest.raises(SetupError, match=r'no permission to subscribe to "_INBOX\.>"'):
            await NatsConnection(of("no_inbox")).open()
        async with connected(of("admin")) as connection:
            await NatsCommands(of("admin"), connection).open()
        async with connected(of("no_pull")) as connection:
            with pytest.raises(SetupError, match=r"no permission to publish to '\$js\.api\.consumer\.msg\.next"):
                await NatsCommands(of("no_pull"), connection).open()
        async with delivering(of("no_events")) as nats:
            result = await nats.deliver(attempt(due()))
            assert result.contact is Contact.BROKEN
            assert "no permission to publish to 'timers.events.orders'" in str(result.error)
            await nats.deliver(attempt(due()))
        denials = [record for record in caplog.records if "timers.events.orders" in record.getMessage()]
        assert len(denials) == 1  # not one for each event
    assert "secret" not in caplog.text


async def test_an_account_without_jetstream() -> None:
    with own("nats", settings={"accounts": '{ A: { users: [{user: "a", password: "b"}] } }'}) as server:
        connection = NatsConnection(settings(server.url(), user="a", password="b"))
        with pytest.raises(SetupError, match="JetStream is not enabled"):
            await connection.open()


async def test_the_login_is_not_sent_without_tls_if_tls_is_asked_for(url: str, certificates: Path) -> None:
    for config in (settings(url.replace("nats://", "tls://")), settings(url, ca_file=str(certificates / "ca.pem"))):
        with pytest.raises(SetupError, match="offers no TLS"):
            await NatsConnection(config).open()


async def test_tls_with_an_authority_of_ones_own(certificates: Path) -> None:
    tls = f'{{ cert_file: "{certificates}/server.pem", key_file: "{certificates}/server.key" }}'
    with own("nats", settings={"tls": tls}) as server:
        url = server.url().replace("127.0.0.1", "localhost")
        async with connected(settings(url, ca_file=str(certificates / "ca.pem"))) as connection:
            assert connection.is_connected
        with pytest.raises(SetupError, match=r"no TLS connection to .*nats\.ca_file"):
            await NatsConnection(settings(url)).open()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "-----BEGIN NATS USER JWT-----\n",
        "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n",
        "-----BEGIN NATS USER JWT-----\nabc\n-----\n-----BEGIN USER NKEY SEED-----\nSUxyz\n-----\n",
        None,
    ],
)
async def test_a_credentials_file_without_credentials(url: str, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "user.creds"
    if content is not None:
        file.write_text(content)
    async with asyncio.timeout(5):
        with pytest.raises(SetupError, match=r"nats\.credentials") as error:
            await NatsConnection(settings(url, credentials=str(file))).open()
    assert "SUxyz" not in error.value.detail


async def test_a_server_that_cannot_be_reached() -> None:
    connection = NatsConnection(settings("nats://127.0.0.1:1"))
    with pytest.raises(BrokerAway, match=r"cannot connect to nats://127\.0\.0\.1:1") as error:
        await connection.open()
    assert f"nats: {connection.away_reason}" == error.value.detail
    assert not connection.is_connected


async def test_one_of_several_servers_is_enough(url: str) -> None:
    async with connected(settings(f"nats://127.0.0.1:1,{url}, nats://127.0.0.1:2")) as connection:
        assert connection.is_connected


async def test_callers_share_one_attempt(url: str) -> None:
    connection = NatsConnection(settings(url))
    await asyncio.gather(*(connection.open() for _ in range(5)))
    session = connection.session
    await connection.open()
    assert connection.session is session is not None
    await connection.close()
    with pytest.raises(BrokerAway):
        await connection.open()


async def test_a_frozen_server_is_noticed_and_what_waits_for_it_ends() -> None:
    with own("nats") as server:
        config = settings(server.url())
        async with connected(config) as connection:
            nats, commands = Deliverer(config, connection), NatsCommands(config, connection)
            await commands.open()
            server.freeze()
            try:
                # More than the buffers of the sockets take.
                large = due(payload='"' + "x" * 100_000 + '"')
                waiting = [asyncio.ensure_future(nats.deliver(attempt(large, timeout_s=60))) for _ in range(200)]
                with pytest.raises(BrokerAway):
                    await receive(commands, 1)
                with pytest.raises(BrokerAway, match="no answer within"):
                    await connection.open()
                async with asyncio.timeout(5):
                    assert {result.contact for result in await asyncio.gather(*waiting)} == {Contact.BROKEN}
                assert (await nats.deliver(attempt(due()))).contact is Contact.AWAY
                with pytest.raises(BrokerAway, match="no answer within"):
                    await commands.open()
            finally:
                server.thaw()
            await commands.open()
            assert (await nats.deliver(attempt(due()))).contact is Contact.ACCEPTED


async def test_after_a_restart_of_the_server_all_of_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    with own("nats") as server:
        config = settings(server.url())
        connection = NatsConnection(config)
        kept, commands = KeptOpen(connection), NatsCommands(config, connection)
        nats = NatsDeliverer(config, connection, SystemClock(), Telemetry())
        await kept.start()
        await commands.open()
        await send(session_of(connection), b"before")
        await receive(commands, 1)
        await asyncio.to_thread(server.kill)
        await until(lambda: not connection.is_connected)
        result = await nats.deliver(attempt(due()))
        assert (result.contact, "no connection to NATS" in str(result.error)) == (Contact.AWAY, True)
        with pytest.raises(BrokerAway):
            await commands.receive(1, MEGABYTE)
        await asyncio.to_thread(server.start)
        await until(lambda: connection.is_connected)
        with pytest.raises(BrokerAway):  # the subscription is of the connection before
            await commands.receive(1, MEGABYTE)
        await commands.open()
        await send(session_of(connection), b"after")
        received: list[bytes] = []
        async with asyncio.timeout(20):
            while b"after" not in received:  # the first was not acknowledged: on a slow machine it comes again
                received += bodies(await commands.receive(10, MEGABYTE))
        assert set(received) <= {b"before", b"after"}
        assert (await nats.deliver(attempt(due()))).contact is Contact.ACCEPTED
        await kept.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# --- commands ------------------------------------------------------------------------------------


async def test_commands_are_received_in_order_and_once_acknowledged_not_again(url: str) -> None:
    async with receiving(settings(url, ack_wait="1s")) as (commands, session):
        assert await commands.receive(10, MEGABYTE) == []
        await send(session, b"1", b"2", b"3")
        first = await commands.receive(2, MEGABYTE)
        assert len(first) <= 2
        messages = [*first, *await receive(commands, 3 - len(first))]
        assert bodies(messages) == [b"1", b"2", b"3"]
        one = messages[0]
        assert (one.subject, one.tenant, one.deliveries) == ("timers.commands.orders", "orders", 1)
        assert [message.position.sequence for message in messages] == [1, 2, 3]
        assert {message.position.stream for message in messages} == {"nats:TIMER_COMMANDS"}
        assert abs(one.position.at_ms - SystemClock().wall_ms()) < 60_000
        await commands.acknowledge(messages)
        assert (await consumer(session))["num_ack_pending"] == 0
        await asyncio.sleep(1.2)  # more than ack_wait
        assert await commands.receive(10, MEGABYTE) == []
        assert (await stream(session, "TIMER_COMMANDS"))["state"]["messages"] == 0


async def test_what_is_not_acknowledged_goes_to_another_instance(url: str) -> None:
    config = settings(url, ack_wait="1s")
    async with receiving(config) as (gone, session):
        await send(session, b"1")
        (before,) = await receive(gone, 1)
    async with receiving(config) as (other, _):
        (again,) = await receive(other, 1)
        assert (again.body, again.deliveries, again.position) == (b"1", 2, before.position)


async def test_what_arrived_but_was_not_handed_out_is_given_back_by_close(url: str) -> None:
    config = settings(url, ack_wait="1h")
    async with connected(config) as connection:
        first = NatsCommands(config, connection)
        await first.open()
        await first.close()
        await send(session_of(connection), b"1")
        holder = NatsCommands(config, connection)
        await holder.open()  # its first request gets the command
        assert (await consumer(session_of(connection)))["num_ack_pending"] == 1
        await holder.close()
        other = NatsCommands(config, connection)
        await other.open()
        assert bodies(await receive(other, 1)) == [b"1"]


async def test_what_has_waited_here_for_too_long_is_received_again(url: str) -> None:
    """It may be at another instance by now."""
    config = settings(url, ack_wait="1s")
    async with admin(url) as session:
        async with receiving(config):
            await send(session, b"1")
        async with receiving(config) as (commands, _):  # its first request gets the command
            await asyncio.sleep(0.7)
            (message,) = await receive(commands, 1)
            assert message.deliveries == 2


async def test_instances_share_the_commands(url: str) -> None:
    config = settings(url)
    async with receiving(config) as (one, session), receiving(config) as (two, _):
        await send(session, *(b"%d" % number for number in range(20)))
        received = [*await receive(one, 7, limit=7), *await receive(two, 13, limit=13)]
        assert sorted(bodies(received)) == sorted(b"%d" % number for number in range(20))


async def test_a_retry_is_delivered_again_after_its_time(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send(session, b"now", b"later")
        now, later = await receive(commands, 2)
        started = asyncio.get_running_loop().time()
        await commands.retry(now, 0)
        await commands.retry(later, 1_500)
        (first,) = await receive(commands, 1)
        assert (first.body, first.deliveries) == (b"now", 2)
        (second,) = await receive(commands, 1)
        assert (second.body, second.deliveries) == (b"later", 2)
        assert asyncio.get_running_loop().time() - started > 1.4


async def test_a_command_that_is_still_worked_on_is_not_delivered_again(url: str) -> None:
    async with receiving(settings(url, ack_wait="2s")) as (commands, session):
        await send(session, b"left", b"extended")
        (_, extended) = await receive(commands, 2)
        again: list[Message] = []
        for _ in range(5):  # of about a second each
            await commands.extend([extended])
            again += await commands.receive(10, MEGABYTE)
        assert set(bodies(again)) == {b"left"}


async def test_a_dead_letter_takes_the_place_of_the_command(url: str) -> None:
    async with receiving(settings(url, ack_wait="1s")) as (commands, session):
        await send(session, b"{}", subject="timers.commands.shop")
        await send(session, b"\xff", subject="timers.commands.\u00e4")
        first, second = await receive(commands, 2)
        refusal = Refusal("id is required", "id", None)
        await commands.refuse(first, refusal)
        await commands.refuse(first, refusal)  # if the acknowledgement was lost: the stream drops it
        await commands.refuse(second, refusal)
        assert (await stream(session, "TIMER_DEAD_LETTERS"))["state"]["messages"] == 2
        letter = await stored(session, "TIMER_DEAD_LETTERS")
        assert letter["subject"] == "timers.dead.shop"
        assert decoded(letter) == {
            "reason": "id is required",
            "field": "id",
            "subject": "timers.commands.shop",
            "receivedAt": decoded(letter)["receivedAt"],
            "body": "{}",
        }
        assert (await stored(session, "TIMER_DEAD_LETTERS", 2))["subject"] == "timers.dead._"
        async with asyncio.timeout(10):
            while (await stream(session, "TIMER_COMMANDS"))["state"]["messages"]:
                await asyncio.sleep(0.02)


async def test_the_dead_letter_of_a_command_of_the_largest_size_is_stored(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send(session, b"\x01" * session.payload_max)
        (message,) = await receive(commands, 1)
        await commands.refuse(message, Refusal("the message is not JSON", None, None))
        assert decoded(await stored(session, "TIMER_DEAD_LETTERS"))["truncated"] is True


async def test_without_a_stream_for_it_a_dead_letter_is_not_given_up(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send(session, b"{}")
        (message,) = await receive(commands, 1)
        await session.api("STREAM.DELETE.TIMER_DEAD_LETTERS")
        with pytest.raises(BrokerAway, match="no stream"):
            await commands.refuse(message, Refusal("no", None, None))
        assert (await consumer(session))["num_ack_pending"] == 1


async def test_a_command_that_is_larger_than_the_room_is_received(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send(session, b"x" * 5_000, b"y" * 5_000)
        received = [*await commands.receive(10, 100), *await commands.receive(10, 100)]
        assert [body[:1] for body in bodies(received)] == [b"x", b"y"]


async def test_many_small_commands_come_in_one_request_within_their_bytes(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send(session, *[b"x" * 1_000] * 10)
        await receive(commands, 1, limit=1)  # what the request at the start has received
        assert 2 <= len(await commands.receive(100, 5_000)) <= 5


async def test_the_backlog_is_what_no_instance_has_received_and_what_is_not_acknowledged(url: str) -> None:
    async def backlog_is(waiting: int, unacknowledged: int) -> None:
        """The server counts a moment after it has acknowledged the message."""
        async with asyncio.timeout(20):
            while await commands.backlog() != Backlog(waiting, unacknowledged):
                await asyncio.sleep(0.01)

    async with receiving(settings(url)) as (commands, session):
        await send(session, b"1", b"2", b"3")
        await backlog_is(3, 0)
        (message,) = await receive(commands, 1, limit=1)
        await backlog_is(2, 1)
        await commands.retry(message, 60_000)
        await backlog_is(2, 1)
        await commands.acknowledge(await receive(commands, 2))
        await backlog_is(0, 1)


async def test_a_message_that_is_not_of_a_stream_is_ignored(url: str) -> None:
    async with receiving(settings(url)) as (commands, session), admin(url) as other:
        pull = asyncio.ensure_future(commands.receive(10, MEGABYTE))
        for number in range(10):
            await other.publish(f"{session.inbox}.p.{number}", b'{"forged":true}')
        await send(session, b"1")
        assert bodies([*await pull, *await commands.receive(10, MEGABYTE)]) == [b"1"]


async def test_the_subject_of_all_tenants_names_none(url: str) -> None:
    config = settings(url, command_subject="timers.commands")
    async with receiving(config) as (commands, session):
        await send(session, b"1", subject="timers.commands")
        (message,) = await receive(commands, 1)
        assert message.tenant is None
        await commands.refuse(message, Refusal("no", None, None))
        assert (await stored(session, "TIMER_DEAD_LETTERS"))["subject"] == "timers.dead._"


async def test_the_tenant_need_not_be_the_last_token(url: str) -> None:
    config = settings(url, command_subject="commands.{tenant}.timers")
    async with receiving(config) as (commands, session):
        await send(session, b"1", subject="commands.shop.timers")
        assert [message.tenant for message in await receive(commands, 1)] == ["shop"]


@pytest.mark.parametrize(
    "header",
    [
        b"x",
        b"NATS/1.0",
        b"NATS/1.0 \xff\xff\xff\r\n\r\n",
        b"NATS/1.0 404 \xff\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0\r\nStatus: 404\r\n\r\n",
        b"NATS/1.0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    ],
)
async def test_commands_with_any_bytes_as_headers_are_received(url: str, header: bytes) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send_raw(url, b"timers.commands.evil", header, b"1")
        await send(session, b"2")
        assert bodies(await receive(commands, 2)) == [b"1", b"2"]


@pytest.mark.parametrize(
    "tenant", [b"\xff\xfe", b"\xed\xa0\x80", b"a\x0bb", b"\x0c", b"\x0b1", b"a\xc2\xa0b", b"a" * 3_000]
)
@pytest.mark.parametrize("header", [b"", b"NATS/1.0\r\na: b\r\n\r\n"])
async def test_commands_with_strange_subjects_are_received_and_refused(url: str, tenant: bytes, header: bytes) -> None:
    async with receiving(settings(url)) as (commands, session):
        await send_raw(url, b"timers.commands." + tenant, header, b"1")
        await send(session, b"2")
        messages = await receive(commands, 2)
        assert bodies(messages) == [b"1", b"2"]
        assert messages[0].tenant == tenant.decode(errors="replace")
        await commands.refuse(messages[0], Refusal("no", None, None))
        assert (await stored(session, "TIMER_DEAD_LETTERS"))["subject"] == "timers.dead._"


async def send_raw(url: str, subject: bytes, header: bytes, body: bytes) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    if header:
        writer.write(b"HPUB %s %d %d\r\n" % (subject, len(header), len(header) + len(body)))
    else:
        writer.write(b"PUB %s %d\r\n" % (subject, len(body)))
    writer.write(header + body + b"\r\nPING\r\n")
    await writer.drain()
    assert (await reader.readline()).startswith(b"INFO ")
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
    await writer.wait_closed()


async def test_a_consumer_that_is_removed_is_made_again(url: str) -> None:
    async with receiving(settings(url)) as (commands, session):
        await session.api("CONSUMER.DELETE.TIMER_COMMANDS.duetime")
        with pytest.raises(BrokerAway, match="the consumer duetime delivers no commands"):
            await commands.receive(10, MEGABYTE)
        await commands.open()
        await send(session, b"1")
        assert bodies(await receive(commands, 1)) == [b"1"]


WORKS = {
    "durable_name": "duetime",
    "ack_policy": "explicit",
    "ack_wait": 30 * 10**9,
    "max_deliver": -1,
    "filter_subject": "timers.commands.*",
}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"deliver_subject": "somewhere"}, "is a push consumer"),
        ({"ack_policy": "none"}, "'none' instead of 'explicit'"),
        ({"ack_policy": "all"}, "'all' instead of 'explicit'"),
        ({"max_deliver": 5}, "max_deliver"),
        ({"filter_subject": "timers.commands.orders"}, "another filter"),
        ({"filter_subject": ""}, "another filter than nats.command_subject (timers.commands.*): none"),
        ({"headers_only": True}, "headers only"),
        ({"ack_wait": 10 * 10**9}, "set nats.ack_wait"),
    ],
)
async def test_a_consumer_that_cannot_work(url: str, fields: dict[str, object], problem: str) -> None:
    async with connected(settings(url)) as connection:
        session = session_of(connection)
        await add_stream(session, "TIMER_COMMANDS", "timers.commands.*")
        config = {name: value for name, value in {**WORKS, **fields}.items() if value != ""}
        request = {"stream_name": "TIMER_COMMANDS", "config": config}
        await session.api("CONSUMER.DURABLE.CREATE.TIMER_COMMANDS.duetime", request)
        with pytest.raises(SetupError, match=re.escape(problem)):
            await NatsCommands(settings(url), connection).open()


async def test_a_consumer_that_somebody_else_has_made_is_used(url: str, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(url, create_streams=False)
    async with admin(url) as session:
        await add_stream(session, "ALL", "timers.events.*", "timers.dead.*")
        await add_stream(session, "TIMER_COMMANDS", "timers.commands.*")
        request = {"stream_name": "TIMER_COMMANDS", "config": WORKS}
        await session.api("CONSUMER.DURABLE.CREATE.TIMER_COMMANDS.duetime", request)
        async with receiving(config) as (commands, _):
            await send(session, b"1")
            assert bodies(await receive(commands, 1)) == [b"1"]
        assert "commands out" not in caplog.text
    async with receiving(settings(url, create_streams=False, in_flight_max=1_001)):
        assert "at most 1000 commands that are not acknowledged" in caplog.text


# --- events --------------------------------------------------------------------------------------


def due(url: str = "nats:timers.events.orders", **fields: Any) -> Timer:
    high, low = uuid_of("orders", "order-17")
    defaults: dict[str, Any] = {"execute_at_ms": DUE_MS, "scheduled_at_ms": DUE_MS, "generation": 5 << 32}
    return Timer(
        namespace="orders",
        timer_id="order-17",
        uuid_high=high,
        uuid_low=low,
        created_at_ms=0,
        callback_url=url,
        **(defaults | fields),
    )


def attempt(timer: Timer, *, timeout_s: int = 5, begin: Callable[[], int | None] = lambda: DUE_MS + 12) -> Attempt:
    namespace = Namespace(name="orders", num_shards=16, created_at_ms=0, callback_timeout_seconds=timeout_s)
    return Attempt(timer, namespace, "3.9", begin)


class Deliverer(NatsDeliverer):
    def __init__(self, config: Nats, connection: NatsConnection) -> None:
        self.telemetry = Telemetry()
        super().__init__(config, connection, SystemClock(), self.telemetry)

    @property
    def counted(self) -> tuple[int, int, int]:
        of = self.telemetry
        return (
            of.events_published.by_label["nats"],
            of.event_failures.by_label["nats"],
            of.event_delay_seconds.count,
        )


@asynccontextmanager
async def delivering(config: Nats) -> AsyncIterator[Deliverer]:
    async with connected(config) as connection:
        yield Deliverer(config, connection)


def decoded(message: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b64decode(message["data"]))
    return body


async def test_an_event_is_accepted_once_the_stream_has_stored_it(url: str) -> None:
    timer = due(attempts=2, extras=Extras(headers={"x-order": "17"}))
    async with delivering(settings(url)) as nats, admin(url) as session:
        assert await nats.deliver(attempt(timer)) == AttemptResult(Contact.ACCEPTED)
        event = await stored(session, "TIMER_EVENTS")
        assert event["subject"] == "timers.events.orders"
        headers = b64decode(event["hdrs"]).decode()
        assert sorted(headers.split("\r\n")[1:-2]) == [
            "Duetime-Attempt: 3",
            "Duetime-Fence: 3.9",
            f"Nats-Msg-Id: {timer.delivery_id}.0",
            "x-order: 17",
        ]
        body = decoded(event)
        assert (body["type"], body["tenantId"], body["timestampMs"]) == ("DueTimeReached", "orders", DUE_MS + 12)
        assert nats.counted == (1, 0, 1)


async def test_an_event_that_is_published_again_is_stored_once(url: str) -> None:
    async with delivering(settings(url)) as nats, admin(url) as session:
        for _ in range(3):
            assert (await nats.deliver(attempt(due()))).contact is Contact.ACCEPTED
        assert (await nats.deliver(attempt(due(generation=6 << 32)))).contact is Contact.ACCEPTED
        assert (await stream(session, "TIMER_EVENTS"))["state"]["messages"] == 2


async def test_an_event_that_nothing_stores(url: str) -> None:
    async with delivering(settings(url)) as nats, admin(url) as session:
        await session.api("STREAM.DELETE.TIMER_EVENTS")
        result = await nats.deliver(attempt(due()))
        assert (result.contact, result.error) == (
            Contact.BROKEN,
            "timers.events.orders: no stream of NATS stores this subject",
        )

        async def answer(message: Any) -> None:
            await session.publish(message.reply, b"thank you")

        async def silence(message: Any) -> None: ...

        stop = await session.subscribe("timers.events.orders", answer)
        await session.api("STREAM.NAMES")  # the server has carried out the subscription before it answers this
        result = await nats.deliver(attempt(due()))
        assert (result.contact, "something else than a stream" in str(result.error)) == (Contact.BROKEN, True)
        await stop()
        await session.subscribe("timers.events.orders", silence)
        await session.api("STREAM.NAMES")
        result = await nats.deliver(attempt(due(), timeout_s=1))
        assert (result.contact, result.error) == (Contact.BROKEN, "no acknowledgement of NATS within 1 s")
        assert nats.counted == (0, 3, 0)


async def test_a_stream_that_refuses_the_event(url: str) -> None:
    async with admin(url) as session:
        await add_stream(session, "SMALL", "timers.events.*", max_msg_size=10)
        async with delivering(settings(url)) as nats:
            result = await nats.deliver(attempt(due()))
            assert (result.contact, "message size exceeds" in str(result.error)) == (Contact.BROKEN, True)


async def test_an_event_that_is_too_large_is_not_sent(url: str) -> None:
    async with delivering(settings(url)) as nats, admin(url) as session:
        room = session.payload_max
        small = await nats.deliver(attempt(due(payload='"' + "x" * (room - 1_000) + '"')))
        assert small.contact is Contact.ACCEPTED
        sizes = []
        for more in range(600, 0, -1):  # up to the byte at which the server would close the connection
            result = await nats.deliver(attempt(due(generation=more << 32, payload='"' + "x" * (room - more) + '"')))
            if result.contact is Contact.REFUSED:
                assert f"NATS takes {room}" in str(result.error)
                sizes.append(more)
                break
            assert result.contact is Contact.ACCEPTED
        assert sizes
        assert (await nats.deliver(attempt(due()))).contact is Contact.ACCEPTED  # the connection was not closed


async def test_an_attempt_that_must_not_be_made_any_more(url: str) -> None:
    async with delivering(settings(url)) as nats, admin(url) as session:
        assert (await nats.deliver(attempt(due(), begin=lambda: None))).contact is Contact.NOT_SENT
        assert (await stream(session, "TIMER_EVENTS"))["state"]["messages"] == 0
        assert nats.counted == (0, 0, 0)


async def test_while_the_broker_is_away_no_attempt_is_begun() -> None:
    connection = NatsConnection(settings("nats://127.0.0.1:1"))
    nats = Deliverer(settings("nats://127.0.0.1:1"), connection)

    def begin() -> int:
        raise AssertionError

    result = await nats.deliver(attempt(due(), begin=begin))
    assert (result.contact, result.error) == (Contact.AWAY, "no connection to NATS: not opened yet")
    assert nats.counted == (0, 0, 0)


async def test_what_is_not_allowed_any_more_is_refused(url: str) -> None:
    async with delivering(settings(url)) as nats:
        other = await nats.deliver(attempt(due("nats:timers.events.billing")))
        assert (other.contact, "allow_subjects" in str(other.error)) == (Contact.REFUSED, True)
        rollup = await nats.deliver(attempt(due(extras=Extras(headers={"Nats-Rollup": "all"}))))
        assert (rollup.contact, "Nats-Rollup" in str(rollup.error)) == (Contact.REFUSED, True)


async def test_an_error_of_the_api_says_what_jetstream_says(url: str) -> None:
    async with admin(url) as session:
        with pytest.raises(ApiError, match="stream not found") as error:
            await session.api("STREAM.INFO.NOTHING")
        assert (error.value.code, error.value.error_code) == (404, 10059)
