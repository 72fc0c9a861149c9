"""The egress policy: which addresses callbacks may reach, and the resolver that applies it to names.

Users of Duetime choose the URLs that it calls. Without a policy they could reach everything that the server can reach:
databases, admin pages, the metadata service of a cloud. Addresses that are not public are refused unless the operator
allows their network. The networks are listed here one by one, because `ipaddress.is_global` is not such a list: it
allows NAT64, 6to4, site-local and multicast addresses.

A name is checked by the addresses it resolves to. The client connects to the same addresses that were checked: there is
no second lookup whose answer could differ (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import msgspec
from msgspec import Struct

from duetime.deliveries.lookups import LOOKUPS_MAX, LookupSlots, LookupThreads
from duetime.errors import AddressRefused, Shortage
from duetime.http.connect_errors import is_shortage

__all__ = ["LOOPBACK", "Address", "Network", "Resolver", "literal_address", "parse_networks", "refusal"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK: tuple[Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))

# The first network that contains an address gives the reason, so single addresses are listed before their networks.
_REFUSED_V4 = [
    (IPv4Network(network), reason)
    for network, reason in (
        ("169.254.169.254/32", "a cloud metadata address"),  # AWS, Google, Azure, and most others
        ("169.254.170.2/32", "a cloud metadata address"),  # AWS ECS tasks
        ("169.254.170.23/32", "a cloud metadata address"),  # AWS EKS pods
        ("100.100.100.200/32", "a cloud metadata address"),  # Alibaba
        ("192.0.0.192/32", "a cloud metadata address"),  # Oracle
        ("168.63.129.16/32", "a cloud metadata address"),  # Azure's wire server: in a public block
        ("0.0.0.0/8", "an unspecified address"),  # connecting to 0.0.0.0 reaches the machine itself
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a carrier-grade NAT address"),
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "a documentation address"),
        ("192.31.196.0/24", "reserved (AS112)"),
        ("192.52.193.0/24", "reserved (AMT)"),
        ("192.88.99.0/24", "a 6to4 relay address"),
        ("192.168.0.0/16", "a private address"),
        ("192.175.48.0/24", "reserved (AS112)"),
        ("198.18.0.0/15", "a benchmarking address"),
        ("198.51.100.0/24", "a documentation address"),
        ("203.0.113.0/24", "a documentation address"),
        ("224.0.0.0/4", "a multicast address"),
        ("255.255.255.255/32", "the broadcast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
]
_REFUSED_V6 = [
    (IPv6Network(network), reason)
    for network, reason in (
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("::ffff:0:0/96", "an IPv4-mapped address"),
        ("::ffff:0:0:0/96", "an IPv4-translated address"),
        ("::/96", "an IPv4-compatible address"),
        ("64:ff9b::/96", "a NAT64 address"),
        ("64:ff9b:1::/48", "a NAT64 address"),
        ("100::/64", "a discard-only address"),
        ("2001::/32", "a Teredo address"),
        ("2001:2::/48", "a benchmarking address"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "a documentation address"),
        ("2002::/16", "a 6to4 address"),
        ("2620:4f:8000::/48", "reserved (AS112)"),
        ("3ffe::/16", "a reserved address"),  # the former 6bone
        ("3fff::/20", "a documentation address"),
        ("fd00:ec2::254/128", "a cloud metadata address"),  # AWS
        ("fd20:ce::254/128", "a cloud metadata address"),  # Google
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
        # Only 2000::/3 is assigned as global unicast; these are all other networks.
        ("::/3", "a reserved address"),
        ("4000::/2", "a reserved address"),
        ("8000::/1", "a reserved address"),
    )
]


def refusal(address: Address, allowed: Iterable[Network]) -> str | None:
    """Why the address may not be called, or None if it may. Pure.

    An IPv4-mapped IPv6 address is reached by IPv4, so allowing the IPv4 network allows it too. Other forms that contain
    an IPv4 address (NAT64, 6to4, …) go through a gateway, and are refused as what they are.
    """
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    for network in allowed:
        if address in network or (inner is not None and inner in network):
            return None
    if isinstance(address, IPv4Address):
        return next((reason for network, reason in _REFUSED_V4 if address in network), None)
    return next((reason for network, reason in _REFUSED_V6 if address in network), None)


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises a ValueError that names a text that is not a network."""
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ip_network(text))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a network such as 10.1.0.0/16: {error}") from None
    return tuple(networks)


