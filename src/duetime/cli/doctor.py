"""doctor: checks everything a server depends on, and the cluster, and explains what is wrong.

It changes nothing: the store is opened for a moment to read, unless another process has it open exclusively. A problem
that may be transient (a member that died a second ago, a shard between two owners) is checked again before it is
reported.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import time
from argparse import Namespace as Arguments
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

from duetime import __version__
from duetime.addresses import split_listen
from duetime.cli.broker_checks import check_brokers
from duetime.cli.client_options import open_client
from duetime.cli.diagnosis import (
    GOOD,
    NOTE,
    WRONG,
    Finding,
    by_severity,
    check_addresses,
    check_cluster,
    check_pauses,
    check_shards,
    with_mark,
)
from duetime.cli.output import format_duration, format_relative_ms, now_ms, print_json, print_line, styled
from duetime.cli.secret_files import check_secret_files
from duetime.cli.settings import config_from
from duetime.cli.version import installed_versions
from duetime.client import (
    AsyncClient,
    ClusterStatus,
    ConnectionFailed,
    DuetimeError,
    Flow,
    FlowState,
    Member,
    ShardCounts,
    Unauthenticated,
)
from duetime.config import Config
from duetime.descriptors import size
from duetime.errors import SchemaMismatch, SetupError
from duetime.http.certificates import expires_at_ms
from duetime.http.listeners import WARN_DAYS
from duetime.store import Store, open_store
from duetime.telemetry import log

__all__ = ["doctor"]

DISK_FREE_MIN, DISK_FREE_LOW = 100 * 1024**2, 1024**3
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs"}
)
_TRANSIENT_CHECKS = frozenset({"members", "addresses", "shards"})
_POLL_PAUSE_S = 0.5
CERTIFICATE_WARN_MS = WARN_DAYS * 24 * 3_600 * 1_000
_TAKE_OVER_MS = 2_000  # to claim and load the shards of a dead member
_HEARTBEATS_WATCHED = 4
_FLOWS_IN_PAGE, _FLOW_PAGES_MAX = 500, 40


async def doctor(arguments: Arguments) -> int:
    findings = [*_check_machine()]
    config = None
    try:
        loaded = config_from(arguments)
        split_listen(loaded.server.listen)
        config = loaded
        findings.append(
            Finding("configuration", GOOD, f"valid; file: {arguments.config or 'none, defaults and environment'}")
        )
        findings += [Finding("configuration", NOTE, warning) for warning in loaded.warnings]
    except DuetimeError as error:
        advice = "`duetime config show` prints the configuration that results from flags, file and environment"
        findings.append(Finding("configuration", WRONG, error.detail, "`duetime serve` cannot start with it", advice))
    if config is not None:
        findings += _check_certificate(config)
    findings += check_secret_files(arguments.config, config)
    server_findings, status = await _check_server(arguments, config)
    findings += server_findings
    if config is not None:
        findings.append(_check_open_files(config))
        findings += [finding async for finding in _check_store(config, status)]
        findings += await check_brokers(arguments, config, has_server=status is not None)
    return _report(by_severity(findings), as_json=arguments.json)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    wrong = sum(finding.verdict == WRONG for finding in findings)
    warnings = sum(finding.verdict == NOTE for finding in findings)
    if as_json:
        for finding in findings:
            print_json(finding)
        return 1 if wrong else 0
    for finding in findings:
        print_line(with_mark(finding, f"{finding.check.ljust(13)} {finding.says}"))
        for more in filter(None, (finding.why, finding.advice)):
            print_line(" " * 15, styled(more, "dim"), sep=" ")
    also = f"; {warnings} warning{'s' * (warnings > 1)}, marked !" if warnings else ""
    print_line()
    print_line(f"{f'{wrong} wrong' if wrong else 'nothing is wrong'}{also}")
    return 1 if wrong else 0


def _check_machine() -> Iterator[Finding]:
    python = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield Finding("python", GOOD, python)
    versions = {"duetime": __version__, **installed_versions()}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    if missing == ["uvloop"]:
        yield Finding(
            "packages",
            NOTE,
            f"{listed}; without uvloop",
            advice="it works, but slower; on Linux and macOS: pip install uvloop",
        )
    elif missing:
        yield Finding("packages", WRONG, f"missing: {', '.join(missing)}", advice="install again: pip install duetime")
    else:
        yield Finding("packages", GOOD, listed)
    if hasattr(time, "CLOCK_BOOTTIME"):
        yield Finding("clock", GOOD, "the clock for leases also counts while the machine is suspended")
    else:
        yield Finding(
            "clock",
            NOTE,
            "this system has no CLOCK_BOOTTIME",
            "the lease of an instance does not run out while its machine is suspended",
            "do not suspend this machine while it runs an instance of a cluster",
        )


def _check_open_files(config: Config) -> Finding:
    """As `serve` divides them: it raises the soft limit to the hard one."""
    try:
        import resource
    except ImportError:
        return Finding("open files", GOOD, "no limit on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = None if hard == resource.RLIM_INFINITY else hard
    try:
        sizes = size(limit, config)
    except SetupError as error:
        return Finding("open files", WRONG, error.detail, "`duetime serve` cannot start with it")
    if not sizes.lowered:
        return Finding("open files", GOOD, f"up to {'any number' if limit is None else limit}")
    return Finding(
        "open files",
        NOTE,
        f"at most {limit} (hard limit; soft limit {soft}); at full load {sizes.wanted} are needed",
        f"server.connections_max is {sizes.connections_max} instead of {config.server.connections_max}, "
        f"delivery.concurrency_max is {sizes.concurrency_max} instead of {config.delivery.concurrency_max}",
        f"raise the hard limit: ulimit -Hn {sizes.wanted}, LimitNOFILE={sizes.wanted} of systemd, --ulimit "
        f"nofile={sizes.wanted} of Docker; or lower server.connections_max or delivery.concurrency_max",
    )


def _check_certificate(config: Config) -> Iterator[Finding]:
    path = config.server.tls_certificate
    if not path:
        return
    end_ms = expires_at_ms(path)
    if end_ms is None:
        yield Finding("certificate", WRONG, f"{path} cannot be read", "`duetime serve` cannot start with it")
        return
    left_ms = end_ms - now_ms()
    says = f"{path} ends {format_relative_ms(end_ms)}"
    if left_ms <= 0:
        yield Finding("certificate", WRONG, says, "clients and other instances refuse it", "renew it")
    elif left_ms < CERTIFICATE_WARN_MS:
        yield Finding("certificate", NOTE, says, "then clients and other instances refuse it", "renew it")
    else:
        yield Finding("certificate", GOOD, says)


# --- the store -----------------------------------------------------------------------------------


async def _check_store(config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
    url = config.store.url
    if url.startswith("sqlite:"):
        from duetime.stores.sqlite.connection import holder, path_of

        try:
            path = Path(path_of(url))
        except DuetimeError as error:
            yield Finding("store", WRONG, error.detail)
            return
        for finding in _check_disk(path):
            yield finding
        if not _exists(path):
            advice = "the first `duetime serve` creates it"
            if status is not None:
                advice = f"the server that was asked uses {status.store}; set its store with --config or --store"
            yield Finding("store", NOTE, f"{path} does not exist yet", advice=advice)
            return
        if who := holder(url):
            yield Finding("store", GOOD, f"{path}, in use by process {who.get('pid')} since {who.get('since')}")
            return
    try:
        store = open_store(url)
    except DuetimeError as error:
        yield Finding("store", WRONG, error.detail)
        return
    was_silent, log.disabled = log.disabled, True  # what a store logs when it is opened is reported as findings
    try:
        async for finding in _check_open_store(store, config, status):
            yield finding
    finally:
        log.disabled = was_silent
        await store.close()


async def _check_open_store(store: Store, config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
    try:
        await store.open()
        namespaces = sum(not namespace.deleted for namespace in await store.namespaces())
        says = f"{store.capabilities.name}, namespaces: {namespaces}, shards: {len(await store.shards())}"
        largest = min(config.limits.payload_bytes_max, store.capabilities.payload_bytes_max)
        says += f", payloads of up to {largest} bytes"
        if store.capabilities.durable:
            yield Finding("store", GOOD, says)
        else:
            yield Finding("store", NOTE, says, "it is in memory: timers are lost when the process ends")
        async for finding in _database(store):
            yield finding
        if not store.capabilities.exclusive:
            async for finding in _check_rows(store, config, status):
                yield finding
    except SchemaMismatch as error:
        advice = "`duetime serve` creates or updates the tables when it starts; a newer schema needs a newer Duetime"
        yield Finding("store", WRONG, error.detail, "this version can neither read nor write it", advice)
        async for finding in _database(store):
            yield finding
    except DuetimeError as error:
        yield Finding(
            "store",
            WRONG,
            error.detail,
            "without the store no timer can be created, and when the lease runs out no timer fires",
        )


async def _database(store: Store) -> AsyncIterator[Finding]:
    """What the store reports about its database server."""
    try:
        diagnosis = await store.diagnose()
    except DuetimeError as error:
        yield Finding("database", WRONG, error.detail)
        return
    for danger in diagnosis.dangers:
        yield Finding("database", WRONG, danger.problem, danger.consequence, "change this setting of the database")
    if diagnosis.facts:
        yield Finding("database", GOOD, "; ".join(diagnosis.facts))


# --- the cluster, from the rows in the store -------------------------------------------------------


async def _check_rows(store: Store, config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
    """Findings that need the rows of the store: that no member is running, or that the server uses another store."""
    members = {member.instance_id: member for member in await store.members()}
    if status is not None:
        if status.instance_id not in members and members:
            yield Finding(
                "store",
                NOTE,
                "the server that was asked does not use this store: it is not one of its members",
                advice="give the configuration of that server with --config or --store",
            )
        return
    alive = {name: member.counter for name, member in members.items() if member.alive}
    if not alive:
        yield Finding(
            "members", NOTE, "no instance uses this store", "no timer fires", "start an instance: `duetime serve`"
        )
        return
    watched_ms = _HEARTBEATS_WATCHED * config.engine.heartbeat_interval.ms
    await asyncio.sleep(watched_ms / 1_000)
    now = {member.instance_id: member for member in await store.members() if member.alive}
    still = [member for name, member in now.items() if alive.get(name) == member.counter]
    yield _heartbeats(len(now), [member.address for member in still], watched_ms, config.engine.dead_after.ms)
    if len(still) == len(now):
        return  # no instance is running: the other rows are out of date
    rows = await store.shards()
    owned = Counter(row.owner_id for row in rows)
    shown = [
        Member(
            instance_id=name,
            address=member.address,
            alive=True,
            self_=False,
            shards=owned[name],
            joined_at=datetime.fromtimestamp(member.joined_at_ms / 1_000, UTC),
        )
        for name, member in now.items()
    ]
    for finding in check_addresses(shown):
        yield finding
    unowned = [row.shard_id for row in rows if row.owner_id not in now]
    counts = ShardCounts(
        total=len(rows), owned=len(rows) - len(unowned), free=owned[None], of_dead=len(unowned) - owned[None]
    )
    for finding in check_shards(counts, unowned):
        yield finding


def _heartbeats(alive: int, still: list[str], watched_ms: int, dead_after_ms: int) -> Finding:
    says = f"{alive} alive according to their rows"
    if not still:
        return Finding("members", GOOD, f"{says}, and all send heartbeats")
    silent = f"{says}, but no heartbeat in {format_duration(watched_ms)} from {', '.join(still[:3])}"
    if len(still) == alive:
        return Finding(
            "members", WRONG, silent, "no instance is running, or none can reach the store: no timer fires",
            "start an instance with `duetime serve`; if one is running, its log says why it cannot reach the store",
        )  # fmt: skip
    return Finding(
        "members", NOTE, silent, f"it was killed or is paused: others take over after {format_duration(dead_after_ms)}",
        "see its log",
    )  # fmt: skip


def _check_disk(path: Path) -> Iterator[Finding]:
    folder = path.parent
    if not folder.is_dir():
        yield Finding("disk", WRONG, f"no directory {folder}", advice=f"mkdir -p {folder}")
        return
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk",
            WRONG,
            f"{folder} is not writable",
            "the lock and the write-ahead log are created in the same directory as the file",
        )
    free = shutil.disk_usage(folder).free
    says = f"{free / 1024**3:.1f} GiB free in {folder}"
    if free < DISK_FREE_MIN:
        yield Finding("disk", WRONG, says, "creates fail when the disk is full", "free some space")
    else:
        yield Finding("disk", NOTE if free < DISK_FREE_LOW else GOOD, says)
    kind = _file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding("file system", WRONG, kind, "SQLite is not safe on a network file system", "use a local disk")
    elif kind:
        yield Finding("file system", GOOD, kind)


def _exists(path: Path) -> bool:
    return path.exists()


def _file_system(folder: Path) -> str:
    """Its type, on Linux; otherwise empty."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found, length = "", -1
    for line in mounts:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = mount == "/" or str(folder) == mount or str(folder).startswith(mount + "/")
        if inside and len(mount) >= length:  # of two mounts at the same point, the later one is in use
            found, length = kind, len(mount)
    return found


