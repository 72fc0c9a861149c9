"""serve, config show, token new: what an operator needs on the machine of the server."""

from __future__ import annotations

import hashlib
import secrets
import sys
import tomllib
from argparse import Namespace as Arguments
from importlib.resources import files
from typing import Any

import msgspec

from duetime.cli.screen import json_line, show_table
from duetime.config import Config, load_config, shown
from duetime.errors import SetupError

__all__ = ["configured", "new_token", "serve", "show_config"]


def serve(arguments: Arguments) -> int:
    config = configured(arguments)
    if config.server.workers > 1:
        from duetime.supervisor import run_workers

        return run_workers(config)
    from duetime.app import run  # pulls in the whole server

    return run(config)


def configured(arguments: Arguments) -> Config:
    """The configuration in force for this command line: file, environment, then its flags."""
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
            raise SetupError(f"--set {text}: write it as SECTION.KEY=VALUE")
        flags[path] = _typed(path, value)
    return load_config(arguments.config, flags=flags)


def _typed(path: str, text: str) -> Any:
    """A flag's text as the type its default has; lists and tables are written as JSON."""
    section, _, key = path.partition(".")
    default = _defaults().get(section, {}).get(key)
    if default is None:
        raise SetupError(f"--set {path}: no such setting; `duetime config show` lists them")
    if isinstance(default, str):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise SetupError(f"--set {path}: must be {type(default).__name__}, got {text!r}") from None


def _defaults() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("duetime").joinpath("config.default.toml").read_text("utf-8"))


def show_config(arguments: Arguments) -> int:
    config = configured(arguments)
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)  # programs read standard output
    text = shown(config)
    settings = tomllib.loads(text)
    if arguments.env:
        variables = {f"DUETIME_{s}_{k}".upper(): v for s, keys in settings.items() for k, v in keys.items()}
        if arguments.json:
            print(json_line(variables))
        else:
            show_table(["variable", "value in force"], [(name, json_line(v)) for name, v in variables.items()])
    elif arguments.json:
        print(json_line(settings))
    else:
        print(text, end="")
    return 0


def new_token(arguments: Arguments) -> int:
    token = "dt_" + secrets.token_urlsafe(32)
    entry = {"name": arguments.name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    entry |= {"namespaces": arguments.namespace, "verbs": arguments.verb}
    if arguments.json:
        print(json_line({"token": token, "config": entry}))
        return 0
    print("The token, shown only this once; hand it to the client (DUETIME_TOKEN):\n")
    print(f"  {token}\n")
    print("What the server's configuration file needs:\n")
    print("[[auth.tokens]]")
    for key, value in entry.items():
        if value:
            print(f"{key} = {json_line(value)}")
    return 0
