"""Addresses of an instance as text: where it listens, what it advertises, and which address of the machine that is."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence

from duetime.errors import SetupError

__all__ = ["is_loopback", "is_loopback_host", "own_address", "split_advertise", "split_listen", "worker_listen"]

log = logging.getLogger("duetime")


def split_listen(listen: str) -> tuple[str, int]:
    """ "127.0.0.1:8463" or "[::1]:8463" as host and port."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SetupError(f'server.listen must be "host:port", as in "127.0.0.1:8463", not {listen!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(listen: str) -> bool:
    return is_loopback_host(split_listen(listen)[0])


def is_loopback_host(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def worker_listen(listen: str, first_port: int, worker: int) -> str:
    """The "host:port" of the own listener of a worker, whose number is from 1. `first_port` 0: any free port."""
    return f"{listen.rpartition(':')[0]}:{first_port and first_port + worker - 1}"


_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")


def split_advertise(text: str) -> tuple[str, int | None]:
    """ "10.0.0.5:8463" or "[fd00::5]:8463" as host and port; the port may be missing. Otherwise a ValueError."""
    try:
        return _reachable(str(ipaddress.ip_address(text))), None
    except ValueError:
        host, colon, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif _HOST.fullmatch(host) is None:
        raise ValueError(text)
    if colon and not 1 <= int(port) <= 65_535:
        raise ValueError(text)
    return _reachable(host), int(port) if colon else None


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        raise ValueError(host)
    return host


AddressSource = Callable[[socket.AddressFamily], str]  # finds an address of this machine; may raise OSError


def own_address(
    listen: str,
    advertise: str,
    port: int,
    *,
    worker: int | None = None,
    sources: Sequence[AddressSource] | None = None,
) -> str:
    """The address at which other instances reach the listener with this port: `advertise`, or the host of `listen`. If
    the server listens on all addresses, it is the first usable address that `sources` find.
    """
    host, _ = split_listen(listen)
    if advertise:
        host, first = split_advertise(advertise)
        port = port if first is None else first + (worker or 1) - 1
    elif host in ("0.0.0.0", "::"):
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6
        host = _machine_address(family, (_address_by_route, _address_by_host_name) if sources is None else sources)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _machine_address(family: socket.AddressFamily, sources: Sequence[AddressSource]) -> str:
    for source in sources:
        try:
            found = ipaddress.ip_address(source(family))
        except (OSError, ValueError):
            continue
        if not (found.is_loopback or found.is_unspecified or found.is_link_local):
            return str(found)
    log.warning("found no address at which other machines can reach this instance; set cluster.advertise")
    return "127.0.0.1" if family == socket.AF_INET else "::1"


def _address_by_route(family: socket.AddressFamily) -> str:
    """The address from which this machine would send to an address that is reserved for documentation. Nothing is
    sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))
        return str(probe.getsockname()[0])


def _address_by_host_name(family: socket.AddressFamily) -> str:
    return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