# --- the server ----------------------------------------------------------------------------------


async def _check_server(arguments: Arguments, config: Config | None) -> tuple[list[Finding], ClusterStatus | None]:
    """The findings, and the cluster status if a server answered."""
    asked_for = arguments.url or os.environ.get("DUETIME_URL")
    if not asked_for and config is not None:
        arguments.url = _url_of(config)
    async with open_client(arguments) as client:
        try:
            status, findings = await _stable_status(client)
            findings += await _pauses(client)
        except ConnectionFailed as error:
            # If no URL was given, it is not wrong that no server is running.
            verdict = WRONG if asked_for else NOTE
            advice = "start a server with `duetime serve`, or give the URL of one with --url"
            return [Finding("server", verdict, error.detail, advice=advice)], None
        except Unauthenticated as error:
            says, advice = f"{client.url}: {error.detail}", "give a token with --token or DUETIME_TOKEN"
            return [Finding("server", WRONG, says, advice=advice)], None
        except DuetimeError as error:
            return [Finding("server", WRONG, f"{client.url}: {error.detail}")], None
    where = f"{client.url}: Duetime {status.version} on {status.store}"
    if status.ready:
        return [Finding("server", GOOD, f"{where}, ready"), *findings], status
    return [
        Finding("server", WRONG, f"{where}, not ready: {status.reason}", "its timers do not fire"),
        *findings,
    ], status


