"""Real servers for tests: a pytest plugin, and the functions that tests call.

    from servers import at_port, fresh_database, own, postgres, require

    server = postgres(18)            # the session's PostgreSQL 18 (or 15): started when first asked for
    url = fresh_database(server)     # postgresql://postgres@127.0.0.1:PORT/duetime_test_…: an empty database
    proxy = require("toxiproxy")     # any other server of the session, by its name
    link = proxy.link(server.port)   # a way to it that can be cut: at_port(url, link.port), link.cut(), link.mend()
    with own("postgres18", settings={}) as mine:   # for a test that kills or restarts: mine.kill(), mine.start(), …
        standby = mine.standby(synchronous=True); mine.kill(); standby.promote(); standby.url("postgres")
    with own("pgbouncer", upstream_port=server.port) as bouncer:   # at_port(url, bouncer.port)

All of it blocks: in a coroutine, `await asyncio.to_thread(mine.restart)`. A test that takes the fixture
`postgres_server` runs on both versions; `database_url` is an empty database there. Where a server cannot be installed,
the test is skipped and the end of the run says so; with CI=true in the environment, it fails. What servers can do:
`scripts/servers`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, cast, overload

import pytest
from scripts.gate.time_limit import not_counted
from scripts.servers import (
    CannotInstall,
    Kafka,
    Nats,
    PgBouncer,
    Postgres,
    Server,
    ServerError,
    TiDb,
    Toxiproxy,
    new_server,
)
from scripts.servers import promtool as find_promtool

__all__ = ["at_port", "fresh_database", "own", "port_of", "postgres", "promtool", "require"]

_running: dict[str, Server] = {}
_missing: dict[str, str] = {}
_numbers = itertools.count(1)


@overload
def require(name: Literal["postgres15", "postgres18"]) -> Postgres: ...
@overload
def require(name: Literal["nats"]) -> Nats: ...
@overload
def require(name: Literal["kafka"]) -> Kafka: ...
@overload
def require(name: Literal["toxiproxy"]) -> Toxiproxy: ...
@overload
def require(name: str) -> Server: ...
def require(name: str) -> Server:
    """The session's server of this name, running."""
    server = _running.get(name)
    if server is None:
        server = _running[name] = _start(name)
    elif not server.is_running:  # a test killed it and went away
        server.start()
    return server


def postgres(version: int) -> Postgres:
    return cast(Postgres, require(f"postgres{version}"))


@overload
def own(name: Literal["postgres15", "postgres18"], **options: Any) -> AbstractContextManager[Postgres]: ...
@overload
def own(name: Literal["pgbouncer"], **options: Any) -> AbstractContextManager[PgBouncer]: ...
@overload
def own(name: Literal["nats"], **options: Any) -> AbstractContextManager[Nats]: ...
@overload
def own(name: Literal["kafka"], **options: Any) -> AbstractContextManager[Kafka]: ...
@overload
def own(name: str, **options: Any) -> AbstractContextManager[Server]: ...
def own(name: str, **options: Any) -> AbstractContextManager[Any]:
    """A server for one test, running. Options: `settings`, `folder`, `port`; for pgbouncer `upstream_port`, for
    nats and kafka `users`, kafka also `linked`."""
    return _own(name, options)


@contextmanager
def _own(name: str, options: dict[str, Any]) -> Iterator[Server]:
    server = _start(name, **options)
    try:
        yield server
    finally:
        server.stop()


def fresh_database(server: Server) -> str:
    """The URL of an empty database. It goes with its server."""
    test = re.sub(r"\W+", "_", os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].lower())[:20].strip("_")
    name = f"duetime_test_{os.getpid()}_{next(_numbers)}_{test}"
    server.make_database(name)
    return server.url(name)


def promtool() -> Path:
    """The program of Prometheus that checks rules and metrics."""
    with _needed("promtool"), not_counted():
        return find_promtool()


_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


def at_port(url: str, port: int) -> str:
    """The same database by another way: through a link of Toxiproxy, or PgBouncer."""
    # A driver that knows of a replica set asks it for its members, and goes to them by the straight way.
    return _PORT.sub(str(port), re.sub(r"replicaSet=\w+", "directConnection=true", url))


def port_of(url: str) -> int:
    match = _PORT.search(url)
    assert match is not None, url
    return int(match[0])


def _start(name: str, **options: Any) -> Server:
    server = new_server(name, **options)
    with _needed(name):
        with not_counted():
            server.install()
        try:
            return server.start()
        except CannotInstall:
            raise
        except ServerError as error:  # with the end of its log
            print(f"{name} did not start, and is started once more: {error}")
            return new_server(name, **options).start()


@contextmanager
def _needed(name: str) -> Iterator[None]:
    try:
        yield
        return
    except CannotInstall as error:
        _missing[name] = str(error)
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} cannot be had, and in CI it must be: {_missing[name]}", pytrace=False)
    pytest.skip(f"{name} cannot be had: {_missing[name]}")


# --- the plugin ----------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=[15, 18], ids=["postgres15", "postgres18"])
def postgres_server(request: pytest.FixtureRequest) -> Postgres:
    return postgres(request.param)


@pytest.fixture
def database_url(postgres_server: Postgres) -> str:
    return fresh_database(postgres_server)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on TiDB are left out unless it was asked for or is there already."""
    of_tidb = [item for item in items if item.get_closest_marker("tidb")]
    if of_tidb and os.environ.get("DUETIME_TEST_TIDB") != "1" and not TiDb.is_built():
        _missing["tidb"] = "takes a quarter of an hour to build; `make test-tidb` does it"
        config.hook.pytest_deselected(items=of_tidb)
        items[:] = [item for item in items if item not in set(of_tidb)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    while _running:
        _running.popitem()[1].stop()
    if hasattr(session.config, "workeroutput"):  # this is a process of pytest-xdist
        session.config.workeroutput["missing"] = _missing


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    _missing.update(getattr(node, "workeroutput", {}).get("missing", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing:
        terminalreporter.section("SERVERS THAT WERE NOT TESTED", sep="!", red=True, bold=True)
        for name, why in sorted(_missing.items()):
            terminalreporter.write_line(f"{name}: {why}", red=True)
        terminalreporter.write_line("Tests that need them were left out or skipped, or failed if CI=true.", red=True)
