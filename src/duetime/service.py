"""The only door: create, get, update, delete, list… for api, ingress, calendar and cli.

(Interface; the bodies are being written.)
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from duetime.errors import DuetimeError
from duetime.model import Namespace, RetryPolicy, State, TimerKey, TimerPatch, TimerSpec, TimerView, Verdict


class Created(Struct, frozen=True, gc=False):
    view: TimerView
    replaced: bool


class Updated(Struct, frozen=True, gc=False):
    view: TimerView
    verdict: Verdict


class TimerFilter(Struct, frozen=True, kw_only=True):
    namespace: str
    state: State | None = None  # None: the scheduled ones first, then the reached ones
    due_from_ms: int | None = None
    due_until_ms: int | None = None
    tag: str | None = None
    id_prefix: str | None = None
    correlation_id: str | None = None
    limit: int = 100
    cursor: str | None = None


class NamespaceSpec(Struct, frozen=True, kw_only=True):
    """What a user decides about a namespace. UNSET: the default at create, unchanged at update."""

    name: str
    num_shards: int | UnsetType = UNSET
    callback_url: str | None | UnsetType = UNSET
    retry_policy: RetryPolicy | UnsetType = UNSET
    callback_timeout_seconds: int | UnsetType = UNSET
    require_ok: bool | UnsetType = UNSET
    delivered_retention_ms: int | UnsetType = UNSET
    failed_retention_ms: int | UnsetType = UNSET
    payload_bytes_max: int | None | UnsetType = UNSET
    signing_secrets: tuple[str, ...] | UnsetType = UNSET


class MemberStatus(Struct, frozen=True, kw_only=True):
    instance_id: str
    address: str
    alive: bool
    self_: bool
    shards: int


class ShardStatus(Struct, frozen=True, kw_only=True):
    shard_id: int
    version: int
    owner_id: str | None
    owner_address: str | None
    in_memory: int | None  # None: not owned here
    horizon_ms: int | None


class ClusterStatus(Struct, frozen=True, kw_only=True):
    instance_id: str
    version: str
    store: str
    ready: bool
    reason: str | None  # why not ready
    lease_ms: int
    clock_skew_ms: int
    members: tuple[MemberStatus, ...]
    shards: tuple[ShardStatus, ...]
    in_memory: int
    in_flight: int
    held: int
    writes_waiting: int
    oldest_due_ms: int | None
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None


class Service:
    """Errors: the Rejected family, Busy, Unserved, StoreUnavailable, OutcomeUnknown (errors.py)."""

    async def create(self, spec: TimerSpec) -> Created: ...
    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        """One result for each, in order; what could not be decoded passes through as its error."""
        ...

    async def get(self, key: TimerKey) -> TimerView: ...
    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated: ...
    async def delete(self, key: TimerKey) -> Verdict: ...
    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]: ...
    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]: ...
    async def fire_now(self, key: TimerKey) -> TimerView: ...
    async def replay(self, key: TimerKey) -> TimerView: ...
    async def create_namespace(self, spec: NamespaceSpec) -> Namespace: ...
    async def get_namespace(self, name: str) -> Namespace: ...
    async def list_namespaces(self) -> list[Namespace]: ...
    async def update_namespace(self, spec: NamespaceSpec) -> Namespace: ...
    async def delete_namespace(self, name: str) -> None: ...
    async def cluster_status(self) -> ClusterStatus: ...
    def readiness(self) -> str | None:
        """None: ready. Otherwise why not, in a sentence."""
        ...
