"""What msgspec finds wrong with a value, in the words of JSON: it names the types of Python, and the sender of JSON
knows them by other names."""

from __future__ import annotations

import re

__all__ = ["described"]

_EXPECTED = re.compile(r"Expected `([a-z |]+)`(?: ([<>]=) ([0-9.]+))?(?:, got `(\w+)`)?")
_KINDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_KINDS_FOUND = {**_KINDS, "int": "a number", "float": "a decimal number"}


def described(fault: str) -> str:
    """Continues after the name of the field. `fault`: msgspec's text without the path."""
    match = _EXPECTED.fullmatch(fault)
    if match is None:
        return f"is not valid: {fault}"
    kinds, relation, bound, found = match.groups()
    words = " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null")
    if relation is not None:
        return f"must be {words} of at {'least' if relation == '>=' else 'most'} {bound.removesuffix('.0')}"
    return f"must be {words}" + (f", not {_KINDS_FOUND.get(found, found)}" if found else "")
