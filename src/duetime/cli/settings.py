"""config show; and the configuration that the options of `serve`, `doctor` and `config show` give."""

from __future__ import annotations

import difflib
import sys
import tomllib
from argparse import Namespace as Arguments
from importlib.resources import files
from typing import Any

import msgspec

from duetime.cli.output import print_line, print_table, to_json
from duetime.config import RENAMED, Config, load_config, shown
from duetime.errors import SetupError
from duetime.printable import printable_lines

__all__ = ["config_from", "show_config"]


def config_from(arguments: Arguments) -> Config:
    """The configuration of this command: its flags override the environment, the environment overrides the file."""
    flags: dict[str, Any] = {}
    if arguments.store is not None:
        flags["store.url"] = arguments.store
    if arguments.listen is not None:
        flags["server.listen"] = arguments.listen
    if arguments.workers is not None:
        flags["server.workers"] = arguments.workers
    for text in arguments.set:
        path, equals, value = text.partition("=")
        if not equals:
            raise SetupError(f"--set {text}: must be SECTION.KEY=VALUE")
        flags[path] = _typed(path, value)
    return load_config(arguments.config, flags=flags)


def _typed(path: str, text: str) -> Any:
    """The text of a flag, converted to the type of its default. Lists and tables are written as JSON."""
    section, _, key = path.partition(".")
    default = _defaults().get(section, {}).get(key)
    if default is None:
        raise SetupError(f"--set {path}: {_unknown(path)}")
    if isinstance(default, str):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise SetupError(f"--set {path}: must be {type(default).__name__}, got {text!r}") from None


def _unknown(path: str) -> str:
    if path in RENAMED:
        return f"is now named {RENAMED[path]}"
    known = [f"{section}.{key}" for section, keys in _defaults().items() for key in keys]
    nearest = difflib.get_close_matches(path, known, n=1)
    return (
        f"no such setting; {f'did you mean {nearest[0]}?' if nearest else '`duetime config show` lists all settings'}"
    )


def _defaults() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("duetime").joinpath("config.default.toml").read_text("utf-8"))


def show_config(arguments: Arguments) -> int:
    config = config_from(arguments)
    for warning in config.warnings:
        print_line(f"warning: {warning}", file=sys.stderr)  # standard output is for programs
    text = shown(config)
    settings = tomllib.loads(text)
    if arguments.env:
        variables = {f"DUETIME_{s}_{k}".upper(): v for s, keys in settings.items() for k, v in keys.items()}
        if arguments.json:
            print_line(to_json(variables))
        else:
            print_table(["variable", "value in force"], [(name, to_json(v)) for name, v in variables.items()])
    elif arguments.json:
        print_line(to_json(settings))
    else:
        print(printable_lines(text), end="")
    return 0
