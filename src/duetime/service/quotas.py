"""Quotas of namespaces: creates and requests per second. A namespace beyond its quota is refused with 429.

A quota is for the whole cluster. Each instance allows the quota divided by the number of live members that it knows, so
that no instance has to ask another one (docs/adr/0031-quotas.md).
"""

from __future__ import annotations

from duetime.config import Limits
from duetime.domain.timer import Namespace
from duetime.engine.engine import Engine
from duetime.errors import Busy

__all__ = ["Quotas", "TokenBucket"]

_BUCKETS_MAX = 10_000  # a bucket that was removed is full when it is made again


class TokenBucket:
    """Allows `rate` per second on average, and at most a second's worth (at least one) at once."""

    __slots__ = ("_at_ms", "_tokens")

    def __init__(self, rate: float, now_ms: int) -> None:
        self._tokens = max(1.0, rate)
        self._at_ms = now_ms

    def take(self, rate: float, now_ms: int) -> bool:
        """The rate may differ from call to call: the quota or the number of members may have changed."""
        elapsed_ms = max(0, now_ms - self._at_ms)
        self._at_ms = now_ms
        self._tokens = min(max(1.0, rate), self._tokens + rate * elapsed_ms / 1_000)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Quotas:
    def __init__(self, limits: Limits, engine: Engine) -> None:
        self.creates_default = limits.creates_per_second
        self.requests_default = limits.requests_per_second
        self._engine = engine
        self._namespaces = engine.namespaces
        self._refusals = engine.telemetry.refused_by_quota
        self._buckets: dict[tuple[str, str], TokenBucket] = {}  # by code and namespace

    def take_create(self, name: str, namespace: Namespace | None) -> None:
        """Raises Busy if the namespace has no create left. `namespace`: as the caller knows it. None: it has to be read
        again, and until then what was read last counts."""
        if namespace is None:
            namespace = self._namespaces.known(name)
            if namespace is None:
                return
        limit = namespace.creates_per_second or self.creates_default
        if limit:
            self._take("quota_creates_per_second", "createsPerSecond", name, limit)

    def take_request(self, name: str) -> None:
        """Raises Busy if the namespace has no request left. Of an unknown one nothing is counted: it is a 404."""
        namespace = self._namespaces.known(name)
        limit = 0 if namespace is None else namespace.requests_per_second or self.requests_default
        if limit:
            self._take("quota_requests_per_second", "requestsPerSecond", name, limit)

    def _take(self, code: str, setting: str, name: str, limit: int) -> None:
        rate = limit / max(1, len(self._engine.membership.alive))
        now_ms = self._engine.clock.boot_ms()
        bucket = self._buckets.get((code, name))
        if bucket is None:
            if len(self._buckets) >= _BUCKETS_MAX:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[code, name] = TokenBucket(rate, now_ms)
        if not bucket.take(rate, now_ms):
            self._refusals.add(code)
            raise Busy(
                f"The quota {setting} of namespace {name!r}, {limit}, is used up on this instance; nothing was applied",
                code=code,
            )
