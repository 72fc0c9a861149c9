"""File descriptors: how many this process may open, and how they are divided.

Every connection takes one. If connections to receivers could take them all, the API could accept nothing, the store
could not connect, and timers of all tenants would fail. So each part has a limit, and the limits together are below
that of the system. If the system allows fewer than the configuration asks for, the limits are lowered at the start.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from duetime.config import Config
from duetime.errors import SetupError

__all__ = ["Sizes", "fitted", "lowered_text", "raised_limit", "size"]

# Open in any process: standard streams, the event loop, listeners, log, certificates while they are loaded, modules
# that are imported later, metrics, and a few connections that are closing.
_BASE: Final = 40
# Connections and files of the stores, at most. A database in a cluster also has other instances to call.
_STORE: Final = {"memory": 0, "sqlite": 16, "dynamodb": 96}
_STORE_OTHER: Final = 64
# A look-up reads files (/etc/hosts) and asks DNS servers.
_PER_LOOKUP: Final = 2
_LOOKUPS: Final = 64
_LOOKUPS_MIN: Final = 8
# Connections above `server.connections_max` that may ask for health, see http/server.py.
_HEALTH: Final = 64
# New connections that the system may hand over at once, before those that are too many are closed.
_BACKLOG: Final = 1_024
_BACKLOG_MIN: Final = 16
_HANDSHAKES: Final = 512
_HANDSHAKES_MIN: Final = 16
# Callbacks that are above `delivery.concurrency_max` for a moment.
_CALLBACKS_FACTOR: Final = 2
_CONNECTIONS_MIN: Final = 16
_CALLBACKS_MIN: Final = 16
_RAISED_MAX: Final = 1_048_576


class Sizes(Struct, frozen=True):
    """The limits that fit into the limit of open files. `lowered`: some are lower than configured."""

    limit: int | None  # of open files; None: none
    connections_max: int  # of the API
    concurrency_max: int  # callbacks in flight
    callback_sockets_max: int
    lookups_max: int
    backlog: int
    handshakes_max: int
    wanted: int  # the limit of open files with which nothing is lowered
    lowered: bool


def size(limit: int | None, config: Config) -> Sizes:
    """Divide the descriptors. Pure. Raises a SetupError if there are too few to work at all.

    The base and the store get what they need. Of the rest the API and the callbacks get a half each, or less if they
    want less: neither can take what the other one has.
    """
    connections, concurrency = config.server.connections_max, config.delivery.concurrency_max
    has_tls = bool(config.server.tls_certificate)
    fixed = _BASE + _STORE.get(config.store.url.partition(":")[0], _STORE_OTHER)
    handshakes = _HANDSHAKES if has_tls else 0
    api_wanted = connections + _HEALTH + max(_BACKLOG, handshakes)
    callbacks_wanted = _CALLBACKS_FACTOR * concurrency
    wanted = fixed + _PER_LOOKUP * _LOOKUPS + api_wanted + callbacks_wanted
    if limit is None or limit >= wanted:
        return Sizes(
            limit, connections, concurrency, callbacks_wanted, _LOOKUPS, _BACKLOG, _HANDSHAKES, wanted, lowered=False
        )
    # An eighth for new connections and for look-ups, but not more than they need.
    arriving = min(_BACKLOG, max(_BACKLOG_MIN, limit // 8))
    lookups = min(_LOOKUPS, max(_LOOKUPS_MIN, limit // 32))
    left = limit - fixed - _PER_LOOKUP * lookups - arriving - _HEALTH
    callbacks = min(callbacks_wanted, max(left // 2, left - connections))
    served = min(connections, left - callbacks)
    if callbacks < min(_CALLBACKS_MIN, callbacks_wanted) or served < min(_CONNECTIONS_MIN, connections):
        needed = fixed + _PER_LOOKUP * _LOOKUPS_MIN + _HEALTH + _CALLBACKS_MIN + _CONNECTIONS_MIN
        needed = max(needed + _BACKLOG_MIN, -(-needed * 8 // 7))
        raise SetupError(
            f"the system allows this process {limit} open files; at least {needed} are needed, and {wanted} for the "
            f"limits of this configuration. Raise the hard limit: LimitNOFILE={wanted} in the unit file of systemd, "
            f"--ulimit nofile={wanted} of Docker, or `ulimit -Hn {wanted}` in the shell before the start"
        )
    return Sizes(
        limit,
        served,
        min(concurrency, callbacks),
        callbacks,
        lookups,
        arriving,
        max(_HANDSHAKES_MIN, min(_HANDSHAKES, arriving)),
        wanted,
        lowered=served < connections or callbacks < concurrency,
    )


def fitted(config: Config, sizes: Sizes) -> Config:
    """The configuration with the limits that fit."""
    return msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, connections_max=sizes.connections_max),
        delivery=msgspec.structs.replace(config.delivery, concurrency_max=sizes.concurrency_max),
    )


def lowered_text(config: Config, sizes: Sizes) -> str:
    """What was lowered, for the log."""
    return (
        f"the system allows this process {sizes.limit} open files, {sizes.wanted} are needed for the limits of the "
        f"configuration: server.connections_max is {sizes.connections_max} instead of "
        f"{config.server.connections_max}, delivery.concurrency_max is {sizes.concurrency_max} instead of "
        f"{config.delivery.concurrency_max}. Raise the hard limit (LimitNOFILE=, ulimit -Hn)"
    )


def raised_limit() -> int | None:
    """Raise the soft limit of open files to the hard limit. Returns the limit, or None if there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A system may have a lower limit than an infinite hard limit says.
        for limit in (hard, _RAISED_MAX, 65_536, 10_240):
            if limit != resource.RLIM_INFINITY and (limit > soft or soft == resource.RLIM_INFINITY):
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                except (OSError, ValueError):
                    continue
                break
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
