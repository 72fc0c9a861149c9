"""Checks the status of a cluster. Pure; used by `cluster status` and `doctor`, so that both report the same.

A finding is good, a note, or wrong. It says what was found, why it matters, and what to do.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from duetime.cli.output import format_duration, styled
from duetime.client import ClusterStatus, HeldFor, Member, ShardCounts

__all__ = [
    "GOOD",
    "NOTE",
    "WRONG",
    "Finding",
    "by_severity",
    "check_addresses",
    "check_cluster",
    "check_shards",
    "lateness_text",
    "with_mark",
]

GOOD, NOTE, WRONG = "good", "note", "wrong"
_MARKS = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), WRONG: ("✗", "red")}
_SEVERITY = (WRONG, NOTE, GOOD)

SKEW_WARN_MS, OVERDUE_WARN_MS, OVERDUE_WRONG_MS, LATE_WARN_MS = 100, 5_000, 60_000, 250
WRITES_WAITING_WARN = 1_000
_TRANSIENT_REASONS = ("starting", "stopping")
_SHARDS_NAMED_MAX = 8


class Finding(Struct, frozen=True):
    check: str
    verdict: str
    says: str
    why: str = ""
    advice: str = ""


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _SEVERITY.index(finding.verdict))


def with_mark(finding: Finding, text: str) -> str:
    mark, style = _MARKS[finding.verdict]
    return f"{styled(mark, style)} {text}"


def check_cluster(status: ClusterStatus) -> list[Finding]:
    alive = [member for member in status.members if member.alive]
    return [
        *_members(status, alive),
        *check_addresses(alive),
        *check_shards(status.shard_counts, status.unowned_shards),
        *_clocks(status, alive),
        *_versions(alive),
        *_backlog(status, alive),
        *_unreadable(status, alive),
        *_lateness(status, alive),
    ]


# --- members -------------------------------------------------------------------------------------


def _members(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    for member in alive:
        if member.unreachable is not None:
            yield Finding(
                "members",
                WRONG,
                f"{member.address} is alive, but the instance that was asked cannot reach it: {member.unreachable}",
                f"other instances cannot forward writes for its {_count(member.shards, 'shard')}; if its process has "
                "ended, their timers do not fire until other instances take over",
                "check that its cluster.advertise is an address the other instances can reach, and that no firewall "
                f"blocks it. If its process has ended, this is over within {format_duration(status.dead_after_ms)}",
            )
        elif not member.ready:
            yield _not_ready(member)
    for member in status.members:
        if not member.alive and member.ready is not None:
            yield Finding(
                "members",
                WRONG,
                f"{member.address} was declared dead, but is running",
                "it was paused or could not reach the store for too long; it has dropped its shards and joins again",
                "if it happens again: check that it gets enough CPU time, and that the store is fast and reachable",
            )
    gone = [member for member in status.members if not member.alive and member.ready is None]
    back = {member.address for member in alive}
    missing = sorted({member.address for member in gone} - back)
    says = f"{len(alive)} alive" + (f", {len(gone)} dead" if gone else "")
    if not alive:
        yield Finding("members", WRONG, says, "no timer fires", "start an instance: `duetime serve`")
    elif missing:
        yield Finding(
            "members",
            NOTE,
            f"{says}; no new instance at {_some(missing)}",
            "the other instances have taken over its shards, or will",
            "nothing, if it was stopped on purpose (its row is deleted after ten minutes); otherwise see its log",
        )
    else:
        yield Finding("members", GOOD, says)


def _not_ready(member: Member) -> Finding:
    transient = member.reason in _TRANSIENT_REASONS
    return Finding(
        "members",
        NOTE if transient else WRONG,
        f"{member.address} is not ready: {member.reason}",
        "its timers do not fire until it is ready" if not transient else "",
        "" if transient else "see its log for the reason",
    )


def check_addresses(alive: Sequence[Member]) -> Iterator[Finding]:
    """`alive`: the members that are alive."""
    for address, count in Counter(member.address for member in alive).items():
        if count > 1:
            yield Finding(
                "addresses",
                WRONG,
                f"{count} live members have the address {address}",
                "a request for one of them reaches the other, which refuses it",
                "set a different cluster.advertise for each; if one was killed and started again a moment ago, this is "
                "over within seconds",
            )
    hosts = {member.address: _host(member.address) for member in alive}
    elsewhere = sorted({host for host in hosts.values() if not _is_local(host)})
    for address, host in hosts.items():
        if _is_wildcard(host) and len(alive) > 1:
            yield _wrong_address(address, "which means all addresses and cannot be connected to")
        elif _is_local(host) and elsewhere:
            yield _wrong_address(address, f"which means another machine when {_some(elsewhere)} connects to it")


def _wrong_address(address: str, which: str) -> Finding:
    return Finding(
        "addresses",
        WRONG,
        f"a member has the address {address}, {which}",
        "instances on other machines cannot forward writes to it",
        "set cluster.advertise of that member to its address in the network",
    )


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


# --- shards, clocks, versions --------------------------------------------------------------------


def check_shards(counts: ShardCounts, unowned: Sequence[int]) -> Iterator[Finding]:
    if not unowned:
        yield Finding("shards", GOOD, f"all {counts.total} have an owner" if counts.total else "none yet")
        return
    parts = [
        f"{counts.free} without an owner" if counts.free else "",
        f"{counts.of_dead} of dead members" if counts.of_dead else "",
    ]
    named = ", ".join(map(str, unowned[:_SHARDS_NAMED_MAX]))
    more = ", …" if counts.free + counts.of_dead > _SHARDS_NAMED_MAX else ""
    yield Finding(
        "shards",
        WRONG,
        f"of {counts.total}, {' and '.join(filter(None, parts))}: {named}{more}",
        "their timers do not fire, and writes to them wait",
        "normal for some seconds after a member starts or stops; if it stays, the logs of the live members say why",
    )


def _clocks(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    limit_ms = status.clock_skew_max_ms
    off = 0
    for member in alive:
        skew_ms = abs(member.clock_skew_ms or 0)
        if skew_ms <= min(SKEW_WARN_MS, limit_ms):
            continue
        off += 1
        too_far = skew_ms > limit_ms
        yield Finding(
            "clock skew",
            WRONG if too_far else NOTE,
            f"the clock of {member.address} is {member.clock_skew_ms} ms off the database's (limit: {limit_ms} ms)",
            "it fires no timers and releases its shards"
            if too_far
            else "its timers fire by the database's clock, so the difference is corrected",
            "run a time service on both machines (chrony, systemd-timesyncd)",
        )
    if not off:
        yield Finding("clock skew", GOOD, f"at most {abs(status.clock_skew_ms)} ms from the database")


def _versions(alive: Sequence[Member]) -> Iterator[Finding]:
    versions = Counter(member.version for member in alive if member.version is not None)
    if len(versions) > 1:
        yield Finding(
            "versions",
            NOTE,
            ", ".join(f"{count} of {version}" for version, count in sorted(versions.items())),
            "a rolling upgrade is in progress, or was not finished",
            "finish the upgrade: only adjacent versions are tested together",
        )
    elif versions:
        yield Finding("versions", GOOD, f"Duetime {next(iter(versions))} on every member")


# --- backlog and lateness ------------------------------------------------------------------------


def _backlog(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    overdue_ms = status.oldest_due_ms or 0
    overdue = f"the oldest was due {format_duration(overdue_ms)} ago" if overdue_ms else "none overdue"
    says = f"{status.held} timers held, {status.in_flight} in flight, {overdue}"
    if status.held:
        places = _held_for(alive)
        advice = "see the destinations in this list" if places else "the logs name the destinations"
        yield Finding("backlog", NOTE, says, "they wait for their destinations, and use no attempts", advice)
        yield from map(_waiting_for, places)
    elif overdue_ms > OVERDUE_WARN_MS:
        where = max(alive, key=lambda member: member.oldest_due_ms or 0)
        yield Finding(
            "backlog",
            WRONG if overdue_ms > OVERDUE_WRONG_MS else NOTE,
            f"{says}, at {where.address}",
            "they do not wait for a destination: the instance is too slow, or has just started after a pause",
            "if it stays: check its CPU time (duetime_loop_lag_seconds), the speed of the database "
            "(duetime_commit_seconds) and its lease (duetime_lease_seconds)",
        )
    else:
        yield Finding("backlog", GOOD, says)
    if status.writes_waiting > WRITES_WAITING_WARN:
        yield Finding(
            "writes",
            NOTE,
            f"{status.writes_waiting} writes wait for the database",
            "creates are slow; above engine.writes_waiting_max they are answered with 429",
            "check the disk, locks and connections of the database (duetime_commit_seconds)",
        )
    else:
        yield Finding("writes", GOOD, f"{status.writes_waiting} waiting")


def _unreadable(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    if status.unreadable:
        where = _some([member.address for member in alive if member.unreadable])
        yield Finding(
            "unreadable",
            WRONG,
            f"{_count(status.unreadable, 'stored timer')} cannot be decoded, at {where}",
            "they do not fire; all other timers do",
            "the log names each (`cannot be decoded`): create it again or delete it. If a newer version wrote it,"
            " finish the upgrade",
        )


def _held_for(alive: Sequence[Member]) -> list[HeldFor]:
    """The five destinations with the most held timers. Several members may hold timers for the same one."""
    places: defaultdict[str, list[HeldFor]] = defaultdict(list)
    for member in alive:
        for place in member.held_for:
            places[place.destination].append(place)
    together = [
        HeldFor(
            destination=name,
            held=sum(place.held for place in some),
            in_flight=sum(place.in_flight for place in some),
            failures=max(place.failures for place in some),
            breaker_open=any(place.breaker_open for place in some),
        )
        for name, some in places.items()
    ]
    return sorted(together, key=lambda place: -place.held)[:5]


def _waiting_for(place: HeldFor) -> Finding:
    if place.breaker_open:
        says = (
            f"{place.held} wait for {place.destination}: its breaker is open after {place.failures} failures in a row"
        )
        return Finding(
            "destination", NOTE, says, "one call at a time is tried until it answers", "repair the destination"
        )
    says = f"{place.held} wait for {place.destination}: {place.in_flight} calls to it are in flight"
    advice = "make it answer faster, or raise delivery.concurrency_per_destination or delivery.rate_per_destination"
    return Finding("destination", NOTE, says, "more timers are due for it than it can receive", advice)


def _lateness(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    late = [member for member in alive if (member.lateness_p99_ms or 0) > LATE_WARN_MS]
    if late:
        yield Finding(
            "lateness",
            NOTE,
            f"{lateness_text(status)}; late at {_some([member.address for member in late])}",
            "measured since those instances started, so it includes timers that were overdue at the start",
            "watch duetime_late_by_seconds for the current lateness",
        )
    else:
        yield Finding("lateness", GOOD, lateness_text(status))


def lateness_text(status: ClusterStatus) -> str:
    if status.lateness_p50_ms is None or status.lateness_p99_ms is None:
        return "no timer has fired yet"
    return f"p50 within {format_duration(status.lateness_p50_ms)}, p99 within {format_duration(status.lateness_p99_ms)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
