"""The egress policy: a corpus of hostile addresses, what an operator may allow, and names that change."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import pytest

from duetime.clock import SystemClock
from duetime.config import load_config
from duetime.deliveries.egress import LOOPBACK, Resolver, literal_address, parse_networks, refusal
from duetime.deliveries.webhook import Webhook
from duetime.errors import AddressRefused, Shortage
from duetime.http.client import HttpClient, HttpError
from duetime.testing.virtual import VirtualClock, run_virtual

CORPUS = [
    line.split(" #", 1)[0].strip().replace("\\u00ad", "\u00ad")
    for line in Path(__file__).with_name("hostile_addresses.txt").read_text("utf-8").splitlines()
    if line.strip() and not line.startswith("#")
]

HOSTS = [entry for entry in CORPUS if not set(entry) & set("/\\")]

# Neighbours of the refused networks, mostly.
PUBLIC_V4 = """8.8.8.8 1.1.1.1 9.255.255.255 11.0.0.1 100.63.255.255 100.128.0.1 126.255.255.255 128.0.0.1 168.63.129.15
    169.253.1.1 172.15.255.255 172.32.0.1 192.0.1.1 192.167.1.1 198.17.1.1 198.20.0.1 223.255.255.255"""
PUBLIC_V6 = "2001:200::1 2001:4860:4860::8888 2003::1 2400::1 2606:4700:4700::1111 2a00:1450:4001::200e 3ffd::1"


def url_of(entry: str) -> str:
    if entry not in HOSTS:
        return entry
    return f"http://[{entry}]/" if ":" in entry else f"http://{entry}/"


# --- the policy ----------------------------------------------------------------------------------


def test_the_corpus_is_a_corpus() -> None:
    assert len(CORPUS) >= 150
    assert len(set(CORPUS)) == len(CORPUS)


@pytest.mark.parametrize("entry", CORPUS)
async def test_a_hostile_target_is_refused_when_a_timer_is_created(entry: str) -> None:
    webhook = Webhook(load_config(environ={}), SystemClock(), loopback_allowed=False)
    with pytest.raises(ValueError, match="must not point at" if entry in HOSTS else "must "):
        webhook.check(url_of(entry), "orders")
    await webhook.close()


@pytest.mark.parametrize("entry", HOSTS)
async def test_a_hostile_host_is_refused_again_when_it_is_resolved(entry: str) -> None:
    async def lookup(host: str) -> Sequence[str]:
        assert host.lower().removesuffix(".").endswith("localhost"), "only names are looked up"
        return ["::1", "127.0.0.1"]

    with pytest.raises(AddressRefused):
        await Resolver(lookup=lookup)(entry, 80)


@pytest.mark.parametrize("address", [*PUBLIC_V4.split(), *PUBLIC_V6.split()])
def test_a_public_address_passes(address: str) -> None:
    assert refusal(ip_address(address), ()) is None


@pytest.mark.parametrize(
    ("address", "networks", "passes"),
    [
        ("10.1.2.3", ["10.1.0.0/16"], True),
        ("10.2.0.1", ["10.1.0.0/16"], False),
        ("::ffff:10.1.2.3", ["10.1.0.0/16"], True),
        ("::ffff:10.2.0.1", ["10.1.0.0/16"], False),
        ("64:ff9b::10.1.2.3", ["10.1.0.0/16"], False),
        ("2002:a01:203::", ["10.1.0.0/16"], False),
        ("fd00::5", ["fd00::/8"], True),
        ("fd00:ec2::254", ["fd00::/64"], False),
        ("127.0.0.1", ["10.0.0.0/8"], False),
        ("169.254.169.254", ["169.254.169.254/32"], True),
        ("127.0.0.9", [str(network) for network in LOOPBACK], True),
        ("::1", [str(network) for network in LOOPBACK], True),
        ("::ffff:127.0.0.1", [str(network) for network in LOOPBACK], True),
        ("0.0.0.0", [str(network) for network in LOOPBACK], False),
        ("::", [str(network) for network in LOOPBACK], False),
    ],
)
def test_an_operator_may_allow_networks_and_no_more_than_those(address: str, networks: list[str], passes: bool) -> None:
    assert (refusal(ip_address(address), parse_networks(networks)) is None) == passes


@pytest.mark.parametrize("text", ["10.0.0.1/8", "ten", "10.0.0.0/33", ""])
def test_a_network_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a network"):
        parse_networks([text])


@pytest.mark.parametrize("host", ["example.com", "1.2.3.4.5", "a1", "0xg", "256.0.0.1", "1.2.3.4x", "xn--bcher-kva.de"])
def test_names_are_not_mistaken_for_addresses(host: str) -> None:
    assert literal_address(host) is None


# --- the resolver --------------------------------------------------------------------------------


class Names:
    """A DNS of our own: answers are set by the test, and may be held back."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked += 1
        await self.gate.wait()
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