def literal_address(host: str) -> Address | None:
    """The address, if the host is one; also in the unusual forms 127.1, 0x7f.1, 2130706433 and 0177.0.0.1."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host.removesuffix(".")))
    except OSError:
        return None


# --- names ---------------------------------------------------------------------------------------

Lookup = Callable[[str], Awaitable[Sequence[str]]]

_FAILED_MAX_S = 60.0


class _Found(Struct, frozen=True):
    """The result of a look-up: addresses that may be called, or why there are none. `renew_at`: from then on it is used
    while one look-up renews it; after `ends_at` it is not used. `owner`: whose part of the cache it takes."""

    renew_at: float
    ends_at: float
    owner: str
    addresses: tuple[str, ...] = ()
    refused: str | None = None
    failed: str | None = None
    shortage: str | None = None  # never kept


class Resolver:
    """Resolves names to allowed addresses, for HttpClient. Answers are cached, so that most calls need no DNS lookup.

    A fresh answer is used as it is. An older one is used too, while one lookup renews it. If **any** address of a name
    is refused, the name is refused: which address is used would otherwise depend on the order of the answers, and a
    target that works sometimes, or has a private address beside a public one, should always fail.

    Each caller has an `owner` (a namespace). An owner has a share of the look-ups that run at the same time, and the
    names that it asks for replace its own names in a full cache, not those of others. A name that several ask for is
    looked up once. A failure is kept for a short time, and at least for as long as the look-up took: a name whose
    servers do not answer uses a thread at most half of the time.
    """

    def __init__(
        self,
        allowed: Sequence[Network] = (),
        *,
        lookup: Lookup | None = None,
        fresh_ms: int = 30_000,
        stale_ms: int = 300_000,
        failed_ms: int = 2_000,
        timeout_ms: int = 5_000,
        names_max: int = 10_000,
        lookups_max: int = LOOKUPS_MAX,
    ) -> None:
        self._allowed = tuple(allowed)
        self._threads = LookupThreads() if lookup is None else None
        self._lookup: Lookup = self._threads or lookup  # type: ignore[assignment]
        self._fresh_s, self._stale_s, self._failed_s = fresh_ms / 1_000, stale_ms / 1_000, failed_ms / 1_000
        self._timeout_s = timeout_ms / 1_000
        self._names_max = names_max
        self._found: dict[str, _Found] = {}
        self._names: dict[str, dict[str, None]] = {}  # those in _found by owner, the one looked up longest ago first
        self._slots = LookupSlots(lookups_max)
        self._lookups: dict[str, asyncio.Task[_Found]] = {}
        self._give_up_at: dict[str, float] = {}  # of these look-ups

    async def __call__(self, host: str, port: int, owner: str = "") -> Sequence[str]:
        """Raises AddressRefused, OSError if the name cannot be resolved, or Shortage if it cannot be looked up now."""
        literal = literal_address(host)
        if literal is not None:
            return (self._checked(host, literal),)
        found = self._found.get(host)
        now = asyncio.get_running_loop().time()
        if found is None or now > found.ends_at:
            found = await self._wait_for(host, self._look_up(host, owner))
        elif now > found.renew_at:
            with contextlib.suppress(Shortage):  # the old answer is still good
                self._look_up(host, owner)
        if found.refused is not None:
            raise AddressRefused(found.refused)
        if found.failed is not None:
            raise socket.gaierror(socket.EAI_NONAME, found.failed)
        if found.shortage is not None:
            raise Shortage(found.shortage, sent=False)
        return found.addresses

    async def close(self) -> None:
        running = tuple(self._lookups.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._threads is not None:
            self._threads.close()

    def _look_up(self, host: str, owner: str) -> asyncio.Task[_Found]:
        """At most one lookup of a name at a time. It returns failures as values, so no caller has to wait for it."""
        task = self._lookups.get(host)
        if task is None:
            if not self._slots.take(owner):
                raise Shortage(
                    f"too many names of namespace {owner!r} are being looked up; {host} has to wait", sent=False
                )
            task = self._lookups[host] = asyncio.create_task(self._resolve(host, owner))
            self._give_up_at[host] = asyncio.get_running_loop().time() + self._timeout_s
            task.add_done_callback(lambda _: self._looked_up(host, owner))
        return task

    def _looked_up(self, host: str, owner: str) -> None:
        del self._lookups[host], self._give_up_at[host]
        self._slots.release(owner)

    async def _wait_for(self, host: str, task: asyncio.Task[_Found]) -> _Found:
        """Its result, or a failure if it takes too long. It goes on then: a thread cannot be stopped, and its answer
        is good for the next call."""
        give_up_at = self._give_up_at[host]
        left_s = give_up_at - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.wait((task,), timeout=left_s)
        if task.done():
            return task.result()
        return _Found(give_up_at, give_up_at, "", failed=f"no answer within {self._timeout_s:g} s")

    async def _resolve(self, host: str, owner: str) -> _Found:
        loop = asyncio.get_running_loop()
        began = loop.time()
        renew_at, ends_at = began + self._fresh_s, began + self._stale_s
        try:
            addresses = await self._lookup(host)
            checked = dict.fromkeys(self._checked(host, ip_address(text)) for text in addresses)
            found = _Found(renew_at, ends_at, owner, tuple(checked))
            if not checked:
                found = self._failure(began, owner, "the name has no address")
        except AddressRefused as error:
            found = _Found(renew_at, ends_at, owner, refused=str(error))
        except Shortage as error:
            return _Found(began, began, owner, shortage=error.reason)
        except (OSError, ValueError) as error:  # ValueError: a name that DNS does not allow
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if isinstance(error, OSError) and is_shortage(error):
                return _Found(began, began, owner, shortage=f"{host} cannot be looked up: {reason}")
            found = self._failure(began, owner, reason)
        self._remember(host, found)
        return found

    def _failure(self, began: float, owner: str, reason: str) -> _Found:
        now = asyncio.get_running_loop().time()
        until = now + max(self._failed_s, min(now - began, _FAILED_MAX_S))
        return _Found(until, until, owner, failed=reason)

    def _remember(self, host: str, found: _Found) -> None:
        known = self._found.get(host)
        if known is not None:
            if found.failed and known.addresses and asyncio.get_running_loop().time() <= known.ends_at:
                # A failure of DNS: the earlier answer is used until it is stale.
                found = msgspec.structs.replace(known, renew_at=found.renew_at)
            else:
                found = msgspec.structs.replace(found, owner=known.owner)
        elif len(self._found) >= self._names_max:
            self._forget_one()
        self._found[host] = found
        names = self._names.setdefault(found.owner, {})
        names.pop(host, None)
        names[host] = None

    def _forget_one(self) -> None:
        owner = max(self._names, key=lambda owner: len(self._names[owner]))
        names = self._names[owner]
        host = next(iter(names))
        del names[host], self._found[host]
        if not names:
            del self._names[owner]

    def _checked(self, host: str, address: Address) -> str:
        reason = refusal(address, self._allowed)
        if reason is not None:
            shown = f"{host} is" if host == str(address) else f"{host} is {address},"
            raise AddressRefused(f"{shown} {reason}, which delivery.allow_networks does not allow")
        inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return str(inner or address)