async def _pauses(client: AsyncClient) -> list[Finding]:
    try:
        namespaces = [namespace.namespace for namespace in await client.namespaces.list() if namespace.paused]
        flows: list[Flow] = []
        cursor: str | None = None
        for _ in range(_FLOW_PAGES_MAX):
            page = await client.list_flows_page(state=FlowState.PAUSED, limit=_FLOWS_IN_PAGE, cursor=cursor)
            flows += [flow for flow in page.flows if flow.namespace not in namespaces]
            cursor = page.next_cursor
            if cursor is None:
                break
    except DuetimeError as error:  # an older version, or a store that does not answer, which other checks report
        return [Finding("pauses", NOTE, f"cannot read what is paused: {error.detail}")]
    return list(check_pauses(namespaces, flows))


async def _stable_status(client: AsyncClient) -> tuple[ClusterStatus, list[Finding]]:
    """The cluster status and its findings. Waits while the only problems may be transient."""
    waited_ms = 0.0
    while True:
        status = await client.cluster_status()
        findings = check_cluster(status)
        transient = any(finding.verdict == WRONG and finding.check in _TRANSIENT_CHECKS for finding in findings)
        if not transient or waited_ms > status.dead_after_ms + _TAKE_OVER_MS:
            return status, findings
        await asyncio.sleep(_POLL_PAUSE_S)
        waited_ms += _POLL_PAUSE_S * 1_000


def _url_of(config: Config) -> str | None:
    """The URL of a server with this configuration. None: unknown, because it listens on any free port."""
    host, port = split_listen(config.server.listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # it listens on all addresses, so also on loopback
    scheme = "https" if config.server.tls_certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" if port else None
