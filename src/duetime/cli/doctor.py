"""doctor: looks at everything a server depends on, and at the cluster it is in, and explains what is wrong.

Nothing is changed: the store is opened for a moment, to read, if nobody has it for himself. What may be passing
(a member that died a second ago, a shard between two owners) is looked at again before it is called wrong.
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
from duetime.api.auth import split_listen
from duetime.cli.about import installed
from duetime.cli.connect import client_of, print_json
from duetime.cli.diagnosis import (
    GOOD,
    NOTE,
    WRONG,
    Finding,
    about_addresses,
    about_cluster,
    about_shards,
    by_severity,
    marked,
)
from duetime.cli.screen import painted, spoken
from duetime.cli.serving import configured
from duetime.client import (
    AsyncClient,
    ClusterStatus,
    ConnectionFailed,
    DuetimeError,
    Member,
    ShardCounts,
    Unauthenticated,
)
from duetime.config import Config
from duetime.errors import SchemaMismatch
from duetime.store import Store, open_store
from duetime.telemetry import log

__all__ = ["doctor"]

DISK_FREE_MIN, DISK_FREE_LOW = 100 * 1024**2, 1024**3
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs"}
)
_PASSING_CHECKS = frozenset({"members", "addresses", "shards"})
_LOOK_PAUSE_S = 0.5
_SETTLING_MS = 2_000  # to claim and load what a dead member had
_BEATS_WATCHED = 4


async def doctor(arguments: Arguments) -> int:
    findings = [*_machine()]
    config = None
    try:
        loaded = configured(arguments)
        split_listen(loaded.server.listen)
        config = loaded
        findings.append(
            Finding("configuration", GOOD, f"valid; file: {arguments.config or 'none, defaults and environment'}")
        )
        findings += [Finding("configuration", NOTE, warning) for warning in loaded.warnings]
    except DuetimeError as error:
        advice = "`duetime config show` prints what comes of flags, file and environment"
        findings.append(
            Finding("configuration", WRONG, error.detail, "`duetime serve` does not start like this", advice)
        )
    told, status = await _server(arguments, config)
    findings += told
    if config is not None:
        findings.append(_descriptors(config))
        findings += [finding async for finding in _store(config, status)]
    return _report(by_severity(findings), as_json=arguments.json)


def _report(findings: list[Finding], *, as_json: bool) -> int:
    wrong = sum(finding.verdict == WRONG for finding in findings)
    warnings = sum(finding.verdict == NOTE for finding in findings)
    if as_json:
        for finding in findings:
            print_json(finding)
        return 1 if wrong else 0
    for finding in findings:
        print(marked(finding, f"{finding.check.ljust(13)} {finding.says}"))
        for more in filter(None, (finding.why, finding.advice)):
            print(f"  {'':13} {painted(more, 'dim')}")
    also = f"; {warnings} warning{'s' * (warnings > 1)}, marked !" if warnings else ""
    print(f"\n{f'{wrong} wrong' if wrong else 'nothing is wrong'}{also}")
    return 1 if wrong else 0


def _machine() -> Iterator[Finding]:
    python = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield Finding("python", GOOD, python)
    versions = {"duetime": __version__, **installed()}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    if missing == ["uvloop"]:
        yield Finding(
            "packages", NOTE, f"{listed}; without uvloop", advice="slower, but works; on Linux: pip install uvloop"
        )
    elif missing:
        yield Finding("packages", WRONG, f"missing: {', '.join(missing)}", advice="install again: pip install duetime")
    else:
        yield Finding("packages", GOOD, listed)
    if hasattr(time, "CLOCK_BOOTTIME"):
        yield Finding("clock", GOOD, "boot time is counted through a suspend")
    else:
        yield Finding(
            "clock",
            NOTE,
            "no CLOCK_BOOTTIME here",
            "while a machine is suspended, its lease would not run out",
            "do not suspend this machine while it serves in a cluster",
        )


def _descriptors(config: Config) -> Finding:
    wanted = config.server.connections_max + config.delivery.concurrency_max + 64
    try:
        import resource
    except ImportError:
        return Finding("open files", GOOD, "no limit on this system")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Finding("open files", GOOD, f"up to {'any number' if limit == resource.RLIM_INFINITY else limit}")
    return Finding(
        "open files",
        NOTE,
        f"up to {limit}; at full load {wanted} are wanted",
        advice=f"ulimit -n {wanted}, or LimitNOFILE=",
    )


# --- the store -----------------------------------------------------------------------------------


async def _store(config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
    url = config.store.url
    if url.startswith("sqlite:"):
        from duetime.stores.sqlite.connection import holder, path_of

        try:
            path = Path(path_of(url))
        except DuetimeError as error:
            yield Finding("store", WRONG, error.detail)
            return
        for finding in _disk(path):
            yield finding
        if not _exists(path):
            advice = "the first `duetime serve` makes it"
            if status is not None:
                advice = f"the server that was asked is on {status.store}; --config or --store say where to look for it"
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
    was_silent, log.disabled = log.disabled, True  # what a store would log at its opening is found below
    try:
        async for finding in _examined(store, config, status):
            yield finding
    finally:
        log.disabled = was_silent
        await store.close()


async def _examined(store: Store, config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
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
            async for finding in _rows(store, config, status):
                yield finding
    except SchemaMismatch as error:
        advice = "a start of `duetime serve` makes the tables or updates them; a newer schema needs a newer Duetime"
        yield Finding("store", WRONG, error.detail, "this version can neither read nor write it", advice)
        async for finding in _database(store):
            yield finding
    except DuetimeError as error:
        yield Finding("store", WRONG, error.detail, "without it nothing is written, and soon nothing is fired")


async def _database(store: Store) -> AsyncIterator[Finding]:
    """What the store reports about its database server."""
    try:
        diagnosis = await store.diagnose()
    except DuetimeError as error:
        yield Finding("database", WRONG, error.detail)
        return
    for danger in diagnosis.dangers:
        yield Finding("database", WRONG, danger.problem, danger.consequence, "change that setting of the database")
    if diagnosis.facts:
        yield Finding("database", GOOD, "; ".join(diagnosis.facts))


# --- the cluster, by the rows of its store -------------------------------------------------------


async def _rows(store: Store, config: Config, status: ClusterStatus | None) -> AsyncIterator[Finding]:
    """What the rows show and the members cannot say: that nobody is there, or somebody else."""
    members = {member.instance_id: member for member in await store.members()}
    if status is not None:
        if status.instance_id not in members and members:
            yield Finding(
                "store",
                NOTE,
                "the server that was asked is not on this store: its members are others",
                advice="give the configuration of that server, with --config or --store",
            )
        return
    alive = {name: member.counter for name, member in members.items() if member.alive}
    if not alive:
        yield Finding(
            "members", NOTE, "no instance is running on this store", "nothing is fired", "start one: `duetime serve`"
        )
        return
    watched_ms = _BEATS_WATCHED * config.engine.heartbeat_interval.ms
    await asyncio.sleep(watched_ms / 1_000)
    now = {member.instance_id: member for member in await store.members() if member.alive}
    still = [member for name, member in now.items() if alive.get(name) == member.counter]
    yield _beating(len(now), [member.address for member in still], watched_ms, config.engine.dead_after.ms)
    if len(still) == len(now):
        return  # whatever else the rows say is history
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
    for finding in about_addresses(shown):
        yield finding
    unowned = [row.shard_id for row in rows if row.owner_id not in now]
    counts = ShardCounts(
        total=len(rows), owned=len(rows) - len(unowned), free=owned[None], of_dead=len(unowned) - owned[None]
    )
    for finding in about_shards(counts, unowned):
        yield finding


def _beating(alive: int, still: list[str], watched_ms: int, dead_after_ms: int) -> Finding:
    says = f"{alive} alive by their rows"
    if not still:
        return Finding("members", GOOD, f"{says}, and their heartbeats come")
    stood = f"{says}, but no heartbeat in {spoken(watched_ms)} from {', '.join(still[:3])}"
    if len(still) == alive:
        return Finding(
            "members", WRONG, stood, "no instance is running, or none reaches the store: nothing is fired",
            "start one with `duetime serve`; if one is running, its log says why it does not reach the store",
        )  # fmt: skip
    return Finding(
        "members", NOTE, stood, f"it was killed or is frozen: the others take over after {spoken(dead_after_ms)}",
        "its log says what happened to it",
    )  # fmt: skip


def _disk(path: Path) -> Iterator[Finding]:
    folder = path.parent
    if not folder.is_dir():
        yield Finding("disk", WRONG, f"no directory {folder}", advice=f"mkdir -p {folder}")
        return
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk", WRONG, f"{folder} is not writable", "the lock and the write-ahead log are made beside the file"
        )
    free = shutil.disk_usage(folder).free
    says = f"{free / 1024**3:.1f} GiB free in {folder}"
    if free < DISK_FREE_MIN:
        yield Finding("disk", WRONG, says, "creates fail when the disk is full", "make room")
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
    """Its type, where the system tells (Linux)."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found, length = "", -1
    for line in mounts:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = mount == "/" or str(folder) == mount or str(folder).startswith(mount + "/")
        if inside and len(mount) >= length:  # of two mounts on one point the later covers the earlier
            found, length = kind, len(mount)
    return found


