"""The stores that need no server pass the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from spoiling import Spoiling

from duetime.domain.timer import Reached, Timer
from duetime.store import Store, open_store
from duetime.stores.memory import MemoryStore
from duetime.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    shared: MemoryStore

    def new_store(self) -> Store:
        return self.shared

    async def wipe(self) -> None:
        self.shared = MemoryStore()

    async def spoil_timer(self, shard_id: int, timer: Timer) -> None:
        self.shared.spoil_timer(shard_id, timer.key)

    async def spoil_reached(self, shard_id: int, reached: Reached) -> None:
        self.shared.spoil_reached(shard_id, reached)

    async def spoil_namespace(self, name: str) -> None:
        self.shared.spoil_namespace(name)


class TestSqliteStore(Spoiling, StoreConformance):
    @pytest.fixture(autouse=True)
    def _in(self, tmp_path: Path) -> None:
        self.path = tmp_path / "duetime.db"
        self.straight_url = f"sqlite:///{self.path}"

    def new_store(self) -> Store:
        return open_store(self.straight_url)

    async def wipe(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
