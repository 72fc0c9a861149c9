"""Toxiproxy: links between Duetime and a server that are slow, cut, reset or half open, on demand."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from .install import go_program, once
from .server import Server, ServerError, free_port

__all__ = ["Link", "Toxiproxy"]

# Exact: the list of versions that the module proxy gives ends at an older one, so "latest" would be that.
_MODULE = "github.com/Shopify/toxiproxy/v2/cmd/server@v2.12.0"


class Toxiproxy(Server):
    """`link` makes a way to a port; `url` is the control API's."""

    name = "toxiproxy"

    def install(self) -> None:
        self._program = once("toxiproxy-2.12.0", _build) / "toxiproxy-server"

    def command(self) -> list[str]:
        return [str(self._program), "-host", "127.0.0.1", "-port", str(self.port)]

    def url(self, database: str = "") -> str:
        return f"http://127.0.0.1:{self.port}"

    def link(self, upstream_port: int) -> Link:
        """Listens on a port of its own and leads to the other one, for now without any fault."""
        port = free_port()
        link = Link(self, f"to-{upstream_port}-by-{port}", port)
        ends = {"listen": f"127.0.0.1:{port}", "upstream": f"127.0.0.1:{upstream_port}"}
        self.ask("POST", "/proxies", {"name": link.name, **ends, "enabled": True})
        return link

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The control API."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ServerError(f"toxiproxy: {method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text) if text else None


class Link:
    """A way through Toxiproxy. Faults ("toxics") hold for the connections that are open and for those to come."""

    def __init__(self, proxy: Toxiproxy, name: str, port: int):
        self.proxy = proxy
        self.name = name
        self.port = port

    def add(self, kind: str, *, upstream: bool = False, **attributes: int) -> str:
        """`latency` (latency, jitter: ms), `timeout` (timeout: ms; 0: swallow all, stay open), `reset_peer` (timeout),
        `bandwidth` (rate: KB/s), `slow_close` (delay), `limit_data` (bytes)… `upstream`: on what the client sends, else
        on what it is answered. Answers the name for `remove`. Removing a `timeout` closes connections, heals none.
        """
        stream = "upstream" if upstream else "downstream"
        toxic = {"type": kind, "stream": stream, "toxicity": 1.0, "attributes": attributes}
        return str(self.proxy.ask("POST", f"/proxies/{self.name}/toxics", toxic)["name"])

    def remove(self, toxic: str) -> None:
        self.proxy.ask("DELETE", f"/proxies/{self.name}/toxics/{toxic}")

    def cut(self) -> None:
        """Closes all connections and refuses new ones, until `mend`."""
        self.proxy.ask("POST", f"/proxies/{self.name}", {"enabled": False})

    def mend(self) -> None:
        self.proxy.ask("POST", f"/proxies/{self.name}", {"enabled": True})

    def close(self) -> None:
        self.proxy.ask("DELETE", f"/proxies/{self.name}")


def _build(folder: Path) -> None:
    go_program(_MODULE, folder).rename(folder / "toxiproxy-server")
