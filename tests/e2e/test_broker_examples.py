"""The examples of the pages on message brokers run: publisher and subscriber as programs of their own, against real
servers with the names of the configuration's defaults. And `make demo-nats`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from documents import blocks
from real_server import RealServer, clean_environment, until
from scripts import demo_nats

from servers import own

SECONDS = 30
PASSWORDS = {"acme": "secret-of-acme", "duetime": "secret-of-duetime", "operator": "secret-of-operator"}


class Examples:
    """The programs of a page, in a folder of their own. Each is named in its first line, as `# publisher.py`."""

    def __init__(self, page: str, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        for block in blocks("python", f"docs/howto/{page}.md"):
            (folder / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)

    @contextlib.contextmanager
    def running(
        self, name: str, *arguments: str, stderr: int | None = None, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Its output can be read; the log of its driver goes to pytest, unless `stderr` says otherwise."""
        command = [sys.executable, "-W", "error", f"{name}.py", *arguments]
        variables = os.environ | self.environment | environment
        with subprocess.Popen(
            command, env=variables, cwd=self.folder, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    async def run(self, name: str, *arguments: str, **environment: str) -> str:
        """What it prints until it ends."""
        with self.running(name, *arguments, stderr=subprocess.STDOUT, **environment) as process:
            out, _ = await asyncio.to_thread(process.communicate, timeout=SECONDS)
        assert process.returncode == 0, out
        return out

    async def dead_letters(self, text: str, *arguments: str, **environment: str) -> list[str]:
        """The lines of the dead letters, as soon as one has this text."""
        lines: list[str] = []

        async def is_there() -> bool:
            nonlocal lines
            lines = (await self.run("dead_letters", *arguments, **environment)).splitlines()
            return any(text in line for line in lines)

        await until(is_there, f"a dead letter with {text!r}", SECONDS)
        return lines


async def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS):
        return (await asyncio.to_thread(process.stdout.readline)).strip()


def event_of(tenant: str, order: str, event_id: str) -> bytes:
    payload = {"tenantId": tenant, "serviceCallId": f"expire-{order}", "reachedAt": "2020-01-01T00:00:00.000Z"}
    return json.dumps(
        {"id": event_id, "type": "DueTimeReached", "tenantId": tenant, "timestampMs": 0, "payload": payload}
    ).encode()


def shell_lines(page: str) -> list[str]:
    return [line for block in blocks("sh", f"docs/howto/{page}.md") for line in block.text.splitlines()]


class ByNats:
    """What differs between the brokers in the tests of the examples."""

    def __init__(self, url: str, duetime: RealServer) -> None:
        self.url = url
        self.environment = {"NATS_URL": url}
        self.target = "nats:timers.events.acme"
        duetime.settings["DUETIME_NATS_URL"] = url

    async def prepare_topics(self, examples: Examples) -> None:
        """The streams are created by Duetime."""

    async def prepare_consumer(self, examples: Examples) -> None:
        assert "orders-acme" in await examples.run("prepare", "acme")

    async def publish_event(self, body: bytes) -> None:
        client = await nats.connect(self.url)
        await client.jetstream().publish("timers.events.acme", body)
        await client.close()

    async def publish_command(self, body: bytes) -> None:
        client = await nats.connect(self.url)
        await client.jetstream().publish("timers.commands.acme", body)
        await client.close()


