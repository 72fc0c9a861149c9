"""What a run of the simulator consists of, and its result."""

from __future__ import annotations

from msgspec import Struct

from duetime.testing.checker import Violation

__all__ = ["Run", "Scenario"]


class Scenario(Struct, frozen=True, kw_only=True):
    """The size of a run and how often faults happen. Probabilities are per call or per second of virtual time."""

    instances: int = 3
    clients: int = 4
    timers: int = 40  # ids that the clients use again and again
    burst_timers: int = 120
    fault_seconds: float = 25.0
    num_shards: tuple[int, ...] = (1, 4, 4)  # one of these
    slow_store: float = 0.05  # per call
    failed_store: float = 0.02
    unknown_store: float = 0.02  # two thirds of them applied, half of those late
    torn_commit: float = 0.03  # each batch succeeds or fails by itself, as if every shard had its own transaction
    torn_answer: float = 0.03  # a load or a purge fails for some of its shards
    outages: float = 0.06  # per second: of the connection to the database, for one instance or for all
    unexpected_errors: float = 0.03  # per second: store calls raise an unexpected error, once or several times
    spoilt_rows: float = 0.01  # per second: the row of a timer can no longer be decoded
    crashes: float = 0.06
    freezes: float = 0.06
    jumps: float = 0.04
    departures: float = 0.04
    cuts: float = 0.03  # an instance is cut off from the others, but not from the database
    broken_deliveries: float = 0.003  # per delivery: the deliverer raises
    shortages: float = 0.005  # per delivery: the instance has no socket to spare
    broken_connections: float = 0.02  # per delivery: the request is sent again on another connection
    lost_callback_answers: float = 0.01  # per delivery that was accepted
    disconnects: float = 0.01  # per request of a client
    lost_requests: float = 0.03  # per request of a client
    slow_connects: float = 0.1  # per delivery
    lost_forwards: float = 0.03  # per forward: the request is lost; the answer is lost as often
    repeated_forwards: float = 0.05
    bursts: float = 0.1  # per second: many timers that are due at the same time
    namespaces: int = 2  # in addition to `default`, created and deleted all the time
    varied: bool = True  # limits and clocks are chosen by the seed


class Run(Struct):
    """The result of one seed."""

    seed: int
    violations: list[Violation]
    requests: int
    callbacks: int
    faults: dict[str, int]
    virtual_seconds: float
    digest: str
    history: list[str]
