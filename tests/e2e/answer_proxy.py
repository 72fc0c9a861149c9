"""A proxy between a client and a real server that loses answers on demand: the server has carried the request out, and
the client sees a broken connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

__all__ = ["AnswerProxy"]


class AnswerProxy:
    """Listens on a port of its own and passes everything on to `to_port`."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._to_lose = 0
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.lost: list[bytes] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.close()
        for connection, writer in self._connections.items():
            writer.close()  # also if the task is cancelled before its first step
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def lose_answers(self, count: int = 1) -> None:
        """The next answers do not arrive: the connection breaks instead."""
        self._to_lose = count

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to_port)
            asking = asyncio.create_task(self._pass_on(reader, to_server))
            try:
                await self._pass_answers(from_server, writer)
            finally:
                asking.cancel()
                to_server.close()
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self._to_lose:
                    self._to_lose -= 1
                    self.lost.append(data)
                    return
                writer.write(data)
                await writer.drain()
