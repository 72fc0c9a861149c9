"""cluster status: the members, shards and held timers of the whole cluster. Any instance can answer."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace as Arguments

from duetime.cli.client_options import open_client
from duetime.cli.diagnosis import GOOD, WRONG, by_severity, check_cluster, lateness_text, with_mark
from duetime.cli.output import (
    clear_screen,
    format_duration,
    format_relative,
    local_time,
    print_fields,
    print_json,
    print_line,
    print_table,
    styled,
)
from duetime.client import AsyncClient, Broker, ClusterStatus, ConnectionFailed, Member, Shard, Unserved

__all__ = ["status"]

WATCH_PAUSE_S = 1.0
DEAD_SHOWN_MAX = 10


async def status(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        if arguments.watch:
            return await _watch(client, arguments)
        found = await client.cluster_status(shards=arguments.shards)
    return _report(found, arguments)


def _report(found: ClusterStatus, arguments: Arguments) -> int:
    findings = by_severity(check_cluster(found))
    if arguments.json:
        print_json(found)
    else:
        _show(found)
        if problems := [finding for finding in findings if finding.verdict != GOOD]:
            print_line()
            for finding in problems:
                print_line(with_mark(finding, f"{finding.check}: {finding.says}"))
        if arguments.shards:
            print_line()
            _show_shards(found.shards)
    sys.stdout.flush()
    return 0 if found.ready and all(finding.verdict != WRONG for finding in findings) else 1


async def _watch(client: AsyncClient, arguments: Arguments) -> int:
    """Repeats until Ctrl-C. The exit code is that of the last status."""
    code = 0
    try:
        while True:
            try:
                found = await client.cluster_status(shards=arguments.shards)
            except (ConnectionFailed, Unserved) as error:
                code = 1
                print_line(local_time(), error.detail, file=sys.stderr)
            else:
                if not arguments.json:
                    clear_screen()
                    print_line(styled(local_time(), "dim"))
                code = _report(found, arguments)
            await asyncio.sleep(WATCH_PAUSE_S)
    except asyncio.CancelledError:
        return code


def _show(found: ClusterStatus) -> None:
    alive = sum(member.alive for member in found.members)
    dead = len(found.members) - alive
    counts = found.shard_counts
    paused = [("paused", f"{_namespaces(found.paused_namespaces)}; `duetime namespace list` shows which")]
    unreadable = [("unreadable", f"{found.unreadable} timers cannot be decoded and do not fire")]
    print_fields(
        [
            ("cluster", f"{alive} alive{f', {dead} dead' if dead else ''}, on {found.store}"),
            ("shards", f"{counts.total}: {counts.owned} owned, {counts.free} free, {counts.of_dead} of dead members"),
            ("timers", f"{found.in_memory} in memory, {found.in_flight} in flight, {found.held} held"),
            ("writes", f"{found.writes_waiting} waiting"),
            (
                "oldest due",
                f"{format_duration(found.oldest_due_ms)} ago" if found.oldest_due_ms else "no timer is overdue",
            ),
            ("lateness", lateness_text(found)),
            ("clocks", f"at most {abs(found.clock_skew_ms)} ms from the database's clock"),
            *(paused if found.paused_namespaces else ()),
            *(unreadable if found.unreadable else ()),
        ]
    )
    print_line()
    living = [member for member in found.members if member.alive]
    gone = [member for member in found.members if not member.alive]
    print_table(
        ["member", "address", "state", "version", "shards", "in memory", "in flight", "held", "late p99", "skew"],
        [_row(member) for member in living + gone[:DEAD_SHOWN_MAX]],
    )
    if len(gone) > DEAD_SHOWN_MAX:
        print_line(styled(f"and {len(gone) - DEAD_SHOWN_MAX} more dead members", "dim"))
    brokers = [(member, broker) for member in living for broker in member.brokers]
    if brokers:
        print_line()
        print_table(
            ["broker", "address", "connection", "commands", "waiting", "in flight", "to retry", "refused"],
            [_broker_row(member, broker) for member, broker in brokers],
        )


def _namespaces(count: int) -> str:
    return f"{count} namespace{'s' * (count != 1)}"


def _row(member: Member) -> tuple[str, ...]:
    return (
        member.instance_id + (" (this one)" if member.self_ else ""),
        member.address,
        _state(member),
        member.version or "",
        str(member.shards),
        _figure(member.in_memory),
        _figure(member.in_flight),
        _figure(member.held),
        "" if member.lateness_p99_ms is None else format_duration(member.lateness_p99_ms),
        "" if member.clock_skew_ms is None else f"{member.clock_skew_ms} ms",
    )


def _state(member: Member) -> str:
    if not member.alive:
        return styled("dead", "dim" if member.ready is None else "red")
    if member.unreachable is not None:
        return styled("unreachable", "red")
    return styled("ready", "green") if member.ready else styled("not ready", "red")


def _broker_row(member: Member, broker: Broker) -> tuple[str, ...]:
    commands = "not read"
    if broker.consuming is not None:
        commands = styled("received", "green") if broker.consuming else styled("not received", "red")
    return (
        broker.name,
        member.address,
        styled("connected", "green") if broker.connected else styled("away", "red"),
        commands,
        _figure(broker.waiting),
        *(("", "", "") if broker.consuming is None else map(str, (broker.in_flight, broker.retrying, broker.refused))),
    )


def _figure(value: int | None) -> str:
    return "" if value is None else str(value)


def _show_shards(shards: tuple[Shard, ...]) -> None:
    print_table(
        ["shard", "version", "owner", "at", "in memory", "loaded up to"],
        [
            (
                str(shard.shard_id),
                str(shard.version),
                shard.owner_id or "free",
                shard.owner_address or "",
                _figure(shard.in_memory),
                "" if shard.horizon is None else format_relative(shard.horizon),
            )
            for shard in shards
        ],
    )
