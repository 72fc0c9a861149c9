"""What a seed chooses before its run starts: limits so small that they are reached, clocks that are wrong, and the
capabilities of the database. Most settings keep their usual values, so that each small limit is met together with
usual ones."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from duetime.config import Config, Duration, load_config
from duetime.domain.timer import FlowLimits
from duetime.store import Capabilities
from duetime.stores.memory import MemoryStore

__all__ = ["Settings", "choose_settings", "constants_set", "default_settings"]


class Settings(Struct, kw_only=True):
    config: Config
    capabilities: Capabilities
    instances: int
    fault_seconds: float
    rate: float = 1.0  # of clients' requests
    outages: float = 1.0  # how many times as often as the scenario says
    # "right"; "jumps": clocks are set wrong for a while; "offset": each is wrong by a constant within clock_skew_max
    clocks: str = "jumps"
    payload_chars_max: int = 0  # in addition to the value
    constants: dict[str, int] = {}  # of modules, by their full name
    operator: bool = False  # changes limits and pauses all the time
    flows: dict[str, FlowLimits] = {}  # limits of flows of the namespace `default`, by flow key

    @property
    def exclusive(self) -> bool:
        return self.capabilities.exclusive


def default_settings(num_shards: int, instances: int) -> Settings:
    """The settings of a scripted cluster: nothing unusual."""
    return Settings(
        config=load_config(environ={}, flags={"namespaces.default_num_shards": num_shards}),
        capabilities=MemoryStore.capabilities,
        instances=instances,
        fault_seconds=0.0,
    )


def choose_settings(seed: int, rng: random.Random, num_shards: int, instances: int, seconds: float) -> Settings:
    def one_in(n: int) -> bool:
        return rng.randrange(n) == 0

    config = load_config(
        environ={},
        flags={
            "namespaces.default_num_shards": num_shards,
            "delivery.breaker_pause_max": "4s",
            "engine.look_ahead": f"{rng.choice((2, 10, 60))}s",
            "namespaces.create_on_first_use": one_in(8),
        },
    )
    engine: dict[str, Any] = {"timers_in_memory_max": rng.choice((40, 60, 200, 1_000, 1_000, 1_000))}
    delivery: dict[str, Any] = {}
    server: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    constants: dict[str, int] = {}
    if one_in(5):
        engine["writes_waiting_max"] = rng.choice((3, 10, 40))
    outages = 1.0
    if one_in(3):
        engine["write_timeout"] = Duration(rng.choice((700, 1_500, 3_000)))
        outages = 3.0
    if one_in(4):
        delivery["concurrency_max"] = rng.choice((5, 8))
        delivery["concurrency_per_origin"] = rng.choice((5, 8))
        delivery["concurrency_per_flow"] = rng.choice((1, 2, 4))
    if one_in(8):
        delivery["rate_per_flow"] = rng.choice((10, 50))
    if one_in(4):
        server["drain_timeout"] = Duration(rng.choice((200, 1_000, 3_000)))
    if one_in(3):
        capabilities["batch_max"] = rng.choice((1, 3, 20))
    if one_in(4):
        capabilities["batch_chars_max"] = rng.choice((300, 5_000, 60_000))
    capabilities["parallel_commits"] = rng.choice((1, 1, 2, 3))
    if one_in(4):
        constants["duetime.engine.engine._UNSETTLED_MAX"] = rng.choice((1, 3, 10))
    if one_in(2):
        constants["duetime.engine.engine._PURGE_ROUND_SECONDS"] = rng.choice((1, 3, 10))
        constants["duetime.engine.engine._PURGED_PER_CALL"] = rng.choice((2, 1_000))
    if one_in(4):
        constants["duetime.engine.fire_loop._FIRED_PER_WAKE_UP"] = rng.choice((1, 10))
        constants["duetime.engine.flow._IDLE_FLOWS_MAX"] = 2
        constants["duetime.engine.flow_slots._TRIES"] = 1
        constants["duetime.cluster.membership._FORGET_AFTER_MS"] = 6_000
        constants["duetime.engine.ownership._SHARDS_PER_CALL"] = 2
        constants["duetime.engine.ownership._KEYS_PER_CALL"] = 2
        constants["duetime.engine.group_commit._KEYS_PER_READ"] = 2
    settings = Settings(
        config=config,
        capabilities=MemoryStore.capabilities,
        instances=instances,
        fault_seconds=seconds,
        clocks=rng.choice(("right", "jumps", "jumps", "jumps", "offset")),
        constants=constants,
        outages=outages,
    )
    if one_in(5):
        settings.payload_chars_max = rng.choice((2_000, 50_000))
    if seed % 8 == 7:  # like SQLite: one process at a time
        settings.instances = 1
        capabilities["exclusive"] = True
        if settings.clocks == "offset":  # the clock of such a database is that of the process
            settings.clocks = "right"
    if seed % 40 == 39:  # a long run with few requests
        settings.fault_seconds = 10 * seconds
        settings.rate = 0.15
    if one_in(3):
        settings.flows = {
            "http://limited": FlowLimits(rate=rng.choice((2.0, 5.0, 20.0))),
            "http://single": FlowLimits(concurrency=rng.choice((1, 2, 5))),
        }
    if one_in(3):  # memory is short: small pages, and other work between any two steps
        settings.constants |= {
            "duetime.engine.look_ahead._PAGE_TIMERS_MIN": rng.choice((3, 10, 50)),
            "duetime.engine.look_ahead._FEW_WAITING": rng.choice((1, 5)),
            "duetime.engine.look_ahead._ENTRIES_PER_STEP": rng.choice((1, 3, 10)),
        }
        engine["timers_in_memory_max"] = rng.choice((20, 40, 60))
    settings.operator = one_in(4)
    settings.capabilities = replace(settings.capabilities, **capabilities)
    settings.config = replace(
        config,
        engine=replace(config.engine, **engine),
        delivery=replace(config.delivery, **delivery),
        server=replace(config.server, **server),
    )
    return settings


@contextmanager
def constants_set(constants: dict[str, int]) -> Iterator[None]:
    """Gives constants of modules other values inside the `with` block. A constant that does not exist is an error."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for path, value in constants.items():
            module_name, _, name = path.rpartition(".")
            module = importlib.import_module(module_name)
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