NO_SUCH_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_one_refused_address_refuses_the_name() -> None:
    resolver = Resolver(lookup=Names(["8.8.8.8", "10.0.0.1"]))
    with pytest.raises(
        AddressRefused, match=r"mixed\.example is 10\.0\.0\.1, a private address, which delivery\.allow"
    ):
        await resolver("mixed.example", 443)


async def test_allowed_networks_count_for_names_too_and_mapped_addresses_are_unwrapped() -> None:
    resolver = Resolver(parse_networks(["10.0.0.0/8"]), lookup=Names(["10.0.0.1", "::ffff:10.0.0.1", "8.8.8.8"]))
    assert tuple(await resolver("inside.example", 443)) == ("10.0.0.1", "8.8.8.8")


async def test_literal_addresses_are_canonical_and_never_looked_up() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(LOOPBACK, lookup=names)
    assert tuple(await resolver("0x7f.1", 80)) == ("127.0.0.1",)
    assert tuple(await resolver("::ffff:127.0.0.1", 80)) == ("127.0.0.1",)
    assert tuple(await resolver("8.8.4.4", 80)) == ("8.8.4.4",)
    assert names.asked == 0


async def test_a_fresh_answer_is_not_asked_for_again_and_many_ask_once() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(lookup=names)
    names.gate.clear()
    calls = [asyncio.create_task(resolver("a.example", 80)) for _ in range(50)]
    await asyncio.sleep(0)
    names.gate.set()
    assert {tuple(await call) for call in calls} == {("8.8.8.8",)}
    await resolver("a.example", 443)
    assert names.asked == 1


async def test_a_caller_that_gives_up_does_not_spoil_the_lookup_for_the_others() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(lookup=names)
    names.gate.clear()
    first, second = (asyncio.create_task(resolver("a.example", 80)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    names.gate.set()
    assert tuple(await second) == ("8.8.8.8",)
    assert names.asked == 1


async def settled(resolver: Resolver) -> None:
    while resolver._lookups:
        await asyncio.gather(*resolver._lookups.values())
        await asyncio.sleep(0)


async def test_an_old_answer_is_used_while_one_lookup_runs_beside() -> None:
    names = Names(["8.8.8.8"], ["8.8.4.4"])
    resolver = Resolver(lookup=names, fresh_ms=-1)
    await resolver("a.example", 80)
    names.gate.clear()
    for _ in range(5):
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
    names.gate.set()
    await settled(resolver)
    assert tuple(await resolver("a.example", 80)) == ("8.8.4.4",)
    await resolver.close()
    assert 2 <= names.asked <= 3


async def test_a_failing_dns_does_not_take_away_what_was_known_until_it_is_stale() -> None:
    resolver = Resolver(lookup=Names(["8.8.8.8"], NO_SUCH_NAME), fresh_ms=-1)
    for _ in range(3):
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
        await settled(resolver)
    stale = Resolver(lookup=Names(["8.8.8.8"], NO_SUCH_NAME), fresh_ms=-1, stale_ms=-1)
    await stale("a.example", 80)
    with pytest.raises(socket.gaierror, match="not known"):
        await stale("a.example", 80)


async def test_a_name_that_fails_is_not_asked_for_at_the_pace_of_timers() -> None:
    names = Names(NO_SUCH_NAME)
    resolver = Resolver(lookup=names)
    for _ in range(5):
        with pytest.raises(socket.gaierror):
            await resolver("nowhere.invalid", 80)
    assert names.asked == 1
    with pytest.raises(socket.gaierror):
        await Resolver()("a" * 64 + ".example", 80)


async def test_the_cache_is_bounded() -> None:
    resolver = Resolver(lookup=Names(["8.8.8.8"]), names_max=10)
    for number in range(100):
        await resolver(f"{number}.example", 80)
    assert len(resolver._found) == 10


def test_answers_age_by_the_defaults() -> None:
    """Used as they are for 30 s, then once more while a lookup runs beside, after 300 s not at all."""

    async def scenario(_: VirtualClock) -> None:
        names = Names(["8.8.8.8"], ["8.8.4.4"], ["1.1.1.1"])
        resolver = Resolver(lookup=names)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
        await asyncio.sleep(29.9995)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
        await settled(resolver)
        assert names.asked == 1
        await asyncio.sleep(0.001)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
        await settled(resolver)
        assert names.asked == 2
        await asyncio.sleep(299.9995)
        names.gate.clear()
        assert tuple(await resolver("a.example", 80)) == ("8.8.4.4",)
        await asyncio.sleep(0.001)
        waiting = asyncio.create_task(resolver("a.example", 80))
        await asyncio.sleep(4)
        assert not waiting.done()  # what is known is too old to be used
        names.gate.set()
        assert tuple(await waiting) == ("1.1.1.1",)
        assert names.asked == 3

    run_virtual(scenario)


def test_a_name_that_failed_or_was_refused_is_asked_for_again_later() -> None:
    async def scenario(_: VirtualClock) -> None:
        names = Names(NO_SUCH_NAME, ["8.8.8.8"])
        resolver = Resolver(lookup=names)
        for pause_s, asked in ((0, 1), (1.9995, 1)):
            await asyncio.sleep(pause_s)
            with pytest.raises(socket.gaierror, match="Name or service not known"):
                await resolver("a.example", 80)
            assert names.asked == asked
        await asyncio.sleep(0.001)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)

        names = Names(["10.0.0.1"], ["8.8.8.8"])
        resolver = Resolver(lookup=names)
        for pause_s in (0, 30.0005):
            await asyncio.sleep(pause_s)
            with pytest.raises(AddressRefused):
                await resolver("a.example", 80)
        await settled(resolver)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)

    run_virtual(scenario)


