"""What is wrong with a cluster, by what it says of itself. Pure: `cluster status` and `doctor` say the same.

A finding is good, worth knowing, or wrong; it says what is so, why that matters, and what to do.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from duetime.cli.screen import painted, spoken
from duetime.client import ClusterStatus, HeldFor, Member, ShardCounts

__all__ = [
    "GOOD",
    "NOTE",
    "WRONG",
    "Finding",
    "about_addresses",
    "about_cluster",
    "about_shards",
    "by_severity",
    "lateness_of",
    "marked",
]

GOOD, NOTE, WRONG = "good", "note", "wrong"
_MARKS = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), WRONG: ("✗", "red")}
_SEVERITY = (WRONG, NOTE, GOOD)

SKEW_WARN_MS, OVERDUE_WARN_MS, OVERDUE_WRONG_MS, LATE_WARN_MS = 100, 5_000, 60_000, 250
WRITES_WAITING_WARN = 1_000
_COMING_OR_GOING = ("starting", "stopping")
_SHARDS_NAMED_MAX = 8


class Finding(Struct, frozen=True):
    check: str
    verdict: str
    says: str
    why: str = ""
    advice: str = ""


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _SEVERITY.index(finding.verdict))


def marked(finding: Finding, text: str) -> str:
    mark, style = _MARKS[finding.verdict]
    return f"{painted(mark, style)} {text}"


def about_cluster(status: ClusterStatus) -> list[Finding]:
    alive = [member for member in status.members if member.alive]
    return [
        *_members(status, alive),
        *about_addresses(alive),
        *about_shards(status.shard_counts, status.unowned_shards),
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
                f"writes for its {_count(member.shards, 'shard')} fail at other instances; and if it is gone, their "
                "timers do not fire until others take over",
                "is its cluster.advertise an address that reaches it from there, with no firewall between? If its "
                f"process is gone, this passes within {spoken(status.dead_after_ms)}",
            )
        elif not member.ready:
            yield _not_ready(member)
    for member in status.members:
        if not member.alive and member.ready is not None:
            yield Finding(
                "members",
                WRONG,
                f"{member.address} was declared dead, but lives",
                "it stood still or was cut off the store for too long; it has dropped its shards and joins again",
                "if it happens again: does it have processor time, is the store quick and always there?",
            )
    gone = [member for member in status.members if not member.alive and member.ready is None]
    back = {member.address for member in alive}
    missing = sorted({member.address for member in gone} - back)
    says = f"{len(alive)} alive" + (f", {len(gone)} dead" if gone else "")
    if not alive:
        yield Finding("members", WRONG, says, "nothing is fired", "start one: `duetime serve`")
    elif missing:
        yield Finding(
            "members",
            NOTE,
            f"{says}; nobody is back at {_some(missing)}",
            "the others have taken over, or will",
            "nothing, if it was meant to end (its row goes after ten minutes); otherwise its log says why it did",
        )
    else:
        yield Finding("members", GOOD, says)


def _not_ready(member: Member) -> Finding:
    passing = member.reason in _COMING_OR_GOING
    return Finding(
        "members",
        NOTE if passing else WRONG,
        f"{member.address} is not ready: {member.reason}",
        "until it is, it fires nothing" if not passing else "",
        "" if passing else "its log has more",
    )


def about_addresses(alive: Sequence[Member]) -> Iterator[Finding]:
    """Living members only."""
    for address, count in Counter(member.address for member in alive).items():
        if count > 1:
            yield Finding(
                "addresses",
                WRONG,
                f"{count} living members say that they are at {address}",
                "what is meant for one reaches the other, which refuses it",
                "give each an address of its own with cluster.advertise; if it was killed and started again just "
                "now, this passes by itself",
            )
    hosts = {member.address: _host(member.address) for member in alive}
    elsewhere = sorted({host for host in hosts.values() if not _is_local(host)})
    for address, host in hosts.items():
        if _is_wildcard(host) and len(alive) > 1:
            yield _not_an_address(address, "which stands for every address and is none")
        elif _is_local(host) and elsewhere:
            yield _not_an_address(address, f"which from {_some(elsewhere)} is another machine")


def _not_an_address(address: str, which: str) -> Finding:
    return Finding(
        "addresses",
        WRONG,
        f"a member says that it is at {address}, {which}",
        "instances on other machines cannot hand writes on to it",
        "set cluster.advertise there, to its address in the network",
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


def about_shards(counts: ShardCounts, unowned: Sequence[int]) -> Iterator[Finding]:
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
        "normal for seconds while members come and go; if it stays, the logs of the living say why they do not claim",
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
            f"the clock of {member.address} is {member.clock_skew_ms} ms off the database's; the limit is {limit_ms}",
            "it fires nothing and gives its shards away"
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
            "a rolling upgrade is under way, or was forgotten half-way",
            "finish it: only neighbouring versions are tested together",
        )
    elif versions:
        yield Finding("versions", GOOD, f"Duetime {next(iter(versions))} on every member")


# --- backlog and lateness ------------------------------------------------------------------------


def _backlog(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    overdue_ms = status.oldest_due_ms or 0
    overdue = f"the oldest due {spoken(overdue_ms)} ago" if overdue_ms else "none overdue"
    says = f"{status.held} timers held back, {status.in_flight} in flight, {overdue}"
    if status.held:
        places = _held_for(alive)
        advice = "the destinations are named here too" if places else "the logs name the destinations"
        yield Finding("backlog", NOTE, says, "they wait for their destinations, and spend no attempts", advice)
        yield from map(_waiting_for, places)
    elif overdue_ms > OVERDUE_WARN_MS:
        where = max(alive, key=lambda member: member.oldest_due_ms or 0)
        yield Finding(
            "backlog",
            WRONG if overdue_ms > OVERDUE_WRONG_MS else NOTE,
            f"{says}, at {where.address}",
            "no destination holds them back: the instance itself is behind, or just started after a pause",
            "if it stays: does it have processor time (duetime_loop_lag_seconds), is the database quick "
            "(duetime_commit_seconds), is its lease alive (duetime_lease_seconds)?",
        )
    else:
        yield Finding("backlog", GOOD, says)
    if status.writes_waiting > WRITES_WAITING_WARN:
        yield Finding(
            "writes",
            NOTE,
            f"{status.writes_waiting} writes wait for the database",
            "creates are answered late, and beyond engine.writes_waiting_max with 429",
            "look at the database: its disk, its locks, its connections (duetime_commit_seconds)",
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
            "they do not fire; all others do",
            "the log names each (`cannot be decoded`): create it again or delete it. Written by a newer version? Then"
            " finish the upgrade",
        )


def _held_for(alive: Sequence[Member]) -> list[HeldFor]:
    """The same destination may be held by several members."""
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
            "destination", NOTE, says, "it is tried with one call at a time until it answers", "mend the destination"
        )
    says = f"{place.held} wait for {place.destination}: {place.in_flight} calls are under way to it"
    advice = "make it answer sooner, or raise delivery.concurrency_per_destination or delivery.rate_per_destination"
    return Finding("destination", NOTE, says, "it is slower than what is due for it", advice)


def _lateness(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    late = [member for member in alive if (member.lateness_p99_ms or 0) > LATE_WARN_MS]
    if late:
        yield Finding(
            "lateness",
            NOTE,
            f"{lateness_of(status)}; late at {_some([member.address for member in late])}",
            "since those instances started: a start after a pause counts too",
            "watch duetime_late_by_seconds, which tells what is so now",
        )
    else:
        yield Finding("lateness", GOOD, lateness_of(status))


def lateness_of(status: ClusterStatus) -> str:
    if status.lateness_p50_ms is None or status.lateness_p99_ms is None:
        return "nothing fired yet"
    return f"p50 within {spoken(status.lateness_p50_ms)}, p99 within {spoken(status.lateness_p99_ms)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
