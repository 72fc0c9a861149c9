"""Look-ups of names with real threads: names that hang keep only their owner waiting."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import uvloop

from duetime.deliveries.egress import Resolver
from duetime.deliveries.lookups import LOOKUPS_MAX, LookupSlots, LookupThreads, addresses_of
from duetime.errors import Shortage

# Every test runs on both loops: under uvloop, look-ups of the event loop run two at a time.
pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


class Dns:
    """Names that begin with "hang" are answered when the test says so. All others are found."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host.startswith("hang"):
            assert self.may_answer.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ["8.8.8.8"]


@asynccontextmanager
async def resolving(dns: Dns, timeout_ms: int = 20_000) -> AsyncIterator[Resolver]:
    threads = LookupThreads(dns)
    resolver = Resolver(lookup=threads, timeout_ms=timeout_ms)
    try:
        yield resolver
    finally:
        dns.may_answer.set()
        threads.close()
        await resolver.close()


async def asked_for(resolver: Resolver, count: int) -> None:
    async with asyncio.timeout(10):
        while len(resolver._lookups) < count:
            await asyncio.sleep(0)


async def test_four_names_that_hang_do_not_delay_a_name_that_is_found() -> None:
    dns = Dns()
    async with resolving(dns) as resolver:
        hanging = [asyncio.create_task(resolver(f"hang{n}.example", 443, "a")) for n in range(4)]
        await asked_for(resolver, 4)
        async with asyncio.timeout(10):
            assert await resolver("healthy.example", 443, "a") == ("8.8.8.8",)
        assert not any(task.done() for task in hanging)
        dns.may_answer.set()
        results = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(result, socket.gaierror) for result in results)


async def test_200_names_of_one_namespace_that_never_resolve_leave_look_ups_for_the_others() -> None:
    dns = Dns()
    async with resolving(dns) as resolver:
        calls = [asyncio.create_task(resolver(f"hang{n}.example", 443, "hostile")) for n in range(200)]
        await asked_for(resolver, LOOKUPS_MAX // 2)
        refused = [task for task in calls if task.done()]
        assert len(refused) > 140, "more than its share is refused at once"
        for task in refused:
            assert isinstance(task.exception(), Shortage)
        async with asyncio.timeout(10):
            for number in range(50):
                assert await resolver(f"healthy{number}.example", 443, "victim") == ("8.8.8.8",)
        assert LOOKUPS_MAX * 3 // 4 <= len(resolver._lookups) < LOOKUPS_MAX
        dns.may_answer.set()
        await asyncio.gather(*calls, return_exceptions=True)
        async with asyncio.timeout(10):
            assert await resolver("own.example", 443, "hostile") == ("8.8.8.8",)


async def test_a_name_that_hangs_fails_at_the_deadline_and_is_not_looked_up_a_second_time() -> None:
    dns = Dns()
    async with resolving(dns, timeout_ms=50) as resolver:
        for _ in range(3):
            with pytest.raises(socket.gaierror, match=r"no answer within 0\.05 s"):
                await resolver("hang.example", 443, "a")
        assert dns.asked == ["hang.example"]
        assert resolver._slots.taken == 1, "its thread is still in use"
        dns.may_answer.set()
        async with asyncio.timeout(10):
            while resolver._lookups:
                await asyncio.sleep(0)
        assert resolver._slots.taken == 0
        with pytest.raises(socket.gaierror, match="Temporary failure"):
            await resolver("hang.example", 443, "a")
        assert dns.asked == ["hang.example"], "the failure is remembered"


async def test_threads_are_started_as_they_are_needed_and_used_again() -> None:
    dns = Dns()
    threads = LookupThreads(dns)
    for number in range(20):
        assert await threads(f"healthy{number}.example") == ["8.8.8.8"]
    assert threads._started == 1
    both = asyncio.gather(*(threads(f"hang{n}.example") for n in range(3)), return_exceptions=True)
    assert await threads("healthy.example") == ["8.8.8.8"]
    assert threads._started <= 5
    dns.may_answer.set()
    await both
    threads.close()


async def test_a_call_that_is_cancelled_leaves_its_thread_to_later_ones() -> None:
    dns = Dns()
    threads = LookupThreads(dns)
    call = asyncio.create_task(threads("hang.example"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    dns.may_answer.set()
    async with asyncio.timeout(10):
        while threads._running:
            await asyncio.sleep(0)
    assert await threads("healthy.example") == ["8.8.8.8"]
    assert threads._started == 1
    threads.close()


async def test_a_system_without_threads_to_spare_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = LookupThreads(Dns())
    resolver = Resolver(lookup=threads)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Shortage, match=r"no thread to look up a\.example"):
            await resolver("a.example", 443, "a")
    assert await resolver("a.example", 443, "a") == ("8.8.8.8",), "it was not remembered"
    threads.close()


def test_an_owner_alone_gets_four_fifths_and_others_always_get_some() -> None:
    slots = LookupSlots(64)
    alone = 0
    while slots.take("a"):
        alone += 1
    assert alone == 52
    for other in ("b", "c", "d"):
        assert slots.take(other)
    for _ in range(alone):
        slots.release("a")
    assert slots.taken == 3
    several = 0
    while slots.take("b"):
        several += 1
    assert several > 40


async def test_names_are_found_as_on_the_rest_of_the_machine() -> None:
    """In /etc/hosts, on every machine."""
    threads = LookupThreads()
    assert set(await threads("localhost")) <= {"127.0.0.1", "::1"}
    with pytest.raises(socket.gaierror):
        await threads("nowhere.invalid")
    threads.close()


def test_without_a_file_descriptor_a_look_up_is_a_shortage_and_no_unknown_name() -> None:
    """In a process of its own, which has no descriptor left."""
    lines = (
        "import os, resource, socket, errno",
        "from duetime.deliveries.lookups import addresses_of",
        "addresses_of('localhost')",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
        "taken = []",
        "try:",
        "    while True: taken.append(os.dup(0))",
        "except OSError: pass",
        "for name in ('nowhere.invalid', 'shop.example'):",
        "    try: addresses_of(name)",
        "    except socket.gaierror as error: print('gaierror', error)",
        "    except OSError as error: print(errno.errorcode[error.errno])",
    )
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["EMFILE", "EMFILE"]


def test_a_look_up_that_hangs_does_not_delay_the_end_of_the_process() -> None:
    lines = (
        "import asyncio, threading",
        "from duetime.deliveries.egress import Resolver",
        "from duetime.deliveries.lookups import LookupThreads",
        "async def main():",
        "    resolver = Resolver(lookup=LookupThreads(lambda host: threading.Event().wait()), timeout_ms=10)",
        "    try: await resolver('hang.example', 443, 'a')",
        "    except OSError as error: print(error.strerror)",
        "    await resolver.close()",
        "asyncio.run(main())",
    )
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=30
    )
    assert ran.stdout.strip() == "no answer within 0.01 s"


def test_every_address_of_a_name_is_text() -> None:
    assert all(isinstance(address, str) for address in addresses_of("localhost"))
