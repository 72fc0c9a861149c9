"""Checks the status of a cluster. Pure; used by `cluster status` and `doctor`, so that both report the same.

A finding is good, a note, or wrong. It says what was found, why it matters, and what to do.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from duetime.cli.output import Safe, format_duration, printable, styled
from duetime.client import Broker, ClusterStatus, Flow, HeldFor, Member, ShardCounts

__all__ = [
    "GOOD",
    "NOTE",
    "WRONG",
    "Finding",
    "by_severity",
    "check_addresses",
    "check_cluster",
    "check_pauses",
    "check_shards",
    "lateness_text",
    "with_mark",
]

GOOD, NOTE, WRONG = "good", "note", "wrong"
_MARKS = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), WRONG: ("✗", "red")}
_SEVERITY = (WRONG, NOTE, GOOD)

SKEW_WARN_MS, OVERDUE_WARN_MS, OVERDUE_WRONG_MS, LATE_WARN_MS = 100, 5_000, 60_000, 250
WRITES_WAITING_WARN = 1_000
REFUSED_WARN_MS = 24 * 3_600 * 1_000  # dead letters that are older are no news
_BROKERS = ("nats", "kafka")  # schemes of targets
_TRANSIENT_REASONS = ("starting", "stopping")
_SHARDS_NAMED_MAX = 8
_PAUSES_NAMED_MAX = 5


class Finding(Struct, frozen=True):
    check: str
    verdict: str
    says: str
    why: str = ""
    advice: str = ""


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _SEVERITY.index(finding.verdict))


def with_mark(finding: Finding, text: str) -> Safe:
    mark, style = _MARKS[finding.verdict]
    return Safe(f"{styled(mark, style)} {printable(text)}")


def check_cluster(status: ClusterStatus) -> list[Finding]:
    alive = [member for member in status.members if member.alive]
    return [
        *_members(status, alive),
        *check_addresses(alive),
        *check_shards(status.shard_counts, status.unowned_shards),
        *_clocks(status, alive),
        *_versions(alive),
        *_brokers(alive),
        *_held(status, alive),
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


# --- message brokers ------------------------------------------------------------------------------


def _brokers(alive: Sequence[Member]) -> Iterator[Finding]:
    reporting = [member for member in alive if member.version is not None]
    for name in sorted({broker.name for member in reporting for broker in member.brokers}):
        configured = {
            member.address: broker for member in reporting for broker in member.brokers if broker.name == name
        }
        problems = [*_broker_problems(name, configured, [m.address for m in reporting if m.address not in configured])]
        problems += _broker_notes(name, configured)
        yield from problems or [Finding("brokers", GOOD, _broker_works(name, configured.values()))]


def _broker_problems(name: str, configured: Mapping[str, Broker], without: Sequence[str]) -> Iterator[Finding]:
    if without:
        yield Finding(
            "brokers",
            WRONG,
            f"{name} is configured at {_some(sorted(configured))}, but not at {_some(without)}",
            f"an instance without [{name}] cannot deliver the timers of its shards that have a target {name}:…, and "
            "they fail",
            f"give all instances the same section [{name}], and do not create such timers before all have it",
        )
    receives = any(broker.consuming for broker in configured.values())
    for address, broker in configured.items():
        if not broker.connected:
            yield Finding(
                "brokers",
                WRONG,
                f"{address} is not connected to {name}: {broker.away_reason or 'no reason known'}",
                f"it receives no commands from {name}, and the timers of its shards with a target {name}:… wait",
                f"repair the server or the network, or correct [{name}]; the instance connects again by itself",
            )
        elif broker.consuming is False:
            yield Finding(
                "brokers",
                NOTE if receives else WRONG,
                f"{address} receives no commands from {name}: {broker.not_consuming_reason or 'no reason known'}",
                "other instances receive them"
                if receives
                else f"no instance does: commands wait in {name}{_waiting_in(broker)}",
                "it starts again by itself when the reason is over",
            )


def _broker_notes(name: str, configured: Mapping[str, Broker]) -> Iterator[Finding]:
    """What happens to the commands of a broker that works."""
    brokers = configured.values()
    if remark := next((broker.remark for broker in brokers if broker.remark), None):
        yield Finding(
            "brokers",
            NOTE,
            f"{name}: {remark}",
            "no commands are received before there is one",
            "create it, or let its publishers do so; or correct the setting",
        )
    retrying = sum(broker.retrying for broker in brokers)
    if retrying:
        address, most = max(configured.items(), key=lambda item: item[1].retrying)
        yield Finding(
            "brokers",
            NOTE,
            f"{_count(retrying, 'command')} of {name} {_wait(retrying)} for a retry; the last at {address}: "
            f"{most.retry_reason or 'the reason is in the log'}",
            "their timers do not exist yet, and may be late",
            "if a quota is too small: `duetime namespace update NAME --creates-per-second` or `--requests-per-second`; "
            "if it is right, the tenant has to send less",
        )
    # Twice what is worked on: commands come and go between the looks at the broker and at the instances.
    held = retrying + 2 * sum(broker.in_flight for broker in brokers)
    lost = max((broker.unacknowledged or 0 for broker in brokers), default=0) - held
    if lost > 0:
        yield Finding(
            "brokers",
            NOTE,
            f"{_count(lost, 'command')} of {name} {_wait(lost)} for an acknowledgement, and no instance works on them",
            f"{name} delivers them again when the time for the acknowledgement is over: their timers may be late",
            "normal for a while after an instance was killed (nats.ack_wait); if it stays, another client uses the "
            "consumer, or an instance does not report",
        )
    refused = sum(broker.refused for broker in brokers)
    recent = [
        item for item in configured.items() if (item[1].refused_ago_ms or 0) < REFUSED_WARN_MS and item[1].refused
    ]
    if recent:
        address, last = min(recent, key=lambda item: item[1].refused_ago_ms or 0)
        ago = "" if last.refused_ago_ms is None else f", {format_duration(last.refused_ago_ms)} ago"
        yield Finding(
            "brokers",
            NOTE,
            f"{_count(refused, 'command')} of {name} became dead letters since the instances started; the last at "
            f"{address}{ago}: {last.refusal_reason or 'the reason is in the log'}",
            "they can never succeed, and their timers do not exist",
            "each dead letter has its command and the reason; its publisher has to correct it and send it again",
        )


def _wait(number: int) -> str:
    return "wait" if number != 1 else "waits"


def _waiting_in(broker: Broker) -> str:
    return "" if broker.waiting is None else f" ({broker.waiting} now)"


def _broker_works(name: str, connections: Collection[Broker]) -> str:
    says = f"{name}: connected from {_count(len(connections), 'instance')}"
    if all(broker.consuming is None for broker in connections):
        return f"{says}; no commands are read from it"
    waiting = [broker.waiting for broker in connections if broker.waiting is not None]
    in_flight = sum(broker.in_flight for broker in connections)
    retrying = sum(broker.retrying for broker in connections)
    return (
        f"{says}; commands: {max(waiting) if waiting else 'unknown how many'} waiting, {in_flight} in flight, "
        f"{retrying} to retry"
    )


# --- pauses --------------------------------------------------------------------------------------


def check_pauses(namespaces: Sequence[str], flows: Sequence[Flow]) -> Iterator[Finding]:
    """`namespaces` that are paused, and flows that are paused themselves. A pause that was forgotten is an outage."""
    if not namespaces and not flows:
        yield Finding("pauses", GOOD, "no namespace and no flow is paused")
    for name in namespaces[:_PAUSES_NAMED_MAX]:
        yield Finding(
            "pauses",
            NOTE,
            f"namespace {name} is paused",
            "none of its timers fires",
            f"when the reason is over: duetime namespace resume {shlex.quote(name)}",
        )
    for flow in flows[:_PAUSES_NAMED_MAX]:
        key, name = flow.flow_key, flow.namespace
        yield Finding(
            "pauses",
            NOTE,
            f"flow {key} of namespace {name} is paused, {_count(flow.waiting, 'due timer')} waiting",
            "none of its timers fires",
            f"when the reason is over: duetime flow resume {shlex.quote(key)} --namespace {shlex.quote(name)}",
        )
    for what, count in (("namespaces", len(namespaces)), ("flows", len(flows))):
        if count > _PAUSES_NAMED_MAX:
            yield Finding("pauses", NOTE, f"{count - _PAUSES_NAMED_MAX} more {what} are paused")


# --- held timers and lateness ---------------------------------------------------------------------


def _held(status: ClusterStatus, alive: Sequence[Member]) -> Iterator[Finding]:
    overdue_ms = status.oldest_due_ms or 0
    overdue = f"the oldest was due {format_duration(overdue_ms)} ago" if overdue_ms else "none overdue"
    says = f"{status.held} timers held, {status.in_flight} in flight, {overdue}"
    if status.held:
        places = _held_for(alive)
        advice = "see the flows in this list" if places else "`duetime flow list` shows the flows"
        why = "they wait for a breaker, a limit, a share or a pause, and use no attempts"
        yield Finding("held", NOTE, says, why, advice)
        yield from map(_waiting_for, places)
    elif overdue_ms > OVERDUE_WARN_MS:
        where = max(alive, key=lambda member: member.oldest_due_ms or 0)
        yield Finding(
            "held",
            WRONG if overdue_ms > OVERDUE_WRONG_MS else NOTE,
            f"{says}, at {where.address}",
            "they are not held: the instance is too slow, was suspended, or catches up after a start",
            "if it stays: check its CPU time (duetime_loop_lag_seconds), the speed of the database "
            "(duetime_commit_seconds) and its lease (duetime_lease_seconds)",
        )
    else:
        yield Finding("held", GOOD, says)
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
    """The five flows with the most held timers. Several members may hold timers of the same one."""
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
            last_error=next((place.last_error for place in some if place.last_error), None),
        )
        for name, some in places.items()
    ]
    return sorted(together, key=lambda place: -place.held)[:5]


def _waiting_for(place: HeldFor) -> Finding:
    if place.breaker_open:
        says = (
            f"{place.destination}: {_count(place.held, 'due timer')} waiting; its breaker is open after "
            f"{place.failures} failures in a row" + (f": {place.last_error}" if place.last_error else "")
        )
        broker = next((name for name in _BROKERS if place.destination.startswith(f"{name}:")), None)
        advice = (
            "repair the receiver"
            if broker is None
            else f"{broker} does not store the events: is there a stream or topic for them? `duetime doctor` with the "
            "configuration of the server checks it, and has the command that creates it"
        )
        return Finding("flow", NOTE, says, "one call at a time is tried until one succeeds", advice)
    says = (
        f"{place.destination}: {_count(place.held, 'due timer')} waiting, {_count(place.in_flight, 'call')} in flight"
    )
    why = "the flow or its namespace is paused, or more timers are due than its limits and its share allow"
    advice = "`duetime flow list` shows which: resume it, raise its limits, or make the receiver answer faster"
    return Finding("flow", NOTE, says, why, advice)


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
