"""What may be printed: characters that a terminal would obey are escaped, and passwords in store URLs never appear."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable

import pytest

from duetime.config import Config, load_config, shown
from duetime.errors import SetupError
from duetime.printable import printable, printable_json, printable_lines, redacted_url
from duetime.process import store_name
from duetime.store import open_store

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
UNSEEN = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in _UNSEEN]


def test_every_control_bidi_and_format_character_is_escaped() -> None:
    for character in UNSEEN:
        escaped = printable(f"a{character}b")
        assert character not in escaped
        assert escaped.isprintable(), hex(ord(character))


def test_text_that_can_be_seen_is_left_as_it_is() -> None:
    assert printable("Grüße, 東京 ✓ 'a\"b\\'") == "Grüße, 東京 ✓ 'a\"b\\'"
    assert printable("\x1b[31m\x07\x9b\u202e\n") == "\\x1b[31m\\x07\\x9b\\u202e\\n"


def test_lines_are_kept_where_there_may_be_several() -> None:
    assert printable_lines("Traceback\n  \x1b[2J\r") == "Traceback\n  \\x1b[2J\\r"


def test_escaped_json_has_the_same_value() -> None:
    value = {"id": "".join(c for c in UNSEEN if unicodedata.category(c) != "Cs"), "Zoë": [1, "\x7f\x85"]}
    escaped = printable_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(escaped) == value
    assert all(c.isprintable() or c == "\n" for c in escaped)
    assert "Zoë" in escaped


# --- passwords -----------------------------------------------------------------------------------

SCHEMES = {
    "postgresql": "password",
    "mysql": "ssl-key-password",
    "mariadb": "pwd",
    "tidb": "password",
    "mongodb": "tlsCertificateKeyFilePassword",
    "cassandra": "sslpassword",
    "dynamodb": "aws_secret_access_key",
    "oracle": "wallet_password",
    "sqlserver": "PWD",
}
HOSTS = {"dynamodb": "eu-central-1"}
WORD = "0123456789abcdefghijklmnopqrstuvwxyzABCDEF"
MARKS = "?/#@:&=%[]+;,!$'()*~|{}<>^`\\\" "


def some_password(rng: random.Random, marks: str) -> tuple[str, list[str]]:
    """A password of words with special characters between them, and the words. Some words begin like options."""
    words = ["".join(rng.choices(WORD, k=9)) for _ in range(rng.randint(1, 4))]
    password = words[0]
    for word in words[1:]:
        password += "".join(rng.choices(marks, k=rng.randint(1, 3))) + word
    return password, words


def printed(url: str) -> dict[str, str]:
    """Everything that is printed of a store URL before there is a connection."""
    told = {"redacted": redacted_url(url)}
    try:
        config: Config = load_config(environ={}, flags={"store.url": url})
        told |= {"config show": shown(config), "serving": store_name(config)}
        store = open_store(url)
        told |= {"store": repr(store), "address": repr(getattr(store, "_address", ""))}
    except SetupError as error:
        told["error"] = f"{error} {error.field}"
    return told


def in_login(scheme: str, password: str) -> str:
    return f"{scheme}://user:{password}@{HOSTS.get(scheme, 'db.internal')}/duetime"


def in_login_with_options(scheme: str, password: str) -> str:
    return f"{in_login(scheme, password)}?schema=public&sslmode=require"


def in_option(scheme: str, password: str) -> str:
    return f"{scheme}://{HOSTS.get(scheme, 'db.internal')}/duetime?{SCHEMES[scheme]}={password}"


def without_host(scheme: str, password: str) -> str:
    return f"{scheme}://user:{password}"


def without_slashes(scheme: str, password: str) -> str:
    return f"{scheme}:user:{password}@db.internal/duetime"


@pytest.mark.parametrize(
    ("form", "marks"),
    [
        (in_login, MARKS),
        (in_login_with_options, MARKS),
        (in_option, "".join(sorted(set(MARKS) - set("&;#")))),  # there these end the option
        (without_host, "!$'()*~|{}<>^`"),
        (without_slashes, MARKS),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_part_of_a_password_is_printed(scheme: str, form: Callable[[str, str], str], marks: str) -> None:
    rng = random.Random(f"{scheme} {form.__name__}")
    for _ in range(150):
        password, words = some_password(rng, marks)
        url = form(scheme, password)
        for where, text in printed(url).items():
            for word in words:
                assert word not in text, f"{where} of {url}: {text}"


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("postgresql://u:pa/s#s@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p?a/s#s@h/db", "postgresql://***"),
        ("postgresql://h/db?pwd=x&sslmode=require", "postgresql://h/db?pwd=***&sslmode=require"),
        ("postgresql://h/db?sslpassword=a&b", "postgresql://h/db?sslpassword=***&***"),
        ("postgresql://h/db?p%61ssword=a", "postgresql://h/db?p%61ssword=***"),
        ("dynamodb://eu/t?endpoint=http://u:p", "dynamodb://eu/t?endpoint=http://u:***"),
        ("postgresql://u:secret", "postgresql://u:***"),
        ("user:secret@host/db", "user:***"),
        ("mongodb://a:1,b:2/x?replicaSet=r", "mongodb://a:1,b:2/x?replicaSet=r"),
        ("postgresql://u:p@[::1]:5432/x", "postgresql://u:***@[::1]:5432/x"),
        ("sqlite:////data/a@b:c.db", "sqlite:////data/a@b:c.db"),
        ("sqlite:///a.db?password=x", "sqlite:///a.db?password=***"),
        ("memory://", "memory://"),
    ],
)
def test_what_is_no_secret_is_shown(url: str, redacted: str) -> None:
    assert redacted_url(url) == redacted
