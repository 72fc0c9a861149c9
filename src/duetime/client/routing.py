"""Chooses the instance a request is sent to, and the instances to try if that one cannot be reached.

A client is given one URL or several. With `direct` it also reads from `cluster/map` which instance owns which shard,
and sends a call about a timer to the owner of its shard. This saves a forward from another instance. The map may be
out of date: an instance forwards a command whose shard it does not own.

An address from the map is used only after the expected instance was verified there (`/healthz` returns its id). From
the network of the client the address may reach no server, or a different server, which must get neither timers nor the
token. It also means that no request waits for an address that never answered. A client with an https URL never sends
to an http address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from time import monotonic
from typing import Final, Literal, Protocol

import msgspec

from duetime.client.batching import RequestBatcher
from duetime.client.errors import CallKind
from duetime.client.models import Created
from duetime.client.responses import ClusterMap, decode_map
from duetime.domain.timer import Verdict, shard_of
from duetime.errors import DuetimeError, SetupError
from duetime.http.client import HttpClient, HttpError, Target, parse_target, request_head

__all__ = ["Direct", "Instance", "Route", "Routes"]

Direct = bool | Literal["https"]

REFRESH_INTERVAL_S: Final = 10.0  # how often the map is read, while it is used
REFRESH_SPACING_S: Final = 0.5  # after a failure the map is read at once, but not more often than this
UNAVAILABLE_PAUSE_S: Final = 60.0  # pause if no map is available, or no instance of it can be verified
FIRST_MAP_WAIT_S: Final = 2.0  # the longest time that the first call waits for the map
_MAP_TIMEOUT_MS: Final = 2_000
_VERIFY_TIMEOUT_MS: Final = 1_000
_NEVER: Final = float("-inf")


class Instance:
    """The URL of an instance, and the heads of requests to it, which are built once for each path."""

    __slots__ = ("_headers", "failed_until", "heads", "url")

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._headers = headers
        self.heads: dict[str, tuple[Target, bytes]] = {}
        self.failed_until = _NEVER
        self.head("/readyz", "GET")  # raises SetupError for a malformed URL or token

    def head(self, path: str, method: str = "POST") -> tuple[Target, bytes]:
        try:
            target = parse_target(self.url + path)
        except ValueError as error:
            raise SetupError(f"the server's URL {error}") from None  # without the URL, which may contain a password
        try:
            head = request_head(method, target, self._headers)
        except ValueError as error:
            raise SetupError(f"the token: {error}") from None
        self.heads[path] = target, head
        return target, head


class Batches(Protocol):
    """What a route needs of Calls: to send one batch."""

    def create_batch(
        self, items: Sequence[bytes], kind: CallKind, route: Route
    ) -> Awaitable[Sequence[Created | DuetimeError]]: ...
    def delete_batch(
        self, items: Sequence[bytes], kind: CallKind, route: Route
    ) -> Awaitable[Sequence[Verdict | DuetimeError]]: ...


class Route:
    """The instances to try, in order: the next one only if nothing was sent. Calls with the same route share
    batches."""

    __slots__ = ("creates", "creates_if_absent", "deletes", "instances")

    def __init__(self, instances: Sequence[Instance], batches: Batches) -> None:
        self.instances = tuple(instances)
        # Three batchers, because all items of a batch must follow the same retry rule.
        self.creates = RequestBatcher(lambda items: batches.create_batch(items, CallKind.NOT_IDEMPOTENT, self))
        self.creates_if_absent = RequestBatcher(lambda items: batches.create_batch(items, CallKind.IDEMPOTENT, self))
        self.deletes = RequestBatcher(lambda items: batches.delete_batch(items, CallKind.IDEMPOTENT, self))


class _DiscoveredInstance:
    """An instance of the map, and the route that begins with it. `verified`: the instance answered at its address, and
    no request to it has failed since."""

    __slots__ = ("instance", "instance_id", "route", "verified")

    def __init__(self, instance_id: str, instance: Instance, route: Route) -> None:
        self.instance_id = instance_id
        self.instance = instance
        self.route = route
        self.verified = False


class Routes:
    """The routes of a client: `default_route` tries the given URLs; each owner in the map has a route of its own."""

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], direct: Direct, batches: Batches, http: HttpClient
    ) -> None:
        self._headers = headers
        self._batches = batches
        self._http = http
        self._given = [Instance(url, headers) for url in urls]
        self._discovered_scheme = _discovered_scheme(urls, direct)
        self.is_direct = self._discovered_scheme is not None
        self.map_pending = self.is_direct  # no attempt to read the map has ended yet
        self.default_route = Route(self._given, batches)
        self._discovered: dict[str, _DiscoveredInstance] = {}  # by instance id
        self._num_shards: dict[str, int] = {}  # by namespace
        self._shard_routes: list[Route] = []  # by shard
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_at = self._refresh_not_before = _NEVER

    # called for every request

    def route_of(self, namespace: str, timer_id: str) -> Route:
        if not self.is_direct:
            return self.default_route
        num_shards = self._num_shards.get(namespace)
        if num_shards is None or monotonic() >= self._refresh_at:
            self.refresh_soon()
        if num_shards is None:
            return self.default_route
        try:
            return self._shard_routes[shard_of(timer_id, num_shards)]
        except (AttributeError, IndexError):  # not text: the server refuses it, with an error that names the field
            return self.default_route

    # called after a failed request

    def mark_failed(self, instance: Instance) -> None:
        """It could not be reached, or did not answer. Other instances are tried first until it is verified again."""
        if len(self._given) == 1 and not self.is_direct:
            return
        instance.failed_until = monotonic() + REFRESH_INTERVAL_S
        for discovered in self._discovered.values():
            if discovered.instance is instance:
                discovered.verified = False
        self._move_to_end(instance)
        self.refresh_soon()

    def mark_refused(self, instance: Instance) -> None:
        """It answered 503: it may be stopping, or the shard may have another owner."""
        if len(self._given) > 1:
            self._move_to_end(instance)
        self.refresh_soon()

    def _move_to_end(self, instance: Instance) -> None:
        if instance in self._given:
            self._given.remove(instance)
            self._given.append(instance)
        self._reorder()

    def _reorder(self) -> None:
        now = monotonic()
        verified = [discovered.instance for discovered in self._discovered.values() if discovered.verified]
        good = [instance for instance in self._given if instance.failed_until <= now]
        rest = _without_duplicates([*good, *verified, *self._given])
        self.default_route.instances = rest
        for discovered in self._discovered.values():
            first = [discovered.instance] if discovered.verified else []
            discovered.route.instances = _without_duplicates([*first, *rest])

    # the map

    async def wait_for_map(self, timeout_s: float) -> None:
        self.refresh_soon()
        if self._refresh_task is not None:
            await asyncio.wait({self._refresh_task}, timeout=min(timeout_s, FIRST_MAP_WAIT_S))
        self.map_pending = False

    def refresh_soon(self) -> None:
        """Reads the map in the background: one read at a time, at most every REFRESH_SPACING_S."""
        if not self.is_direct or self._refresh_task is not None:
            return
        wait_s = self._refresh_not_before - monotonic()
        if wait_s <= REFRESH_SPACING_S:  # otherwise no map was available, and UNAVAILABLE_PAUSE_S is not over
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_map(wait_s))

    async def close(self) -> None:
        self.is_direct = False
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.wait({self._refresh_task})

    async def _refresh_map(self, wait_s: float) -> None:
        available = False
        try:
            await asyncio.sleep(wait_s)
            found = await self._fetch_map()
            available = await self._use_map(found) if isinstance(found, ClusterMap) else found
        finally:
            now = monotonic()
            self._refresh_at = now + (REFRESH_INTERVAL_S if available else UNAVAILABLE_PAUSE_S)
            self._refresh_not_before = now + (REFRESH_SPACING_S if available else UNAVAILABLE_PAUSE_S)
            self._refresh_task = None

    async def _fetch_map(self) -> ClusterMap | bool:
        """The map, from the first instance that has one. Otherwise: True if there may be one soon."""
        soon = False
        for instance in self.default_route.instances:
            url = instance.url + "/api/v1/cluster/map"
            try:
                answer = await self._http.request("POST", url, self._headers, b"{}", timeout_ms=_MAP_TIMEOUT_MS)
                if answer.status == 200:
                    return decode_map(answer.body)
                soon |= answer.status >= 429  # otherwise the token may not read, or the server has no map
            except HttpError:
                soon = True
            except msgspec.MsgspecError:
                continue
        return soon

    async def _use_map(self, found: ClusterMap) -> bool:
        """Replaces the routes by those of the map. False: no instance of the map can be verified from here."""
        listed = [self._instance_at(*both) for both in zip(found.instances, found.instance_ids, strict=False)]
        discovered = {one.instance_id: one for one in listed if one is not None}
        await asyncio.gather(*(self._verify(one) for one in discovered.values() if not one.verified))
        routes = [self.default_route if one is None else one.route for one in listed]
        self._discovered = discovered
        self._num_shards = found.namespaces
        self._shard_routes = [
            self.default_route if owner is None or owner >= len(routes) else routes[owner] for owner in found.owners
        ]
        self._reorder()
        return not discovered or any(one.verified for one in discovered.values())

    def _instance_at(self, address: str, instance_id: str) -> _DiscoveredInstance | None:
        known = self._discovered.get(instance_id)
        url = f"{self._discovered_scheme}://{address}"
        if known is not None and known.instance.url == url:
            return known
        given = next((instance for instance in self._given if instance.url == url), None)
        try:
            if parse_target(url).path != "/" or "?" in address or address.endswith("/"):
                return None
            instance = given or Instance(url, self._headers)
        except (ValueError, SetupError):
            return None
        return _DiscoveredInstance(instance_id, instance, Route(self.default_route.instances, self._batches))

    async def _verify(self, one: _DiscoveredInstance) -> None:
        with contextlib.suppress(HttpError):
            answer = await self._http.request("GET", one.instance.url + "/healthz", timeout_ms=_VERIFY_TIMEOUT_MS)
            one.verified = answer.header("duetime-instance") == one.instance_id


def _discovered_scheme(urls: Sequence[str], direct: Direct) -> str | None:
    """The URL scheme for addresses of the map. None: they are not used."""
    if direct not in (False, True, "https"):
        raise SetupError('direct must be True, False or "https"')
    if direct == "https":
        return "https"
    return "http" if direct and all(url.lower().startswith("http://") for url in urls) else None


def _without_duplicates(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    first: dict[str, Instance] = {}
    for instance in instances:
        first.setdefault(instance.url, instance)
    return tuple(first.values())
