"""doctor: looks at everything a server depends on, one check after the other, with advice.

A check answers findings: ✓ good, ! worth knowing, ✗ wrong. Nothing is changed; the store is opened for a
moment, if nobody else has it open.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from argparse import Namespace as Arguments
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from msgspec import Struct

from duetime import __version__
from duetime.api.auth import split_listen
from duetime.cli.about import installed
from duetime.cli.cluster import lateness_of
from duetime.cli.connect import client_of, print_json
from duetime.cli.screen import painted, spoken
from duetime.cli.serving import configured
from duetime.client import ConnectionFailed, DuetimeError, Unauthenticated
from duetime.config import Config
from duetime.errors import SchemaMismatch
from duetime.store import open_store

__all__ = ["Finding", "doctor"]

DISK_FREE_MIN, DISK_FREE_LOW = 100 * 1024**2, 1024**3
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs"}
)
SKEW_WARN_MS, OVERDUE_WARN_MS, LATE_WARN_MS = 100, 5_000, 250

GOOD, NOTE, WRONG = "good", "note", "wrong"
_MARKS = {GOOD: ("✓", "green"), NOTE: ("!", "yellow"), WRONG: ("✗", "red")}


class Finding(Struct, frozen=True):
    check: str
    verdict: str
    says: str
    advice: str = ""


async def doctor(arguments: Arguments) -> int:
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if not arguments.json:
            mark, style = _MARKS[finding.verdict]
            print(f"{painted(mark, style)} {finding.check.ljust(13)} {finding.says}", flush=True)
            if finding.advice:
                print(f"  {'':13} {painted(finding.advice, 'dim')}")

    for finding in _machine():
        report(finding)
    config = None
    try:
        loaded = configured(arguments)
        split_listen(loaded.server.listen)
        config = loaded
        report(Finding("configuration", GOOD, f"valid; file: {arguments.config or 'none, defaults and environment'}"))
    except DuetimeError as error:
        report(
            Finding(
                "configuration",
                WRONG,
                error.detail,
                "`duetime config show` prints what comes of flags, file and environment",
            )
        )
    if config is not None:
        report(_descriptors(config))
        async for finding in _store(config):
            report(finding)
    async for finding in _server(arguments, config):
        report(finding)
    wrong = sum(finding.verdict == WRONG for finding in findings)
    warnings = sum(finding.verdict == NOTE for finding in findings)
    if arguments.json:
        for finding in findings:
            print_json(finding)
    else:
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
        yield Finding("packages", NOTE, f"{listed}; without uvloop", "slower, but works; on Linux: pip install uvloop")
    elif missing:
        yield Finding("packages", WRONG, f"missing: {', '.join(missing)}", "install again: pip install duetime")
    else:
        yield Finding("packages", GOOD, listed)
    if hasattr(time, "CLOCK_BOOTTIME"):
        yield Finding("clock", GOOD, "boot time is counted through a suspend")
    else:
        yield Finding(
            "clock", NOTE, "no CLOCK_BOOTTIME here", "do not suspend this machine while it serves in a cluster"
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
        "open files", NOTE, f"up to {limit}; at full load {wanted} are wanted", f"ulimit -n {wanted}, or LimitNOFILE="
    )


# --- the store -----------------------------------------------------------------------------------


async def _store(config: Config) -> AsyncIterator[Finding]:
    url = config.store.url
    if url.startswith("sqlite:"):
        from duetime.stores.sqlite_file import holder, path_of

        try:
            path = Path(path_of(url))
        except DuetimeError as error:
            yield Finding("store", WRONG, error.detail)
            return
        for finding in _disk(path):
            yield finding
        if not _exists(path):
            yield Finding("store", NOTE, f"{path} does not exist yet", "the first `duetime serve` makes it")
            return
        if who := holder(url):
            yield Finding("store", GOOD, f"{path}, in use by process {who.get('pid')} since {who.get('since')}")
            return
    yield await _opened(url)


async def _opened(url: str) -> Finding:
    try:
        store = open_store(url)
        await store.open()
    except SchemaMismatch as error:
        return Finding("store", WRONG, error.detail, "a start of `duetime serve` updates an older schema")
    except DuetimeError as error:
        return Finding("store", WRONG, error.detail)
    try:
        capabilities = store.capabilities
        namespaces = [namespace for namespace in await store.namespaces() if not namespace.deleted]
        owned = [shard for shard in await store.shards() if shard.owner_id is not None]
    except DuetimeError as error:
        return Finding("store", WRONG, error.detail)
    finally:
        await store.close()
    says = f"{capabilities.name}: {len(namespaces)} namespaces, {len(owned)} shards owned"
    if not capabilities.durable:
        return Finding("store", NOTE, says, "this store is in memory: timers are lost when the process ends")
    return Finding("store", GOOD, says)


def _disk(path: Path) -> Iterator[Finding]:
    folder = path.parent
    if not folder.is_dir():
        yield Finding("disk", WRONG, f"no directory {folder}", f"mkdir -p {folder}")
        return
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk", WRONG, f"{folder} is not writable", "the lock and the write-ahead log are made beside the file"
        )
    free = shutil.disk_usage(folder).free
    says = f"{free / 1024**3:.1f} GiB free in {folder}"
    if free < DISK_FREE_MIN:
        yield Finding("disk", WRONG, says, "creates fail when the disk is full: make room")
    else:
        yield Finding("disk", NOTE if free < DISK_FREE_LOW else GOOD, says)
    kind = _file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        yield Finding("file system", WRONG, kind, "SQLite is not safe on a network file system: use a local disk")
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


async def _server(arguments: Arguments, config: Config | None) -> AsyncIterator[Finding]:
    asked_for = arguments.url or os.environ.get("DUETIME_URL")
    if not asked_for and config is not None:
        arguments.url = _url_of(config)
    async with client_of(arguments) as client:
        try:
            status = await client.cluster_status()
        except ConnectionFailed as error:
            # Nobody said that there is one: then its absence is no fault.
            verdict = WRONG if asked_for else NOTE
            yield Finding("server", verdict, error.detail, "start one with `duetime serve`, or point to one with --url")
            return
        except Unauthenticated as error:
            yield Finding("server", WRONG, f"{client.url}: {error.detail}", "give one with --token or DUETIME_TOKEN")
            return
        except DuetimeError as error:
            yield Finding("server", WRONG, f"{client.url}: {error.detail}")
            return
        where = f"{client.url}: Duetime {status.version} on {status.store}"
        if status.ready:
            yield Finding("server", GOOD, f"{where}, ready")
        else:
            yield Finding("server", WRONG, f"{where}, not ready: {status.reason}")
    alive = [member for member in status.members if member.alive]
    free = sum(shard.owner_id is None for shard in status.shards)
    yield Finding("members", GOOD if alive else WRONG, f"{len(alive)} alive, {len(status.members) - len(alive)} dead")
    if free:
        yield Finding(
            "shards", NOTE, f"{free} of {len(status.shards)} without an owner", "normal for seconds after a start"
        )
    lease = f"{spoken(max(status.lease_ms, 0))} left"
    yield Finding(
        "lease", GOOD if status.lease_ms > 0 else WRONG, lease, "" if status.lease_ms > 0 else "it fires nothing"
    )
    skewed = abs(status.clock_skew_ms) > SKEW_WARN_MS
    yield Finding(
        "clock skew",
        NOTE if skewed else GOOD,
        f"{status.clock_skew_ms} ms from the database",
        "run a time service (chrony, systemd-timesyncd)" if skewed else "",
    )
    overdue_ms = status.oldest_due_ms or 0
    overdue = f"the oldest due {spoken(overdue_ms)} ago" if overdue_ms else "none overdue"
    yield Finding(
        "backlog",
        NOTE if overdue_ms > OVERDUE_WARN_MS or status.held else GOOD,
        f"{status.writes_waiting} writes waiting, {status.held} timers held back, {overdue}",
        "a destination is slow or down: `duetime timer list` shows which" if status.held else "",
    )
    late = (status.lateness_p99_ms or 0) > LATE_WARN_MS
    yield Finding("lateness", NOTE if late else GOOD, lateness_of(status))


def _url_of(config: Config) -> str | None:
    """Where a server of this configuration would be found from here; None: nobody knows (any free port)."""
    host, port = split_listen(config.server.listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # all addresses: then also this one
    return f"http://{f'[{host}]' if ':' in host else host}:{port}" if port else None
