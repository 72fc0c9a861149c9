"""Checks who may read the files that have secrets: the configuration file, "file:" values, the key of the server."""

from __future__ import annotations

import os
import shlex
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duetime.cli.diagnosis import GOOD, NOTE, Finding
from duetime.config import Config
from duetime.printable import redacted_url

__all__ = ["check_secret_files"]


def check_secret_files(configuration: str | None, config: Config | None) -> Iterator[Finding]:
    """`configuration`: the path of the configuration file, if there is one."""
    checked = 0
    for path, what in _secret_files(configuration, config).items():
        readers = _other_readers(path)
        checked += 1
        if readers:
            yield Finding(
                "secrets",
                NOTE,
                f"{path} has {what} and can be read by {readers}",
                "they can use it, and read or change all timers with it",
                f"chmod 600 {shlex.quote(path)}; if the server has another user than the owner: chown first",
            )
            checked -= 1
    if checked:
        yield Finding("secrets", GOOD, "files with secrets can be read only by their owners")


def _secret_files(configuration: str | None, config: Config | None) -> dict[str, str]:
    found: dict[str, str] = {}
    if configuration:
        url = _value(configuration, "store", "url")
        if url.startswith("file:"):
            path = url.removeprefix("file:")
            if _has_secret(_text(path)):
                found[path] = "the password of the store"
        elif _has_secret(url):
            found[configuration] = "the password of the store"
    url = os.environ.get("DUETIME_STORE_URL", "")
    if url.startswith("file:") and _has_secret(_text(url.removeprefix("file:"))):
        found[url.removeprefix("file:")] = "the password of the store"
    if config is not None and config.server.tls_key:
        found[config.server.tls_key] = "the key of the server's certificate"
    return found


def _has_secret(url: str) -> bool:
    return redacted_url(url) != url


def _value(path: str, section: str, key: str) -> str:
    try:
        found: Any = tomllib.loads(_text(path)).get(section, {}).get(key, "")
    except (tomllib.TOMLDecodeError, AttributeError):  # reported as a finding about the configuration
        return ""
    return found if isinstance(found, str) else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _other_readers(path: str) -> str:
    """Who besides the owner may read a file; "": nobody, or it cannot be found out."""
    if os.name != "posix":  # there the mode says nothing
        return ""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return ""
    readers = [name for name, bit in (("its group", stat.S_IRGRP), ("every user", stat.S_IROTH)) if mode & bit]
    return " and ".join(readers)
