"""What may be printed of text that others can choose: control characters are escaped, passwords in URLs are hidden.

Ids, payloads and errors come from other users. Printed as they are, they could send control sequences to the terminal
of the reader, change the direction of the text (bidi overrides), or look like further lines of output or of a log.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

__all__ = ["printable", "printable_json", "printable_lines", "redacted_url"]


def printable(text: str) -> str:
    """The text on one line, with everything escaped that is not visible: control characters (also C1), line ends, bidi
    and format characters, spaces other than U+0020, lone surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def printable_lines(text: str) -> str:
    """Like `printable`, for text of several lines, such as a traceback."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """JSON with the same characters escaped. It is the same value: outside of strings JSON has none of them except line
    ends, which are kept."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else _in_json(c) for c in text)


def _in_json(character: str) -> str:
    code = ord(character)
    if code < 0x1_0000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + ((code - 0x1_0000) >> 10):04x}\\u{0xDC00 + ((code - 0x1_0000) & 0x3FF):04x}"


# --- passwords in URLs ---------------------------------------------------------------------------

_SECRET_NAME: Final = re.compile(r"pass|pwd|secret|credential|(?:token|key)$", re.IGNORECASE)
_OPTION_NAME: Final = re.compile(r"[A-Za-z][\w.%-]{0,63}")
_PORT: Final = re.compile(r"\d*")
# Their "@" and ":" are part of a path.
_FILE_SCHEMES: Final = frozenset({"sqlite", "memory"})


def redacted_url(url: str) -> str:
    """A store URL for people. A password may contain any character, so it hides too much rather than too little:
    everything between the first ":" and the last "@"."""
    scheme, colon, rest = url.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest[len(slashes) :]
    if scheme.strip().lower() not in _FILE_SCHEMES:
        if colon and not slashes:  # not a URL: perhaps user:password@host
            return f"{scheme}:***"
        login, at, rest = rest.rpartition("@")
        if "?" in login:  # the "?" is part of a password, or the "@" part of an option, which may be a password
            return f"{scheme}:{slashes}***"
        user, has_password, _ = login.partition(":")
        if at:
            slashes += f"{user}:***@" if has_password else f"{user}@"
        else:
            rest = _without_wrong_port(rest)
    return scheme + colon + slashes + _without_secret_options(rest)


def _without_wrong_port(rest: str) -> str:
    """user:password without a host: what follows the ":" is a port only if it is a number."""
    authority, mark, more = _split_at(rest, "/?#")
    hosts = []
    for host in authority.split(","):
        name, colon, port = host.rpartition(":")
        hosts.append(host if not colon or _PORT.fullmatch(port) or host.endswith("]") else f"{name.split(':')[0]}:***")
    return ",".join(hosts) + mark + more


def _split_at(text: str, marks: str) -> tuple[str, str, str]:
    at = min((found for found in map(text.find, marks) if found >= 0), default=len(text))
    return text[:at], text[at : at + 1], text[at + 1 :]


def _without_secret_options(rest: str) -> str:
    path, mark, query = _split_at(rest, "?#")
    if not mark:
        return rest
    shown: list[str] = []
    after_secret = False
    for part in re.split(r"([&;#])", query):
        name, equals, value = part.partition("=")
        if part in ("&", ";", "#"):
            shown.append(part)
        elif equals and _SECRET_NAME.search(unquote(name)):
            shown.append(f"{name}=***")
            after_secret = True
        elif after_secret and not (equals and _OPTION_NAME.fullmatch(name)):
            shown.append("***")  # the secret had a "&" that is not encoded
        else:
            shown.append(f"{name}{equals}{redacted_url(value) if '://' in value else value}")
    return path + mark + "".join(shown)
