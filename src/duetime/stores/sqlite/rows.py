"""Rows of SQLite: their columns, and how results are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import apsw
import msgspec

from duetime.stores.rows import (
    DEFAULT_ROW_READER,
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    RowReader,
    reached_of,
    timer_of,
)

T = TypeVar("T")

KEY = ", ".join(KEY_COLUMNS)
TIMER = f"json_array({', '.join(TIMER_COLUMNS)})"
REACHED = f"json_array({', '.join(REACHED_COLUMNS)})"


def limited(row: str, *more: str) -> str:
    """The columns. Instead of a payload of more than :inline bytes NULL, and its length at the end, before `more`.
    SQLite does not read the pages of a payload for its length."""
    without = row.removesuffix(")").replace("timer_payload", "NULL")
    return (
        f"CASE WHEN octet_length(timer_payload) > :inline THEN {', '.join((without, _LENGTH, *more))}) ELSE {row} END"
    )


_LENGTH = "octet_length(timer_payload)"

decode_rows = msgspec.json.Decoder(list[list[Any]]).decode


def read_text(db: apsw.Connection, sql: str, bindings: tuple[Any, ...] | dict[str, Any]) -> str:
    """The result of a statement that returns one text. In one step: `.get` would read on for a second row."""
    [text] = cast(tuple[str], db.execute(sql, bindings).fetchone())
    return text


# SQLite does not check that a text is UTF-8. One text that is not makes the whole result undecodable. Then the result
# is fetched as bytes, and texts that are not UTF-8 are marked: they are decoded with surrogates, which valid texts do
# not have.


def read_rows(
    db: apsw.Connection, sql: str, bindings: tuple[Any, ...] | dict[str, Any]
) -> tuple[list[list[Any]], RowReader]:
    """The rows of a result, and how to decode them."""
    try:
        return decode_rows(read_text(db, sql, bindings)), DEFAULT_ROW_READER
    except UnicodeDecodeError:
        [answer] = cast(tuple[bytes], db.execute(f"SELECT CAST(answer AS BLOB) FROM ({sql})", bindings).fetchone())  # noqa: S608
        return decode_with_marks(answer), MARKED_ROW_READER


def decode_with_marks(answer: bytes) -> list[Any]:
    return list(json.loads(answer.decode(errors="surrogateescape")))


def _check_unmarked(row: list[Any]) -> list[Any]:
    for value in row:
        if isinstance(value, str):
            value.encode()
    return row


def _name(row: list[Any]) -> tuple[Any, Any]:
    return tuple(None if not isinstance(text, str) or _is_marked(text) else text for text in row[3:5])  # type: ignore[return-value]


def _is_marked(text: str) -> bool:
    return text.encode(errors="ignore") != text.encode(errors="surrogatepass")


MARKED_ROW_READER: Final = RowReader(
    timer=lambda row: timer_of(_check_unmarked(row)), reached=lambda row: reached_of(_check_unmarked(row)), key=_name
)


def shorter_if_too_big(fetch: Callable[[int], T], count: int) -> tuple[T, int]:
    """Halves `count` until the result is not too large. Returns the result and the count."""
    while True:
        try:
            return fetch(count), count
        except apsw.TooBigError:
            if count == 1:
                raise
            count //= 2