# --- the server ----------------------------------------------------------------------------------


async def _server(arguments: Arguments, config: Config | None) -> tuple[list[Finding], ClusterStatus | None]:
    """What is found, and what the server said of its cluster, if there is one."""
    asked_for = arguments.url or os.environ.get("DUETIME_URL")
    if not asked_for and config is not None:
        arguments.url = _url_of(config)
    async with client_of(arguments) as client:
        try:
            status, findings = await _settled(client)
        except ConnectionFailed as error:
            # Nobody said that there is one: then its absence is no fault.
            verdict = WRONG if asked_for else NOTE
            advice = "start one with `duetime serve`, or point to one with --url"
            return [Finding("server", verdict, error.detail, advice=advice)], None
        except Unauthenticated as error:
            says, advice = f"{client.url}: {error.detail}", "give one with --token or DUETIME_TOKEN"
            return [Finding("server", WRONG, says, advice=advice)], None
        except DuetimeError as error:
            return [Finding("server", WRONG, f"{client.url}: {error.detail}")], None
    where = f"{client.url}: Duetime {status.version} on {status.store}"
    if status.ready:
        return [Finding("server", GOOD, f"{where}, ready"), *findings], status
    return [Finding("server", WRONG, f"{where}, not ready: {status.reason}", "it fires nothing"), *findings], status


async def _settled(client: AsyncClient) -> tuple[ClusterStatus, list[Finding]]:
    """The cluster and what is to be said of it, once what was only passing has passed."""
    waited_ms = 0.0
    while True:
        status = await client.cluster_status()
        findings = about_cluster(status)
        passing = any(finding.verdict == WRONG and finding.check in _PASSING_CHECKS for finding in findings)
        if not passing or waited_ms > status.dead_after_ms + _SETTLING_MS:
            return status, findings
        await asyncio.sleep(_LOOK_PAUSE_S)
        waited_ms += _LOOK_PAUSE_S * 1_000


def _url_of(config: Config) -> str | None:
    """Where a server of this configuration would be found from here; None: nobody knows (any free port)."""
    host, port = split_listen(config.server.listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # all addresses: then also this one
    return f"http://{f'[{host}]' if ':' in host else host}:{port}" if port else None
