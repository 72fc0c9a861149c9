"""What users do with namespaces: create, read, update, delete. `engine/namespaces.py` is the cache of their rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from duetime.clock import Clock
from duetime.config import Config
from duetime.domain.secrets import kept_secrets
from duetime.domain.timer import BEFORE_ALL, ID_BYTES_MAX, Namespace, NamespaceSpec, Position
from duetime.engine.engine import Engine
from duetime.engine.namespaces import DEFAULT_NAMESPACE, FRESH_FOR_MS, Namespaces
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    SetupError,
    StoreError,
    StoreUnavailable,
)
from duetime.service.commands import Commands
from duetime.store import ListQuery, Store
from duetime.telemetry import log

__all__ = ["NamespaceOperations", "pause_all"]

# After this time every instance has read the mark that a namespace is being deleted, or acknowledges no write to it.
_DELETION_SEEN_SECONDS = FRESH_FOR_MS / 1_000 + 1.0

_CHANGE_ATTEMPTS = 8

_replace = msgspec.structs.replace


async def pause_all(cache: Namespaces, clock: Clock, default_num_shards: int) -> list[str]:
    """Pause every namespace, also `default` if the store is new. Returns their names. No instance is needed for it."""
    await cache.refresh()
    if cache.known(DEFAULT_NAMESPACE) is None:
        new = Namespace(name=DEFAULT_NAMESPACE, num_shards=default_num_shards, created_at_ms=clock.wall_ms())
        with contextlib.suppress(Conflict):  # an instance started at the same time and created it
            await cache.create(new)
    names = [namespace.name for namespace in cache.all_known()]
    for name in names:
        await changed(cache, name, lambda namespace: _replace(namespace, paused=True))
    return names


async def changed(cache: Namespaces, name: str, change: Callable[[Namespace], Namespace]) -> Namespace:
    """Store what `change` makes of the namespace in the cache. If another instance changes it at the same time,
    `change` is applied again, to what that one has stored: neither change is lost."""
    for attempt in range(1, _CHANGE_ATTEMPTS + 1):
        old = await cache.get(name)
        new = change(old)
        if new == old:
            return old
        try:
            return await cache.replace(_replace(new, revision=old.revision + 1, deleting=False), old)
        except Conflict:  # the cache has been read again
            if attempt == _CHANGE_ATTEMPTS:
                raise
    raise AssertionError


class NamespaceOperations:
    def __init__(self, config: Config, engine: Engine, store: Store, commands: Commands) -> None:
        self._config = config
        self._engine = engine
        self._store = store
        self._commands = commands
        self._cache = engine.namespaces
        self._changing = asyncio.Lock()

    async def create_default(self) -> None:
        """Create the namespace `default` at the first start. Refuse a configuration that differs from the stored
        number of shards: timers never move to another shard."""
        num_shards = self._config.namespaces.default_num_shards
        await self._cache.refresh()
        if self._cache.known(DEFAULT_NAMESPACE) is None:
            with contextlib.suppress(Conflict):  # another instance started at the same time and created it
                await self.create(NamespaceSpec(name=DEFAULT_NAMESPACE, num_shards=num_shards))
        known = self._cache.known(DEFAULT_NAMESPACE)
        if known is not None and known.num_shards != num_shards:
            raise SetupError(
                f"namespaces.default_num_shards is {num_shards}, but the store was created with {known.num_shards}: "
                "the number of shards of a namespace never changes",
                field="namespaces.default_num_shards",
            )

    async def create(self, spec: NamespaceSpec) -> Namespace:
        if not 1 <= len(spec.name.encode()) <= ID_BYTES_MAX or "\0" in spec.name:
            raise InvalidField("namespace", f"namespace must have 1 to {ID_BYTES_MAX} bytes and no NUL")
        num_shards = self._config.namespaces.default_num_shards if spec.num_shards is UNSET else spec.num_shards
        new = Namespace(name=spec.name, num_shards=num_shards, created_at_ms=self._engine.membership.now_ms())
        namespace = await self._cache.create(self._changed(new, spec))
        try:
            await self._engine.balance()
        except StoreError as error:  # the next balance claims them
            log.warning("the shards of the new namespace %r are not claimed yet: %s", spec.name, error)
        return namespace

    async def get(self, name: str) -> Namespace:
        return await self._cache.get(name)

    async def get_for_create(self, name: str) -> Namespace:
        """The namespace of a timer to be created. If the configuration says so, it is created on first use."""
        try:
            return await self._cache.get_for_create(name)
        except NotFound:
            if not self._config.namespaces.create_on_first_use:
                raise
        try:
            return await self.create(NamespaceSpec(name=name))
        except Conflict:
            return await self._cache.get(name)  # another request created it
        except OutcomeUnknown as error:  # of the namespace: the timer was certainly not created
            raise StoreUnavailable(error.detail) from error

    async def list_all(self) -> list[Namespace]:
        return await self._cache.all()

    def is_known(self, name: str) -> bool:
        """Whether it existed when the namespaces were last read. Does not wait."""
        namespace = self._cache.known(name)
        return namespace is not None and not namespace.deleted

    def was_deleted(self, name: str) -> bool:
        """Whether it existed once and was deleted, as the namespaces were last read. Does not wait."""
        namespace = self._cache.known(name)
        return namespace is not None and namespace.deleted

    def count(self) -> int:
        """How many there are, as they were last read. Does not wait."""
        return len(self._cache.all_known())

    async def update(self, spec: NamespaceSpec) -> Namespace:
        old = await self._cache.get(spec.name)
        if spec.num_shards is not UNSET and spec.num_shards != old.num_shards:
            raise Conflict(
                f"numShards of {spec.name!r} is {old.num_shards} and never changes",
                field="numShards",
                code="num_shards_immutable",
            )
        changed = self._changed(_replace(old, revision=old.revision + 1, deleting=False), spec)
        return await self._cache.replace(changed, old)

    async def pause(self, name: str) -> Namespace:
        """None of its timers fires until it is resumed. They can still be created and changed."""
        return await self.change(name, lambda namespace: _replace(namespace, paused=True))

    async def resume(self, name: str) -> Namespace:
        return await self.change(name, lambda namespace: _replace(namespace, paused=False))

    async def change(self, name: str, change: Callable[[Namespace], Namespace]) -> Namespace:
        """As `changed`. The changes of this instance wait for each other."""
        async with self._changing:
            if not self._store.capabilities.exclusive:
                await self._cache.reread()  # what is cached may be a second old: "no change" must be true now
            return await changed(self._cache, name, change)

    async def delete(self, name: str) -> None:
        """Delete a namespace that has no scheduled timers."""
        old = await self._cache.get(name)
        if name == DEFAULT_NAMESPACE:
            raise Conflict("The namespace `default` cannot be deleted", field="namespace", code="namespace_in_use")
        await self._refuse_if_used(old)
        marked = await self._cache.replace(_replace(old, revision=old.revision + 1, deleting=True), old)
        try:
            # A create is acknowledged only if a read of the namespaces that began less than FRESH_FOR_MS ago shows the
            # namespace without the mark. So after this wait every acknowledged timer is stored, and if there is one,
            # the namespace stays; and no further create in it is acknowledged.
            if not self._store.capabilities.exclusive:
                await asyncio.sleep(_DELETION_SEEN_SECONDS)
            await self._refuse_if_used(marked)
        except BaseException:
            await self._unmark(marked)
            raise
        deleted = _replace(marked, revision=marked.revision + 1, deleting=False, deleted=True)
        await self._cache.replace(deleted, marked)

    async def _unmark(self, marked: Namespace) -> None:
        """Without the mark creates are accepted again. A mark that cannot be removed is ignored after a while."""
        try:
            await self._cache.replace(_replace(marked, revision=marked.revision + 1, deleting=False), marked)
        except DuetimeError as error:
            log.warning(
                "namespace %r was not deleted but is still marked for deletion; creates in it wait until the mark "
                "expires: %s",
                marked.name,
                error,
            )

    async def _refuse_if_used(self, namespace: Namespace) -> None:
        after: Position | None = BEFORE_ALL
        while after is not None:
            listing = await self._store.list_timers(
                ListQuery(
                    namespace=namespace.name, num_shards=namespace.num_shards, after=after, limit=1, payloads=False
                )
            )
            if listing.timers or listing.unreadable:
                raise Conflict(
                    f"Namespace {namespace.name!r} still has scheduled timers",
                    field="namespace",
                    code="namespace_in_use",
                )
            after = listing.next

    def _changed(self, namespace: Namespace, spec: NamespaceSpec) -> Namespace:
        """The namespace with the fields that are set in `spec`."""
        changes = {
            name: getattr(spec, name)
            for name in spec.__struct_fields__
            if name not in ("name", "num_shards") and getattr(spec, name) is not UNSET
        }
        if changes.get("callback_url") is not None:
            self._commands.check_target(changes["callback_url"], namespace.name)
        if "signing_secrets" in changes:
            try:
                changes["signing_secrets"] = kept_secrets(changes["signing_secrets"], namespace.signing_secrets)
            except ValueError as error:
                raise InvalidField("signingSecrets", f"signingSecrets {error}") from None
        return _replace(namespace, **changes)