class ByKafka:
    def __init__(self, url: str, duetime: RealServer) -> None:
        self.url = url
        self.environment = {"KAFKA_SERVER": url, "REPLICAS": "1"}
        self.target = "kafka:timers.events"
        self.duetime_url = duetime.url
        duetime.settings["DUETIME_KAFKA_SERVERS"] = f'["{url}"]'

    async def prepare_topics(self, examples: Examples) -> None:
        printed = await examples.run("prepare", "timers.commands.acme")
        assert printed == "timers.commands.acme is created\n"
        assert "TopicAlreadyExistsError" in await examples.run("prepare", "timers.commands.acme")

    async def prepare_consumer(self, examples: Examples) -> None:
        """The group is created by the subscriber; the namespace as the page says."""
        [line] = [line for line in shell_lines("kafka") if line.startswith("duetime namespace create")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *shlex.split(line), env=clean_environment() | {"DUETIME_URL": self.duetime_url}
        )
        assert await process.wait() == 0

    async def publish_event(self, body: bytes) -> None:
        await self._publish("timers.events", body)

    async def publish_command(self, body: bytes) -> None:
        await self._publish("timers.commands.acme", body)

    async def _publish(self, topic: str, body: bytes) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.url) as producer:
            # In the partition of the event of order-19, so before it.
            await producer.send_and_wait(topic, body, key=b"expire-order-19")


@pytest.mark.parametrize("broker", ["nats", "kafka"])
async def test_the_programs_of_the_page_run_together(broker: str, tmp_path: Path) -> None:
    with own(broker) as server:
        duetime = RealServer(tmp_path)
        by = (ByNats if broker == "nats" else ByKafka)(server.url(), duetime)
        examples = Examples(broker, tmp_path, **by.environment)
        try:
            await by.prepare_topics(examples)
            await duetime.start()
            await by.prepare_consumer(examples)
            with examples.running("subscriber") as subscriber:
                assert await examples.run("publisher") == "published expire-order-17\n"
                assert await said(subscriber) == "time for expire-order-17 order-17"

                # What is no event, is of another tenant, or comes again with a new id, is survived and changes nothing.
                with contextlib.closing(sqlite3.connect(tmp_path / "orders.db")) as database, database:
                    database.execute("insert into orders values ('order-20', 'open')")
                no_events = (b"\xff", b'{"stream":"TIMER_COMMANDS","seq":8}', b"[" * 100_000, b'"text"', b"")
                foreign, again = event_of("globex", "order-20", "foreign"), event_of("acme", "order-17", "a new id")
                for body in (*no_events, foreign, again):
                    await by.publish_event(body)
                await examples.run("publisher", "order-18")
                lines = [await said(subscriber)]
                while lines[-1].startswith("no event"):
                    lines.append(await said(subscriber))
                assert lines.pop() == "time for expire-order-18 order-18"
                assert subscriber.poll() is None

                # A namespace that was deleted is not created again; its commands are published again from dead letters.
                async def is_deleted() -> bool:  # 409 until it is recorded that the event was published
                    return (await duetime.call("namespaces/delete", {"namespace": "acme"}))[0] == 200

                await until(is_deleted, "the namespace is deleted")
                await examples.run("publisher", "order-19")
                await by.publish_command(b"garbage")
                await examples.dead_letters("the namespace 'acme' was deleted: create it again")
                await examples.dead_letters("the message is not JSON")
                status, _ = await duetime.call("namespaces/create", {"namespace": "acme", "callbackUrl": by.target})
                assert status == 200
                printed = await examples.run("dead_letters", "was deleted")
                assert printed.count("published again") == 1
                assert await said(subscriber) == "time for expire-order-19 order-19"
            with contextlib.closing(sqlite3.connect(tmp_path / "orders.db")) as database:
                assert database.execute("select id from orders where state = 'open'").fetchall() == [("order-20",)]
            left = await examples.run("dead_letters")
            assert left.count("was deleted") == (0 if broker == "nats" else 1)
            assert left.count("not JSON") == 1
            assert await duetime.stop() == 0
        finally:
            await duetime.close()


# --- permissions of NATS -------------------------------------------------------------------------


def permissions(kind: str, *more: tuple[str, str]) -> dict[str, str]:
    """The block of the page that begins with `kind`, with passwords. `more`: texts that are put in place of others."""
    [text] = [block.text for block in blocks("text", "docs/operating/nats.md") if block.text.startswith(kind)]
    for user, password in PASSWORDS.items():
        text = text.replace(f"${user.upper()}_PASSWORD", json.dumps(password))
    for old, new in more:
        assert old in text
        text = text.replace(old, new, 1)
    return {kind: text.removeprefix(kind)}


