"""What a server listens with: a socket for each address of a host, bound before any of them listens, and the
certificate for TLS."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from typing import Any

from duetime.clock import SystemClock
from duetime.errors import SetupError
from duetime.http.certificates import expires_at_ms

__all__ = ["WARN_DAYS", "TlsFiles", "bind_sockets"]

log = logging.getLogger("duetime.http")

WARN_DAYS = 14
_DAY_MS = 24 * 3_600 * 1_000


class TlsFiles:
    """The files of a certificate and its key, and the context made from them. New files are used for new connections;
    existing connections keep what they agreed on."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._loaded = self._versions()
        self._warned_at_ms = 0
        self.context = self._new_context()

    def reload_if_changed(self) -> bool:
        """Load the files again if they have changed. Files that cannot be used are logged once, and the last good ones
        stay in use."""
        versions = self._versions()
        reloaded = versions != self._loaded and self.reload(versions)
        if reloaded:
            self._warned_at_ms = 0
        self.warn_before_end(SystemClock().wall_ms())
        return reloaded

    def warn_before_end(self, now_ms: int) -> None:
        """Log once a day that the certificate ends soon, or has ended."""
        end_ms = expires_at_ms(self._files[0]) if now_ms - self._warned_at_ms >= _DAY_MS else None
        if end_ms is not None:
            self._warned_at_ms = now_ms
            if end_ms - now_ms < WARN_DAYS * _DAY_MS:
                days = -(-(end_ms - now_ms) // _DAY_MS)
                when = f"ends within {days} day{'s' * (days != 1)}" if end_ms > now_ms else "has ended"
                log.warning("the TLS certificate %s %s: renew it, or clients refuse it", self._files[0], when)

    def reload(self, versions: tuple[Any, ...] | None = None) -> bool:
        self._loaded = self._versions() if versions is None else versions
        try:
            self._new_context()  # first into another one: half loaded files would break the one in use
            self.context.load_cert_chain(*self._files)
        except (SetupError, OSError) as error:
            log.error("cannot load the TLS certificate again; the one loaded before stays in use: %s", error)
            return False
        log.info("loaded the TLS certificate %s", self._files[0])
        return True

    def _new_context(self) -> ssl.SSLContext:
        certificate, key = self._files
        for path, setting in ((certificate, "server.tls_certificate"), (key, "server.tls_key")):
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise SetupError(f"{setting}: {path}: {error.strerror}", field=setting) from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a passphrase must not make the server ask for it on the terminal.
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            reason = str(error)
            if "MISMATCH" in reason:
                reason = "the key does not belong to the certificate"
            elif "PEM" in reason:
                reason = f"one of the files does not have what it must have, in PEM format ({reason})"
            raise SetupError(f"server.tls_certificate {certificate} and server.tls_key {key}: {reason}") from None
        return context

    def _versions(self) -> tuple[Any, ...]:
        return tuple(_version(path) for path in self._files)


def _version(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; remove it with `openssl pkey`, and protect the file instead")


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
