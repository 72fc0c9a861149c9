"""The sockets of a server: one for each address of a host, bound before any of them listens."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

__all__ = ["bind_sockets"]


def bind_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """A socket for each address of the host, all with the same port. None of them listens yet.

    Port 0: any free port. `reuse_port`: several processes may listen there, and share the connections.
    """
    found = dict.fromkeys(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in found:
            try:
                sock = _bound(family, (address[0], port, *address[2:]), reuse_port)
            except OSError as error:
                # "localhost" has an IPv6 address even where IPv6 is disabled.
                if error.errno not in _NO_SUCH_ADDRESS or len(found) == 1:
                    raise
                continue
            bound.append(sock)
            port = sock.getsockname()[1]
        if not bound:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError:
        for sock in bound:
            sock.close()
        raise
    return bound


_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _bound(family: int, address: tuple[Any, ...], reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows this option has another meaning
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # otherwise "::" would bind the IPv4 port too
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