GLOBEX_ACCOUNT = (
    (
        "    exports: [",
        """    exports: [
      { service: "timers.commands.globex", accounts: [GLOBEX] },
      { service: "$JS.API.CONSUMER.MSG.NEXT.TIMER_EVENTS.orders-globex", response_type: stream, accounts: [GLOBEX] },
      { service: "$JS.ACK.TIMER_EVENTS.orders-globex.>", accounts: [GLOBEX] },""",
    ),
    (
        "  ACME: {",
        """  GLOBEX: {
    users: [ { user: globex, password: g } ]
    imports: [
      { service: { account: DUETIME, subject: "timers.commands.globex" } },
      { service: { account: DUETIME, subject: "$JS.API.CONSUMER.MSG.NEXT.TIMER_EVENTS.orders-globex" } },
      { service: { account: DUETIME, subject: "$JS.ACK.TIMER_EVENTS.orders-globex.>" } },
    ]
  }
  ACME: {""",
    ),
)
GLOBEX_USER = (
    (
        "    { user: acme",
        """    { user: globex, password: g,
      permissions: {
        publish: ["timers.commands.globex", "$JS.API.CONSUMER.MSG.NEXT.TIMER_EVENTS.orders-globex",
                  "$JS.ACK.TIMER_EVENTS.orders-globex.>"],
        subscribe: ["_INBOX_globex.>"] } },
    { user: acme""",
    ),
)


NEXT = "$JS.API.CONSUMER.MSG.NEXT.TIMER_EVENTS"
DELETIONS = ("$JS.API.CONSUMER.DELETE.TIMER_EVENTS.orders-acme", "$JS.API.STREAM.DELETE.TIMER_DEAD_LETTERS")


def login(url: str, user: str, password: str) -> str:
    return url.replace("//", f"//{user}:{password}@")


