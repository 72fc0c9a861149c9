"""The namespaces as this instance knows them: a cache of the store's table that is read again on a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from duetime.clock import Clock
from duetime.domain.timer import SHARDS_MAX, Namespace
from duetime.errors import Conflict, InvalidField, NotFound, OutcomeUnknown, StoreUnavailable, Unserved
from duetime.single_flight import SingleFlight
from duetime.store import Store

__all__ = ["DEFAULT_NAMESPACE", "FRESH_FOR_MS", "Namespaces", "no_namespace"]

DEFAULT_NAMESPACE = "default"
# A create is accepted only if the namespaces were read less than this ago. The deletion of a namespace waits for
# longer, so that all instances have seen it and accept no more creates.
FRESH_FOR_MS = 3_000
_DELETION_ENDS_MS = 30_000
_READ_AGAIN_AFTER_S = 0.05  # requests with wrong names must not overload the store


def no_namespace(name: str) -> NotFound:
    return NotFound(f"There is no namespace {name!r}", field="namespace", code="namespace_not_found")


class Namespaces:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._fresh_until_ms = 0
        self._by_name: dict[str, Namespace] = {}
        self._events = 0  # a number for each read that began and each write that ended, in their order
        self._read = 0  # the number of the read that the cache is of
        self._written: dict[str, int] = {}  # what this instance has written since that read began
        self._deleting: dict[
            str, tuple[int, int]
        ] = {}  # by name: the revision that is marked for deletion, and when it was seen first
        self.on_change: Callable[[], None] = lambda: None  # called when the cache has changed
        self._single_refresh = SingleFlight(self.refresh, pause_s=_READ_AGAIN_AFTER_S)

    async def refresh(self) -> None:
        began_ms = self._clock.boot_ms()
        began = self._events = self._events + 1
        rows = await self._store.namespaces()
        if began < self._read:
            return  # a read that began later has ended already
        self._read = began
        by_name = {namespace.name: namespace for namespace in rows}
        # What was written since the read began is newer than what was read.
        self._written = {name: at for name, at in self._written.items() if at > began}
        by_name.update((name, self._by_name[name]) for name in self._written)
        self._by_name = by_name
        self._fresh_until_ms = began_ms + FRESH_FOR_MS
        self.on_change()

    async def reread(self) -> None:
        """Read the namespaces; the read begins after this call. Callers that ask at the same time share it."""
        await self._single_refresh()

    def usable(self, name: str) -> Namespace | None:
        """The namespace if a create may use it: known, read less than FRESH_FOR_MS ago, and not being deleted. Does not
        wait."""
        namespace = self._by_name.get(name)
        if namespace is None or namespace.deleted or namespace.deleting or self._is_stale:
            return None
        return namespace

    @property
    def _is_stale(self) -> bool:
        return not self._store.capabilities.exclusive and self._clock.boot_ms() > self._fresh_until_ms

    def known(self, name: str) -> Namespace | None:
        """The namespace as it is in the cache, also a deleted one, because its last timers still need its policies.
        Does not wait."""
        return self._by_name.get(name)

    def cached(self) -> Iterable[Namespace]:
        """All namespaces in the cache, deleted ones too. Does not wait."""
        return self._by_name.values()

    def all_known(self) -> list[Namespace]:
        """All namespaces in the cache except deleted ones. Does not wait."""
        return [namespace for namespace in self._by_name.values() if not namespace.deleted]

    def shards_needed(self) -> int:
        return max((namespace.num_shards for namespace in self._by_name.values()), default=0)

    async def get(self, name: str) -> Namespace:
        namespace = self._by_name.get(name)
        if namespace is None or namespace.deleted or self._is_stale:
            await self._single_refresh()  # another instance may have created it a moment ago
            namespace = self._by_name.get(name)
        if namespace is None or namespace.deleted:
            raise no_namespace(name)
        return namespace

    async def get_for_create(self, name: str) -> Namespace:
        """As `get`, but raises Unserved while the namespace is being deleted. Its timers can still be read, changed and
        deleted then."""
        namespace = await self.get(name)
        if namespace.deleting:
            await self._single_refresh()
            namespace = await self.get(name)
        if not namespace.deleting:
            return namespace
        if self._is_abandoned(namespace):
            namespace = await self._unmark(namespace)
        if namespace.deleting:
            raise Unserved(f"Namespace {name!r} is about to be deleted; nothing was applied, try again in seconds")
        return namespace

    async def _unmark(self, marked: Namespace) -> Namespace:
        """Remove the mark that it is being deleted. Returns the namespace as it is now."""
        try:
            return await self.replace(
                msgspec.structs.replace(marked, revision=marked.revision + 1, deleting=False), marked
            )
        except Conflict:  # another create has removed the mark, or another deletion has set a new one
            return await self.get(marked.name)
        except OutcomeUnknown as error:  # of the namespace: the timer itself was not written
            raise StoreUnavailable(error.detail) from error

    def _is_abandoned(self, namespace: Namespace) -> bool:
        """Has the mark been there for so long that the instance that set it must have stopped? If it has not, its
        deletion fails, because the revision has changed."""
        now_ms = self._clock.boot_ms()
        revision, since_ms = self._deleting.get(namespace.name, (-1, now_ms))
        if revision != namespace.revision:
            self._deleting[namespace.name] = (namespace.revision, now_ms)
            return False
        return now_ms - since_ms > _DELETION_ENDS_MS

    async def all(self) -> list[Namespace]:
        await self.refresh()
        return self.all_known()

    async def create(self, namespace: Namespace) -> Namespace:
        """Create it, with the shards it needs. A name keeps its `num_shards` after a deletion: timers may be left in
        its shards."""
        if not 1 <= namespace.num_shards <= SHARDS_MAX:
            raise InvalidField("numShards", f"numShards must be between 1 and {SHARDS_MAX}")
        await self.refresh()
        old = self._by_name.get(namespace.name)
        if old is not None and not old.deleted:
            raise Conflict(f"Namespace {namespace.name!r} exists", field="namespace", code="namespace_exists")
        if old is not None and old.num_shards != namespace.num_shards:
            raise Conflict(
                f"A namespace {namespace.name!r} was deleted that had {old.num_shards} shards; "
                "numShards of a name never changes",
                field="numShards",
                code="num_shards_immutable",
            )
        await self._store.ensure_shards(namespace.num_shards)
        revision = 0 if old is None else old.revision + 1
        return await self._put(msgspec.structs.replace(namespace, revision=revision), old)

    async def replace(self, namespace: Namespace, old: Namespace) -> Namespace:
        return await self._put(namespace, old)

    async def _put(self, namespace: Namespace, old: Namespace | None) -> Namespace:
        if not await self._store.put_namespace(namespace, None if old is None else old.revision):
            await self.refresh()
            raise Conflict(
                f"Namespace {namespace.name!r} was changed by another request at the same time; try again",
                field="namespace",
                code="namespace_changed",
            )
        self._by_name[namespace.name] = namespace
        self._events += 1
        self._written[namespace.name] = self._events
        self.on_change()
        return namespace