def test_what_was_known_outlives_a_failing_dns_for_300_seconds_and_no_longer() -> None:
    async def scenario(_: VirtualClock) -> None:
        names = Names(["8.8.8.8"], NO_SUCH_NAME)
        resolver = Resolver(lookup=names)
        await resolver("a.example", 80)
        await asyncio.sleep(299.9995)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
        await settled(resolver)  # that lookup failed
        await asyncio.sleep(0.001)
        for _n in range(3):
            with pytest.raises(socket.gaierror):
                await resolver("a.example", 80)
        assert names.asked == 3  # the failure was remembered

    run_virtual(scenario)


async def test_a_refusal_replaces_what_was_known_at_once() -> None:
    resolver = Resolver(lookup=Names(["8.8.8.8"], ["8.8.8.8", "10.0.0.1"]), fresh_ms=-1)
    await resolver("a.example", 80)
    await resolver("a.example", 80)
    await settled(resolver)
    with pytest.raises(AddressRefused):
        await resolver("a.example", 80)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([], "the name has no address"),
        (OSError("the line is cut"), "the line is cut"),
        (socket.gaierror(socket.EAI_AGAIN, "Try again"), "^\\[Errno -2\\] Try again$"),
    ],
)
async def test_a_failure_says_why(answer: list[str] | OSError, says: str) -> None:
    with pytest.raises(socket.gaierror, match=says):
        await Resolver(lookup=Names(answer))("a.example", 80)


async def test_a_full_cache_forgets_the_oldest_name_and_no_other() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(lookup=names, names_max=2, fresh_ms=-1)
    for name, known in (("a", "a"), ("b", "ab"), ("b", "ab"), ("c", "bc")):
        await resolver(f"{name}.example", 80)
        await settled(resolver)
        assert list(resolver._found) == [f"{letter}.example" for letter in known]
    assert Resolver()._names_max == 10_000


async def test_names_of_one_owner_do_not_push_those_of_another_out_of_a_full_cache() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(lookup=names, names_max=10)
    for number in range(3):
        await resolver(f"{number}.victim.example", 443, "victim")
    for number in range(100):
        await resolver(f"{number}.hostile.example", 443, "hostile")
    assert len(resolver._found) == 10
    asked = names.asked
    for number in range(3):
        await resolver(f"{number}.victim.example", 443, "victim")
    assert names.asked == asked
    assert {owner: len(found) for owner, found in resolver._names.items()} == {"victim": 3, "hostile": 7}


async def test_an_owner_with_one_name_gets_a_place_in_a_full_cache() -> None:
    resolver = Resolver(lookup=Names(["8.8.8.8"]), names_max=2)
    for owner in ("a", "b", "c", "d"):
        await resolver(f"{owner}.example", 443, owner)
    assert len(resolver._found) == 2
    assert set(resolver._names) == {found.owner for found in resolver._found.values()}


