"""Real servers for tests and benchmarks: on loopback, with a folder and a port of their own, as no user of importance.

    with running("postgres18", settings={"shared_buffers": "256MB"}) as server:
        server.url("postgres"); server.kill(); server.start(); server.restart()

From a shell: `python -m scripts.servers --help`. A new kind of server is a subclass of `Server`, named in `SERVERS`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from .cassandra import Cassandra
from .install import CannotInstall
from .kafka import Kafka
from .ministack import Ministack
from .mongodb import MongoDb
from .mysql import MariaDb, MySql, MySqlLike, TiDb
from .nats import Nats
from .postgres import PgBouncer, Postgres, Postgres15, Postgres18
from .prometheus import promtool
from .server import Server, ServerError, free_port, listens
from .toxiproxy import Link, Toxiproxy

__all__ = [
    "SERVERS",
    "CannotInstall",
    "Cassandra",
    "Kafka",
    "Link",
    "MariaDb",
    "Ministack",
    "MongoDb",
    "MySql",
    "MySqlLike",
    "Nats",
    "PgBouncer",
    "Postgres",
    "Server",
    "ServerError",
    "TiDb",
    "Toxiproxy",
    "free_port",
    "listens",
    "new_server",
    "promtool",
    "running",
]

SERVERS: dict[str, type[Server]] = {
    kind.name: kind
    for kind in (
        Postgres15,
        Postgres18,
        PgBouncer,
        MariaDb,
        MySql,
        TiDb,
        Cassandra,
        MongoDb,
        Ministack,
        Nats,
        Kafka,
        Toxiproxy,
    )
}


@overload
def new_server(name: Literal["postgres15", "postgres18"], **options: Any) -> Postgres: ...
@overload
def new_server(name: Literal["pgbouncer"], **options: Any) -> PgBouncer: ...
@overload
def new_server(name: Literal["cassandra"], **options: Any) -> Cassandra: ...
@overload
def new_server(name: Literal["mongodb"], **options: Any) -> MongoDb: ...
@overload
def new_server(name: Literal["ministack"], **options: Any) -> Ministack: ...
@overload
def new_server(name: Literal["mariadb"], **options: Any) -> MariaDb: ...
@overload
def new_server(name: Literal["mysql"], **options: Any) -> MySql: ...
@overload
def new_server(name: Literal["tidb"], **options: Any) -> TiDb: ...
@overload
def new_server(name: Literal["nats"], **options: Any) -> Nats: ...
@overload
def new_server(name: Literal["kafka"], **options: Any) -> Kafka: ...
@overload
def new_server(name: Literal["toxiproxy"], **options: Any) -> Toxiproxy: ...
@overload
def new_server(name: str, **options: Any) -> Server: ...
def new_server(name: str, **options: Any) -> Server:
    """Not started yet. Options: `folder`, `port`, `settings`, and what the kind of server adds (`upstream_port`…)."""
    if name not in SERVERS:
        raise ServerError(f"there is no server called {name!r}, only {', '.join(SERVERS)}")
    return SERVERS[name](**options)


# `with running("postgres18") as server:` starts it on the way in and stops it on the way out.
running = new_server