@pytest.mark.parametrize("kind", ["accounts", "authorization"])
async def test_the_permissions_of_the_page_are_enough_and_keep_tenants_apart(kind: str, tmp_path: Path) -> None:
    """Only with accounts: without them NATS stores answers on the subjects of others, and takes them for requests."""
    settings = permissions(kind, *(GLOBEX_ACCOUNT if kind == "accounts" else GLOBEX_USER))
    with own("nats", settings=settings) as server:
        duetime = RealServer(tmp_path)
        mine = {"USER": "duetime", "PASSWORD": PASSWORDS["duetime"], "URL": server.url()}
        duetime.settings.update({f"DUETIME_NATS_{key}": value for key, value in mine.items()})
        operator = {"NATS_URL": login(server.url(), "operator", PASSWORDS["operator"])}
        examples = Examples("nats", tmp_path, NATS_URL=login(server.url(), "acme", PASSWORDS["acme"]))
        if kind == "authorization":
            for name in ("publisher", "subscriber"):  # as the page says
                program = tmp_path / f"{name}.py"
                text, old = program.read_text(), '4222"))'
                assert old in text
                program.write_text(text.replace(old, '4222"), inbox_prefix=b"_INBOX_acme")'))
        denied: list[str] = []

        async def keep(error: Exception) -> None:
            denied.append(str(error))

        try:
            await duetime.start()
            for tenant in ("acme", "globex"):
                await examples.run("prepare", tenant, **operator)
            async with await nats.connect(operator["NATS_URL"]) as by_operator:
                streams = by_operator.jetstream()
                with examples.running("subscriber") as subscriber:
                    assert await examples.run("publisher") == "published expire-order-17\n"
                    assert await said(subscriber) == "time for expire-order-17 order-17"

                    async def is_acknowledged() -> bool:
                        floor = (await streams.consumer_info("TIMER_EVENTS", "orders-acme")).ack_floor
                        return floor is not None and floor.stream_seq == 1

                    await until(is_acknowledged, "the acknowledgement has arrived")
                await streams.publish("timers.events.globex", b"of globex itself")
                before = await stored_for_acme(streams)

                globex = await nats.connect(
                    login(server.url(), "globex", "g"), inbox_prefix=b"_INBOX_globex", error_cb=keep
                )
                by_globex = globex.jetstream(timeout=1)
                await by_globex.publish("timers.commands.globex", b"{}")
                # Neither commands nor events of others, nor dead letters, nor the API of streams.
                for subject in (
                    "timers.commands.acme",
                    "timers.events.acme",
                    "timers.dead.acme",
                    f"{NEXT}.orders-acme",
                ):
                    await globex.publish(subject, event_of("acme", "order-17", "forged"))
                with pytest.raises(nats.errors.Error):
                    await by_globex.add_consumer("TIMER_EVENTS", durable_name="all", timeout=0.2)
                await globex.flush()
                assert bool(denied) == (kind == "authorization"), "in its own account all is allowed, and harmless"
                assert await stored_for_acme(streams) == before

                for subject in ("timers.commands.globex", f"{NEXT}.orders-globex"):
                    for reply in ("timers.commands.acme", "timers.events.acme", "timers.dead.acme"):
                        await globex.publish(subject, b'{"batch":1,"no_wait":true}', reply=reply)
                await globex.flush()

                async def foreign() -> list[bytes]:
                    return [body for body in await stored_for_acme(streams) if body not in before]

                if kind == "accounts":
                    await by_globex.publish("timers.commands.globex", b"{}")  # answered after those before it
                    assert await foreign() == []
                else:

                    async def is_answered() -> bool:
                        found = await foreign()
                        assert all(b"DueTimeReached" not in body and b"ScheduleTimer" not in body for body in found)
                        return any(b'"seq"' in body for body in found)

                    await until(is_answered, "acknowledgements for globex are stored for acme")
                with examples.running("subscriber") as subscriber:  # it survives them
                    await examples.run("publisher", "order-18")
                    while (line := await said(subscriber)).startswith("no event"):
                        assert kind == "authorization"
                    assert line == "time for expire-order-18 order-18"
                await examples.dead_letters("timers.commands.globex", **operator)

                # The answer that there are no events is empty: a request to delete, if it goes to such a subject.
                events = await by_globex.pull_subscribe_bind("orders-globex", stream="TIMER_EVENTS")
                with contextlib.suppress(TimeoutError):
                    while True:
                        for message in await events.fetch(10, timeout=0.5):
                            await message.ack()
                for reply in DELETIONS:  # the acknowledgement of a command does no such harm
                    await globex.publish("timers.commands.globex", b"{}", reply=reply)
                await by_globex.publish("timers.commands.globex", b"{}")
                assert await are_there(streams) == [True, True]
                for reply in DELETIONS:
                    await globex.publish(f"{NEXT}.orders-globex", b'{"batch":1,"no_wait":true}', reply=reply)
                if kind == "accounts":
                    with pytest.raises(TimeoutError):  # answered after those before it
                        await events.fetch(1, timeout=1)
                    assert await are_there(streams) == [True, True]
                else:  # if NATS prevents this one day, the page can claim more

                    async def is_deleted() -> bool:
                        return await are_there(streams) == [False, False]

                    await until(is_deleted, "the consumer of acme and the stream are deleted")
                await globex.close()
            assert await duetime.stop() == 0
            assert "violation" not in duetime.log.read_text().lower()
        finally:
            await duetime.close()


async def are_there(streams: Any) -> list[bool]:
    """What DELETIONS would delete."""
    found = []
    for look in (streams.consumer_info("TIMER_EVENTS", "orders-acme"), streams.stream_info("TIMER_DEAD_LETTERS")):
        try:
            await look
        except nats.js.errors.NotFoundError:
            found.append(False)
        else:
            found.append(True)
    return found