async def test_without_a_free_look_up_an_old_answer_is_used_and_an_unknown_name_is_a_shortage() -> None:
    names = Names(["8.8.8.8"])
    resolver = Resolver(lookup=names, fresh_ms=-1, lookups_max=1)
    await resolver("known.example", 443, "a")
    await settled(resolver)
    names.gate.clear()
    hanging = asyncio.create_task(resolver("hang.example", 443, "a"))
    await asyncio.sleep(0)
    assert tuple(await resolver("known.example", 443, "b")) == ("8.8.8.8",)
    with pytest.raises(Shortage, match=r"too many names of namespace .*; new\.example has to wait"):
        await resolver("new.example", 443, "b")
    names.gate.set()
    assert tuple(await hanging) == ("8.8.8.8",)
    await settled(resolver)
    assert tuple(await resolver("new.example", 443, "b")) == ("8.8.8.8",)


async def test_a_name_that_another_owner_waits_for_needs_no_look_up_of_its_own() -> None:
    names = Names(["8.8.8.8"])
    names.gate.clear()
    resolver = Resolver(lookup=names, lookups_max=1)
    first = asyncio.create_task(resolver("a.example", 443, "a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(resolver("a.example", 443, "b"))
    await asyncio.sleep(0)
    names.gate.set()
    assert tuple(await first) == tuple(await second) == ("8.8.8.8",)
    assert names.asked == 1


def test_a_failure_that_took_long_is_remembered_for_as_long() -> None:
    """So that a name whose servers do not answer has a thread at most half of the time."""

    async def scenario(_: VirtualClock) -> None:
        names = Names(socket.gaierror(socket.EAI_AGAIN, "Try again"))
        resolver = Resolver(lookup=names)
        names.gate.clear()
        with pytest.raises(socket.gaierror, match="no answer within 5 s"):
            await resolver("a.example", 80)
        await asyncio.sleep(15)  # 20 s in all
        names.gate.set()
        await settled(resolver)
        await asyncio.sleep(19.9)
        with pytest.raises(socket.gaierror, match="Try again"):
            await resolver("a.example", 80)
        assert names.asked == 1
        await asyncio.sleep(0.2)
        with pytest.raises(socket.gaierror, match="Try again"):
            await resolver("a.example", 80)
        assert names.asked == 2

    run_virtual(scenario)


def test_a_name_known_from_before_is_not_looked_up_at_the_pace_of_timers_while_dns_fails() -> None:
    async def scenario(_: VirtualClock) -> None:
        names = Names(["8.8.8.8"], socket.gaierror(socket.EAI_AGAIN, "Try again"))
        resolver = Resolver(lookup=names)
        await resolver("a.example", 80)
        await asyncio.sleep(31)
        for _n in range(20):
            assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)
            await settled(resolver)
        assert names.asked == 2
        await asyncio.sleep(2.1)
        await resolver("a.example", 80)
        await settled(resolver)
        assert names.asked == 3

    run_virtual(scenario)


async def test_a_shortage_while_a_name_is_looked_up_is_not_remembered() -> None:
    for error in (OSError(errno.EMFILE, "Too many open files"), Shortage("no thread", sent=False)):
        resolver = Resolver(lookup=Names(error, ["8.8.8.8"]))
        with pytest.raises(Shortage):
            await resolver("a.example", 80)
        assert tuple(await resolver("a.example", 80)) == ("8.8.8.8",)


async def test_closing_the_resolver_ends_its_lookups() -> None:
    names = Names(["8.8.8.8"])
    names.gate.clear()
    resolver = Resolver(lookup=names)
    call = asyncio.create_task(resolver("a.example", 80))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (lookup,) = resolver._lookups.values()
    async with asyncio.timeout(10):
        await resolver.close()
    assert lookup.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_case_16_dns_rebinding_never_gets_a_private_connect() -> None:
    """The name is public when it is vetted and private from then on: only vetted answers are ever connected to."""
    connected = 0

    class Inside(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal connected
            connected += 1
            transport.close()

    server = await asyncio.get_running_loop().create_server(Inside, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    # 127.77.0.1 plays the public address: nothing listens there, so that each call tries to connect anew.
    names = Names(["127.77.0.1"], ["127.0.0.1"])
    resolver = Resolver(parse_networks(["127.77.0.0/16"]), lookup=names, fresh_ms=-1)
    client = HttpClient(resolve=resolver, connect_timeout_ms=2_000)
    with pytest.raises(HttpError, match="connection refused"):
        await client.request("POST", f"http://rebinding.example:{port}/", timeout_ms=2_000)
    with pytest.raises(HttpError, match="connection refused"):  # the old answer, while the new one is looked up
        await client.request("POST", f"http://rebinding.example:{port}/", timeout_ms=2_000)
    await settled(resolver)
    for _ in range(3):
        with pytest.raises(AddressRefused, match=r"127\.0\.0\.1, a loopback address"):
            await client.request("POST", f"http://rebinding.example:{port}/", timeout_ms=2_000)
    await client.close()
    await resolver.close()
    server.close()
    assert connected == 0
