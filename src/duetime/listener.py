"""The listeners of an instance: its own, which is bound before anything else, and the address it shares with other
workers, on which it listens only while it can serve."""

from __future__ import annotations

import asyncio
import socket

from duetime.addresses import split_listen, worker_listen
from duetime.api.dispatch import TEXT
from duetime.cluster.peer_protocol import REFUSED
from duetime.config import Config
from duetime.descriptors import Sizes
from duetime.errors import NotReady, SetupError
from duetime.http.listeners import TlsFiles, bind_sockets
from duetime.http.messages import Request, Response, problem_response
from duetime.http.server import HttpServer, Listener, serve_http

__all__ = ["InstanceListener", "bind_listener"]


class InstanceListener:
    """A component. From its start until the API is set as `handler` of the server, requests are answered with 503.
    `worker`: the number of this instance, from 1, if several share `server.listen`."""

    name = "the listener"
    failed: asyncio.Event | None = None

    def __init__(self, config: Config, sizes: Sizes, worker: int | None) -> None:
        self._config = config
        self._sizes = sizes
        self._worker = worker
        self._shared: list[socket.socket] | list[Listener] = []
        self._server: HttpServer | None = None

    @property
    def server(self) -> HttpServer:
        assert self._server is not None, "not started"
        return self._server

    @property
    def port(self) -> int:
        """Of the address at which other instances reach this one."""
        return self.server.port

    @property
    def address(self) -> tuple[str, int]:
        """Where clients reach it: for a worker, the address that it shares with others."""
        host, _, port = self._config.server.listen.rpartition(":")
        return host, int(port) if self._worker is not None else self.server.port

    async def start(self) -> None:
        config = self._config.server
        own = config.listen
        if self._worker is not None:
            self._shared = bind_listener(config.listen, reuse_port=True)
            own = worker_listen(config.listen, self._config.cluster.worker_ports, self._worker)
        sockets = bind_listener(own)
        try:
            self._server = await serve_http(
                _unreachable,
                admit=_not_ready,
                sockets=sockets,
                body_bytes_max=config.request_bytes_max,
                connections_max=config.connections_max,
                connections_per_address_max=config.connections_per_address_max,
                buffered_bytes_max=config.buffered_bytes_max,
                tls=TlsFiles(config.tls_certificate, config.tls_key) if config.tls_certificate else None,
                idle_timeout_ms=config.idle_timeout.ms,
                backlog=self._sizes.backlog,
                handshakes_max=self._sizes.handshakes_max,
            )
        except OSError as error:  # another process bound it at the same time and listened first
            for sock in sockets:
                sock.close()
            raise _cannot_listen(config.listen, error) from None

    async def listen_on_shared(self) -> None:
        self._shared = await self.server.listen_on(self._shared)  # type: ignore[arg-type]

    def close_shared(self) -> None:
        """The other workers still listen on it."""
        while self._shared:
            self._shared.pop().close()

    async def drain(self) -> None:
        """Called when all that could answer requests has drained."""
        self.close_shared()
        if self._server is not None:
            await self._server.close(self._config.server.drain_timeout.ms)

    async def stop(self) -> None:
        pass

    def not_ready(self) -> str | None:
        return None

    def reload_certificate(self) -> None:
        """Use the files of the TLS certificate as they are now, for new connections."""
        if self._server is not None and self._server.tls is not None:
            self._server.tls.reload()


async def _unreachable(request: Request) -> Response:
    raise AssertionError("every request is answered by _not_ready")


def _not_ready(request: Request) -> Response:
    """Answers requests until the engine has started, without their bodies."""
    if request.path == "/healthz":
        return Response(200, b"alive\n", TEXT)
    later = (("retry-after", str(NotReady.retry_after_seconds)),)
    if request.path == "/readyz":
        return Response(503, b"not ready: starting\n", TEXT, later)
    refused = (*later, (REFUSED, "not carried out"))
    return problem_response(503, NotReady.code, "this instance is starting; nothing was applied", refused)


def bind_listener(listen: str, *, reuse_port: bool = False) -> list[socket.socket]:
    """Binds the sockets of a "host:port"."""
    try:
        return bind_sockets(*split_listen(listen), reuse_port=reuse_port)
    except OSError as error:
        raise _cannot_listen(listen, error) from None


def _cannot_listen(listen: str, error: OSError) -> SetupError:
    return SetupError(f"cannot listen on {listen}: {error.strerror or error}")
