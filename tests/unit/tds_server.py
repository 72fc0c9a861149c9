"""A server that speaks as much of SQL Server's protocol (TDS 7.4) as its driver asks for, and answers as it is told.

It knows no SQL. It is for what only a driver can show: which exception an error becomes, and what is known when an
answer does not come.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

Answer = Callable[[str], bytes | None]
"""Of what was said: what to send; None: hang up; nothing: say nothing, and take what comes next."""

_PRELOGIN, _LOGIN, _BATCH, _RPC, _ATTENTION = 0x12, 0x10, 0x01, 0x03, 0x06
_PREPARE_AND_EXECUTE, _UNPREPARE = 13, 15  # sp_prepexec, sp_unprepare
_DONE, _ERROR, _ENVCHANGE, _LOGIN_ACK, _COLUMNS, _ROW = b"\xfd", b"\xaa", b"\xe3", b"\xad", b"\x81", b"\xd1"


def done(status: int = 0) -> bytes:
    return _DONE + struct.pack("<HHQ", status, 0, 0)


def more() -> bytes:
    return done(0x11)  # a row was met, and another result follows


def error(number: int, text: str, severity: int = 16) -> bytes:
    said = struct.pack("<H", len(text)) + text.encode("utf-16le")
    body = struct.pack("<iBB", number, 1, severity) + said + _short("stand-in") + _short("") + struct.pack("<i", 1)
    return _ERROR + struct.pack("<H", len(body)) + body


def failed(number: int, text: str, severity: int = 16) -> bytes:
    return error(number, text, severity) + done(0x02)


def numbers(*rows: tuple[int, ...]) -> bytes:
    """A result of bigints."""
    column = struct.pack("<IH", 0, 8) + b"\x7f"
    head = _COLUMNS + struct.pack("<H", len(rows[0])) + b"".join(column + _short(f"c{n}") for n in range(len(rows[0])))
    return head + b"".join(_ROW + struct.pack(f"<{len(row)}q", *row) for row in rows)


def null() -> bytes:
    """A result of one column and one row, which is NULL."""
    return _COLUMNS + struct.pack("<H", 1) + struct.pack("<IH", 0, 9) + b"\x26\x08" + _short("c0") + _ROW + b"\x00"


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("utf-16le")


def _change(kind: int, new: str) -> bytes:
    body = bytes([kind]) + _short(new) + _short("")
    return _ENVCHANGE + struct.pack("<H", len(body)) + body


def _welcome() -> bytes:
    acknowledged = b"\x01\x74\x00\x00\x04" + _short("Microsoft SQL Server") + b"\x10\x00\x10\x64"
    collation = _ENVCHANGE + struct.pack("<H", 8) + b"\x07\x05\x09\x04\xd0\x00\x34\x00"
    return (
        _change(1, "test") + collation + _LOGIN_ACK + struct.pack("<H", len(acknowledged)) + acknowledged
        + _change(4, "4096") + done()
    )  # fmt: skip


def _prelogin() -> bytes:
    """No encryption, no instance, no more than one thing at a time."""
    options = [(0, b"\x10\x00\x10\x64\x00\x00"), (1, b"\x02"), (2, b"\x00"), (3, b""), (4, b"\x00")]
    start, heads, data = 5 * len(options) + 1, b"", b""
    for number, value in options:
        heads += struct.pack(">BHH", number, start + len(data), len(value))
        data += value
    return heads + b"\xff" + data


class TdsServer:
    """`said`: everything, in order; the text of a batch, or of what a call carries. `prepared`: the handles of
    statements that it was told to remember, and not yet to forget.

    `attention`: whether it confirms the signal to stop, as a server has to.
    """

    def __init__(self, answer: Answer, login: bytes | None = None, *, attention: bool = True) -> None:
        self.answer, self.login, self.attention = answer, login or _welcome(), attention
        self.said: list[str] = []
        self.prepared: set[int] = set()
        self._handles = itertools.count(1)
        self._links: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hangs up on whoever still waits for an answer."""
        self._socket.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def url(self) -> str:
        return f"sqlserver://me:secret@127.0.0.1:{self.port}/test?encrypt=no"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._socket.accept()
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, EOFError):
            while (answer := self._reply(*_message(link))) is not None:
                _send(link, answer)

    def _reply(self, kind: int, body: bytes) -> bytes | None:
        if kind == _PRELOGIN:
            return _prelogin()
        if kind == _LOGIN:
            return self.login
        if kind == _ATTENTION:
            return done(0x20) if self.attention else b""
        body = body[struct.unpack("<I", body[:4])[0] :]
        procedure, handle = _call(body) if kind == _RPC else (0, 0)
        self.prepared.discard(handle)
        if procedure == _UNPREPARE:
            return _as_call(done())
        said = _text(kind, body)
        self.said.append(said)
        answer = self.answer(said)
        if kind == _BATCH or not answer:
            return answer
        if procedure != _PREPARE_AND_EXECUTE:
            return _as_call(answer)
        handle = next(self._handles)
        self.prepared.add(handle)
        return _as_call(answer, handle)


def _call(body: bytes) -> tuple[int, int]:
    """The number of a system procedure that is called by it, and the handle of a statement that it is given, or 0."""
    marker, procedure = struct.unpack("<HH", body[:4])
    if marker != 0xFFFF or procedure not in (_PREPARE_AND_EXECUTE, _UNPREPARE):
        return 0, 0
    length = body[10]  # after the options, the name and the state of the first parameter, and its type
    return procedure, struct.unpack("<i", body[11:15])[0] if length else 0


def _as_call(answer: bytes, handle: int | None = None) -> bytes:
    """A call is answered with its return value, and ends as one."""
    returned = b"\x79\0\0\0\0"
    if handle is not None:
        returned += b"\xac\0\0\0\x01" + struct.pack("<IH", 0, 0) + b"\x26\x04\x04" + struct.pack("<i", handle)
    return answer[:-13] + returned + b"\xfe" + answer[-12:]


def _text(kind: int, body: bytes) -> str:
    """Of a call, where nothing says how its texts are aligned, both ways to read it."""
    if kind == _BATCH:
        return body.decode("utf-16le", "replace")
    return body.decode("utf-16le", "replace") + body[1:].decode("utf-16le", "replace")


def _message(link: socket.socket) -> tuple[int, bytes]:
    body = b""
    while True:
        kind, status, length = struct.unpack(">BBH", _exactly(link, 8)[:4])
        body += _exactly(link, length - 8)
        if status & 1:
            return kind, body


def _exactly(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = link.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _send(link: socket.socket, body: bytes) -> None:
    while body:
        part, body = body[:4_000], body[4_000:]
        link.sendall(struct.pack(">BBHHBB", 4, 0 if body else 1, len(part) + 8, 0, 1, 0) + part)
