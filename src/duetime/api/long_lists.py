"""Long lists of timers: their items are found slice by slice, so that other requests can run meanwhile."""

from __future__ import annotations

import re
from collections.abc import Generator

import msgspec
from msgspec import Raw

from duetime.api.decode_json import STEP_BYTES, Body, decoded_whole
from duetime.errors import InvalidField

__all__ = ["split_list"]

_LIST_BEGINS = re.compile(rb'[ \t\r\n]*+\{[ \t\r\n]*+"timers"[ \t\r\n]*+:[ \t\r\n]*+\[')
# The text up to the next bracket, in a slice without escapes; at the level of the list also up to the next comma.
_TO_BRACKET = re.compile(rb'[^"\[\]{}]*+(?:"[^"]*+"[^"\[\]{}]*+)*+')
_TO_BRACKET_OR_COMMA = re.compile(rb'[^"\[\]{},]*+(?:"[^"]*+"[^"\[\]{},]*+)*+')
_raw = msgspec.json.Decoder(Raw)


def split_list(body: bytes, count_max: int) -> Generator[int, None, list[Body]]:
    """The items of `{"timers": [...]}`, found slice by slice. Only the end of each item is looked for; then the item is
    checked to be JSON. Stops when there are more than `count_max`."""
    begins = _LIST_BEGINS.match(body[:STEP_BYTES])
    if begins is None:
        raise InvalidField("timers", 'the body must be {"timers": [...]}')
    finder = ItemFinder(begins.end(), count_max)
    items: list[Body] = []
    position = begins.end()
    while not finder.at_end:
        if position >= len(body):
            raise InvalidField(None, "the body is not valid JSON: it is truncated")
        end = min(position + STEP_BYTES, len(body))
        done = end - position
        found = finder.find(body[position:end], position)
        for start, stop in found:
            item = body[start:stop].strip()
            if not item and len(found) == 1 and finder.at_end and not items:
                break  # an empty list
            if len(item) > STEP_BYTES:
                yield done
                done = len(item)
            decoded_whole(_raw, item)
            items.append(item)
            if len(items) > count_max:
                return items
        yield done
        position = end
    rest = body[finder.item_start : finder.item_start + STEP_BYTES].strip()
    if rest != b"}" or len(body) - finder.item_start > STEP_BYTES:
        raise InvalidField(None, "the body is not valid JSON: only } may follow the list of timers")
    return items


class ItemFinder:
    """Finds where the items of a list end. Knows the state between two slices: nesting, strings and escapes."""

    def __init__(self, item_start: int, count_max: int) -> None:
        self.item_start = item_start  # at the end: where the text after the list starts
        self._count_max = count_max
        self.at_end = False
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next slice begins with an escaped byte

    def find(self, part: bytes, offset: int) -> list[tuple[int, int]]:
        """The positions of the items that end in this slice, which begins at `offset`. Of thousands, only one more than
        allowed."""
        part = self._without_escapes(part)
        found: list[tuple[int, int]] = []
        position, depth = 0, self._depth
        if self._in_string:
            position = part.find(b'"') + 1
            if not position:
                return found
            self._in_string = False
        while True:
            match = (_TO_BRACKET if depth else _TO_BRACKET_OR_COMMA).match(part, position)
            position = match.end() if match else position  # it always matches, at least the empty text
            if position == len(part):
                break
            byte = part[position]
            if byte == 0x22:  # a string that does not end in this slice
                self._in_string = True
                break
            position += 1
            if byte in b"[{":
                depth += 1
            elif depth:
                depth -= byte != 0x2C
            else:
                found.append((self.item_start, offset + position - 1))
                self.item_start = offset + position
                if len(found) > self._count_max:
                    break
                if byte == 0x7D:
                    raise InvalidField(None, "the body is not valid JSON: the list of timers ends with }")
                if byte == 0x5D:
                    self.at_end = True
                    break
        self._depth = depth
        return found

    def _without_escapes(self, part: bytes) -> bytes:
        """As long as before, but every quotation mark in it begins or ends a string."""
        if self._escaped:
            part = b"_" + part[1:]
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = part.endswith(b"\\")
        return part
