"""cluster status."""

from __future__ import annotations

from argparse import Namespace as Arguments

from duetime.cli.connect import client_of, print_json
from duetime.cli.screen import ago, painted, show_fields, show_table, spoken
from duetime.client import ClusterStatus

__all__ = ["lateness_of", "status"]


async def status(arguments: Arguments) -> int:
    async with client_of(arguments) as client:
        found = await client.cluster_status()
    if arguments.json:
        print_json(found)
    else:
        _show(found, with_shards=arguments.shards)
    return 0 if found.ready else 1


def _show(found: ClusterStatus, *, with_shards: bool) -> None:
    ready = painted("ready", "green") if found.ready else painted(f"not ready: {found.reason}", "red")
    show_fields(
        [
            ("instance", f"{found.instance_id} (Duetime {found.version} on {found.store}), {ready}"),
            ("lease", f"{spoken(found.lease_ms)} left, clock off by {found.clock_skew_ms} ms"),
            ("timers", f"{found.in_memory} in memory, {found.in_flight} in flight, {found.held} held back"),
            ("writes", f"{found.writes_waiting} waiting"),
            ("oldest due", f"{spoken(found.oldest_due_ms)} ago" if found.oldest_due_ms else "none is overdue"),
            ("lateness", lateness_of(found)),
        ]
    )
    print()
    show_table(
        ["member", "address", "state", "shards"],
        [
            (
                m.instance_id + (" (this one)" if m.self_ else ""),
                m.address,
                painted("alive", "green") if m.alive else painted("dead", "red"),
                str(m.shards),
            )
            for m in found.members
        ],
    )
    if with_shards:
        print()
        show_table(
            ["shard", "version", "owner", "in memory", "loaded up to"],
            [
                (
                    str(s.shard_id),
                    str(s.version),
                    s.owner_id or "free",
                    "" if s.in_memory is None else str(s.in_memory),
                    "" if s.horizon is None else ago(s.horizon),
                )
                for s in found.shards
            ],
        )


def lateness_of(found: ClusterStatus) -> str:
    if found.lateness_p50_ms is None or found.lateness_p99_ms is None:
        return "nothing fired yet"
    return f"p50 within {spoken(found.lateness_p50_ms)}, p99 within {spoken(found.lateness_p99_ms)}"
