"""Which instance a request is sent to, and where it goes on to if that one cannot be reached.

A client is given one URL or several. With `direct` it also learns, from `cluster/map`, who owns which shard,
and sends what is about a timer to the owner of its shard, which saves the hop from any other instance. The
map is a hint: nothing depends on its being right, because an instance hands on what is not its own.

An address that was learnt is used only once the instance that is meant has been met there (`/healthz` names
it). Seen from here it may lead to nobody, or to a stranger, who must get neither timers nor the token; and no
request waits for an address that never answered. Whoever was given an https URL is not made to speak http.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from time import monotonic
from typing import Final, Literal, Protocol

import msgspec

from duetime.client.answers import ClusterMap, decode_map
from duetime.client.failures import Kind
from duetime.client.gathering import Gatherer
from duetime.client.shapes import Created
from duetime.domain.timer import Verdict, shard_of
from duetime.errors import DuetimeError, SetupError
from duetime.http.client import HttpClient, HttpError, Target, parse_target, request_head

__all__ = ["Direct", "Instance", "Routes", "Way"]

Direct = bool | Literal["https"]

PERIOD_S: Final = 10.0  # the map is read anew so often, while it is used
SPACING_S: Final = 0.5  # and in trouble at once, but not more often than this
GIVE_UP_S: Final = 60.0  # no map to be had, or nobody of it to be met: asked again after this
FIRST_WAIT_S: Final = 2.0  # the first call waits for the map, but no longer
_MAP_TIMEOUT_MS: Final = 2_000
_MEET_TIMEOUT_MS: Final = 1_000
_NEVER: Final = float("-inf")


class Instance:
    """A URL where a server answers, with the heads of requests to it, made once."""

    __slots__ = ("_headers", "avoid_until", "heads", "url")

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._headers = headers
        self.heads: dict[str, tuple[Target, bytes]] = {}
        self.avoid_until = _NEVER
        self.head("/readyz", "GET")  # a malformed URL or token is noticed here

    def head(self, path: str, method: str = "POST") -> tuple[Target, bytes]:
        try:
            target = parse_target(self.url + path)
        except ValueError as error:
            raise SetupError(f"the server's URL {error}") from None  # unsaid: it may hold a password
        try:
            head = request_head(method, target, self._headers)
        except ValueError as error:
            raise SetupError(f"the token: {error}") from None
        self.heads[path] = target, head
        return target, head


class Batches(Protocol):
    def create_batch(
        self, items: Sequence[bytes], kind: Kind, way: Way
    ) -> Awaitable[Sequence[Created | DuetimeError]]: ...
    def delete_batch(
        self, items: Sequence[bytes], kind: Kind, way: Way
    ) -> Awaitable[Sequence[Verdict | DuetimeError]]: ...


class Way:
    """The instances to try, in order; the next only if nothing was sent. What goes the same way is gathered."""

    __slots__ = ("creates", "creates_if_absent", "deletes", "instances")

    def __init__(self, instances: Sequence[Instance], batches: Batches) -> None:
        self.instances = tuple(instances)
        # Apart, because one batch has one answer to "may it be repeated?".
        self.creates = Gatherer(lambda items: batches.create_batch(items, Kind.ONCE, self))
        self.creates_if_absent = Gatherer(lambda items: batches.create_batch(items, Kind.REPEATABLE, self))
        self.deletes = Gatherer(lambda items: batches.delete_batch(items, Kind.REPEATABLE, self))


class _Learnt:
    """An instance of the map, and the way that begins with it. `met`: it is there, as far as we know."""

    __slots__ = ("instance", "instance_id", "met", "way")

    def __init__(self, instance_id: str, instance: Instance, way: Way) -> None:
        self.instance_id = instance_id
        self.instance = instance
        self.way = way
        self.met = False


class Routes:
    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], direct: Direct, batches: Batches, http: HttpClient
    ) -> None:
        self._headers = headers
        self._batches = batches
        self._http = http
        self._given = [Instance(url, headers) for url in urls]
        self._scheme = _scheme(urls, direct)
        self.is_direct = self._scheme is not None
        self.unread = self.is_direct  # nothing was learnt yet, nor tried to
        self.anywhere = Way(self._given, batches)
        self._learnt: dict[str, _Learnt] = {}  # by instance id
        self._num_shards: dict[str, int] = {}  # by namespace
        self._ways: list[Way] = []  # by shard
        self._reading: asyncio.Task[None] | None = None
        self._next_at = self._not_before = _NEVER

    # asked for every call

    def way_of(self, namespace: str, timer_id: str) -> Way:
        if not self.is_direct:
            return self.anywhere
        num_shards = self._num_shards.get(namespace)
        if num_shards is None or monotonic() >= self._next_at:
            self.read_soon()
        if num_shards is None:
            return self.anywhere
        try:
            return self._ways[shard_of(timer_id, num_shards)]
        except (AttributeError, IndexError):  # an id that is no text is the server's to refuse
            return self.anywhere

    # what was met on the way

    def failed(self, instance: Instance) -> None:
        """It could not be reached, or did not answer: the others come first until it is met again."""
        if len(self._given) == 1 and not self.is_direct:
            return
        instance.avoid_until = monotonic() + PERIOD_S
        for learnt in self._learnt.values():
            if learnt.instance is instance:
                learnt.met = False
        self._put_last(instance)
        self.read_soon()

    def refused(self, instance: Instance) -> None:
        """Not applied there: it may be stopping, or the shard may have moved."""
        if len(self._given) > 1:
            self._put_last(instance)
        self.read_soon()

    def _put_last(self, instance: Instance) -> None:
        if instance in self._given:
            self._given.remove(instance)
            self._given.append(instance)
        self._order()

    def _order(self) -> None:
        now = monotonic()
        met = [learnt.instance for learnt in self._learnt.values() if learnt.met]
        good = [instance for instance in self._given if instance.avoid_until <= now]
        rest = _once_each([*good, *met, *self._given])
        self.anywhere.instances = rest
        for learnt in self._learnt.values():
            learnt.way.instances = _once_each([learnt.instance, *rest]) if learnt.met else rest

    # the map

    async def read_first(self, timeout_s: float) -> None:
        self.read_soon()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=min(timeout_s, FIRST_WAIT_S))
        self.unread = False

    def read_soon(self) -> None:
        """In the background, one at a time, and not too often."""
        if not self.is_direct or self._reading is not None:
            return
        wait_s = self._not_before - monotonic()
        if wait_s <= SPACING_S:  # else it was given up for a while
            self._reading = asyncio.get_running_loop().create_task(self._read(wait_s))

    async def close(self) -> None:
        self.is_direct = False
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _read(self, wait_s: float) -> None:
        pause_s = GIVE_UP_S
        try:
            await asyncio.sleep(wait_s)
            found = await self._ask()
            if isinstance(found, ClusterMap):
                found = await self._learn(found)
            if found:
                pause_s = PERIOD_S
        finally:
            now = monotonic()
            self._next_at = now + pause_s
            self._not_before = now + (SPACING_S if pause_s == PERIOD_S else GIVE_UP_S)
            self._reading = None

    async def _ask(self) -> ClusterMap | bool:
        """The map, of the first that has it. Without: may there be one soon?"""
        soon = False
        for instance in self.anywhere.instances:
            url = instance.url + "/api/v1/cluster/map"
            try:
                answer = await self._http.request("POST", url, self._headers, b"{}", timeout_ms=_MAP_TIMEOUT_MS)
                if answer.status == 200:
                    return decode_map(answer.body)
                soon |= answer.status >= 429  # else: a token that may not read, or a server without maps
            except HttpError:
                soon = True
            except msgspec.MsgspecError:
                continue
        return soon

    async def _learn(self, found: ClusterMap) -> bool:
        """False: none of them can be met from here."""
        listed = [self._known(*both) for both in zip(found.instances, found.instance_ids, strict=False)]
        learnt = {one.instance_id: one for one in listed if one is not None}
        await asyncio.gather(*(self._meet(one) for one in learnt.values() if not one.met))
        ways = [self.anywhere if one is None else one.way for one in listed]
        self._learnt = learnt
        self._num_shards = found.namespaces
        self._ways = [self.anywhere if owner is None or owner >= len(ways) else ways[owner] for owner in found.owners]
        self._order()
        return not learnt or any(one.met for one in learnt.values())

    def _known(self, address: str, instance_id: str) -> _Learnt | None:
        known = self._learnt.get(instance_id)
        url = f"{self._scheme}://{address}"
        if known is not None and known.instance.url == url:
            return known
        given = next((instance for instance in self._given if instance.url == url), None)
        try:
            if parse_target(url).path != "/" or "?" in address or address.endswith("/"):
                return None
            instance = given or Instance(url, self._headers)
        except (ValueError, SetupError):
            return None
        return _Learnt(instance_id, instance, Way(self.anywhere.instances, self._batches))

    async def _meet(self, one: _Learnt) -> None:
        with contextlib.suppress(HttpError):
            answer = await self._http.request("GET", one.instance.url + "/healthz", timeout_ms=_MEET_TIMEOUT_MS)
            one.met = answer.header("duetime-instance") == one.instance_id


def _scheme(urls: Sequence[str], direct: Direct) -> str | None:
    """How learnt addresses are spoken to; None: not at all."""
    if direct not in (False, True, "https"):
        raise SetupError('direct is True, False or "https"')
    if direct == "https":
        return "https"
    return "http" if direct and all(url.lower().startswith("http://") for url in urls) else None


def _once_each(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    first: dict[str, Instance] = {}
    for instance in instances:
        first.setdefault(instance.url, instance)
    return tuple(first.values())