async def stored_for_acme(streams: Any) -> list[bytes]:
    """The messages on subjects of acme that are in the streams of events and dead letters. (Commands are removed.)"""
    found: list[bytes] = []
    for name, subject in (("TIMER_EVENTS", "timers.events.acme"), ("TIMER_DEAD_LETTERS", "timers.dead.acme")):
        state = (await streams.stream_info(name)).state  # both 0: it was never used
        for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
            with contextlib.suppress(nats.js.errors.NotFoundError):
                message = await streams.get_msg(name, sequence)
                if message.subject == subject:
                    found.append(message.data or b"")
    return found


# --- from one broker to the other ----------------------------------------------------------------


async def test_from_nats_to_kafka_as_the_page_says(tmp_path: Path) -> None:
    with own("nats") as old, own("kafka") as new:
        duetime = RealServer(tmp_path)
        by_nats = ByNats(old.url(), duetime)
        (tmp_path / "nats").mkdir()
        (tmp_path / "kafka").mkdir()
        examples = Examples("kafka", tmp_path / "kafka", KAFKA_SERVER=new.url(), REPLICAS="1")
        try:
            await duetime.start()
            await Examples("nats", tmp_path / "nats", **by_nats.environment).run("publisher", "old")
            await until(lambda: outcome(duetime, "expire-old", "delivered"), "the event is in NATS")
            timer = {"namespace": "acme", "timerId": "scheduled", "delay": "1h"}
            assert (await duetime.call("timers/create", timer))[0] == 200
            assert await duetime.stop() == 0
            del duetime.settings["DUETIME_NATS_URL"]
            by_kafka = ByKafka(new.url(), duetime)
            await by_kafka.prepare_topics(examples)
            await duetime.start()

            # The namespace keeps its target, which nobody can publish to now; so does the timer.
            await examples.run("publisher", "new")
            await examples.dead_letters("default target")
            fired = {"namespace": "acme", "timerId": "scheduled"}
            assert (await duetime.call("timers/fireNow", fired))[0] == 200
            await until(lambda: outcome(duetime, "scheduled", "failed"), "it has failed")

            update = {"namespace": "acme", "callbackUrl": by_kafka.target}
            assert (await duetime.call("namespaces/update", update))[0] == 200
            assert "published again" in await examples.run("dead_letters", "default target")
            await until(lambda: outcome(duetime, "expire-new", "delivered"), "the event is in Kafka")
            assert (await duetime.call("timers/create", timer))[0] == 200  # it is over: a new one, with the new target
            assert (await duetime.call("timers/fireNow", fired))[0] == 200
            await until(lambda: outcome(duetime, "scheduled", "delivered"), "its event is in Kafka too")
            # Ids that were used over NATS.
            await examples.run("publisher", "old")
            ignored = 'duetime_commands_total{result="ignored"}'

            async def is_ignored() -> bool:
                return await duetime.metric(ignored) == 1

            await until(is_ignored, "the command is ignored")
            consumer = AIOKafkaConsumer("timers.events", bootstrap_servers=new.url(), auto_offset_reset="earliest")
            async with consumer:
                found = {json.loads((await consumer.getone()).value)["payload"]["serviceCallId"] for _ in range(2)}
            assert found == {"expire-new", "scheduled"}
            assert await duetime.stop() == 0
        finally:
            await duetime.close()


async def outcome(duetime: RealServer, timer_id: str, state: str) -> bool:
    status, timer = await duetime.call("timers/get", {"namespace": "acme", "timerId": timer_id})
    return status == 200 and timer["timer"]["state"] == state


def test_the_demo_shows_both_directions_and_stops_everything(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo_nats.main() == 0
    out, err = capfd.readouterr()
    steps = [line.split()[2:5] for line in out.splitlines() if " s  " in line]
    assert [step for step in steps if step[0] == "received"] == [
        ["received", "DueTimeReached", timer] for timer in ("tea", "invoice", "parcel")
    ]
    assert steps[-1] == ["is", "cancelled", "alarm"]
    assert err == ""
