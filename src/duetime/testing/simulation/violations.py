"""Which invariants a run has violated: those of the checker, and those of the simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from duetime.engine.weight import UNIT_BYTES
from duetime.testing.checker import Violation, find_violations
from duetime.testing.occurrences import find_occurrence_violations, paused_in_flight
from duetime.testing.simulation.network import name_in_history
from duetime.testing.simulation.peers import PROTOCOL_ERRORS

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import SimulatedCluster

__all__ = ["EARLY_BY_MAX_MS", "violations_of"]

# How early a callback may be by the database's clock, if every clock is right or wrong by a constant within
# engine.clock_skew_max. If clocks jump, the limit is engine.clock_skew_max.
EARLY_BY_MAX_MS = 25
_LATE_BY_MAX_MS = 100  # in the final phase: many times the few milliseconds that network and store take


def violations_of(cluster: SimulatedCluster) -> list[Violation]:
    """All violations of a run that has ended."""
    cluster.check_left_in_deleted_namespaces()
    cluster.limit_watch.check_rates()
    jumps = cluster.settings.clocks == "jumps"
    recorded, over = cluster.database.recorded_at_ms, cluster.database.over_at_ms
    callbacks = [
        msgspec.structs.replace(
            call,
            recorded_at_ms=recorded.get((call.delivery, call.attempt), 0),
            over_at_ms=over.get(call.delivery, 0),
        )
        for call in cluster.callbacks
    ]
    # A timer whose row cannot be decoded is not checked; it must not affect the others.
    spoilt = {name_in_history(key) for key in cluster.database.spoilt}
    clock_error_ms = cluster.config.engine.clock_skew_max.ms if jumps else EARLY_BY_MAX_MS
    violations = (
        cluster.violations
        + cluster.limit_watch.violations
        + find_violations(
            [request for request in cluster.requests if request.timer not in spoilt],
            [call for call in callbacks if call.timer not in spoilt],
            clock_error_ms=clock_error_ms,
            faults=cluster.repetition_causes + paused_in_flight(cluster.pause_requests, callbacks),
            all_accepted=True,
        )
        + find_occurrence_violations(
            [series for series in cluster.series if series.timer not in spoilt],
            [row for row in cluster.database.ended if row.timer not in spoilt],
            [pause for pause in cluster.pauses if pause.timer not in spoilt],
            [call for call in callbacks if call.timer not in spoilt],
            clock_error_ms=clock_error_ms,
        )
    )
    violations += [Violation("P", "-", kind, "") for kind in PROTOCOL_ERRORS if cluster.faults[kind]]
    if cluster.timers_left:
        violations.append(Violation("F", "-", "timers are still scheduled ten minutes after the last fault", ""))
    return violations + _late(cluster)


def _late(cluster: SimulatedCluster) -> list[Violation]:
    # A timer whose create took long to reach the owner cannot fire before the create was answered.
    due = {r.value: max(r.due_ms, r.answered_at_ms) for r in cluster.requests if r.timer.startswith("last-")}
    if cluster.config.engine.timers_in_memory_max * UNIT_BYTES < 2 * cluster.settings.payload_chars_max:
        return []  # one timer may be larger than the memory for all, and others are loaded when it has left
    rate = cluster.config.delivery.rate_per_flow
    # The rate makes the others wait, and moves between instances in a few rounds of reports.
    late_by_max_ms = _LATE_BY_MAX_MS + (len(due) * 1_000 // rate + 200 if rate else 0)
    return [
        Violation("L", call.timer, f"{call.started_at_ms - due[call.value]} ms late without a fault", "")
        for call in cluster.callbacks
        if call.value in due and call.attempt == 1 and call.started_at_ms - due[call.value] > late_by_max_ms
    ]
