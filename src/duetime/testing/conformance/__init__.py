"""The definition of a Store, as tests. Every adapter passes all of them, unchanged.

For an adapter of your own, in a test module of yours:

    from duetime.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        def new_store(self):        # a store object, not yet opened, on the database under test;
            return MyStore(URL)     # called again if a test needs a second session
        async def wipe(self):       # empty that database: called before every test
            ...
        async def spoil_timer(self, shard_id, timer):   # make a stored row undecodable (harness.py); without
            ...                                         # these the tests of such rows are skipped
        async def spoil_reached(self, shard_id, reached):
            ...
        async def spoil_namespace(self, name):
            ...

For an adapter that ships with Duetime, on a database named by URL:

    DUETIME_TEST_STORE=sqlite:///test.db pytest --pyargs duetime.testing.conformance

That database is wiped before every test, so its name must contain the word "test". If it cannot be reached, the tests
fail; they are not skipped.

DUETIME_TEST_EXAMPLES is the number of random histories that are compared with MemoryStore (default 25).
Needs pytest, pytest-asyncio and hypothesis. Stores may differ only in what their Capabilities say.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "duetime.testing.conformance.harness",
    "duetime.testing.conformance.machine",
    "duetime.testing.conformance.ownership",
    "duetime.testing.conformance.page_sizes",
    "duetime.testing.conformance.timers",
    "duetime.testing.conformance.unreadable",
)

from duetime.testing.conformance.harness import Harness  # noqa: E402 - after register_assert_rewrite
from duetime.testing.conformance.machine import AgreesWithMemory  # noqa: E402
from duetime.testing.conformance.ownership import Fences, Lifecycle, Members, Namespaces, Shards, StaleOwners  # noqa: E402
from duetime.testing.conformance.page_sizes import PageSizes  # noqa: E402
from duetime.testing.conformance.timers import Identity, Lists, Loads, ReachedRows, Upserts  # noqa: E402
from duetime.testing.conformance.unreadable import UnreadableRows  # noqa: E402

__all__ = ["StoreConformance"]


class StoreConformance(
    Lifecycle,
    Members,
    Namespaces,
    Shards,
    Fences,
    StaleOwners,
    Identity,
    Upserts,
    ReachedRows,
    Loads,
    Lists,
    PageSizes,
    UnreadableRows,
    AgreesWithMemory,
):
    """All tests of the suite. pytest runs a subclass whose name starts with Test."""


assert issubclass(StoreConformance, Harness)
