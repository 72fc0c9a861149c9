"""The parts that the commands are built of: the parser, the types of values, and options that several commands have."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated options (otherwise a new option could break a script), and does not reflow examples."""

    def __init__(self, **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**options)
        # Read "-5s" as the value of an option: no option begins with a digit.
        self._negative_number_matcher = re.compile(r"-\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports an unknown option with the usage of its command; argparse would show the usage of `duetime`."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}{_suggestion(unknown[0], self._option_string_actions)}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = _suggestion(str(value), action.choices) or f"; allowed: {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"unknown: {value!r}{known}")

    def error(self, message: str) -> Any:
        raise ParseError(message.removeprefix("argument "), self)


class ParseError(SystemExit):
    """A command line that cannot be parsed: the reason, and the usage of the command in one line."""

    def __init__(self, detail: str, parser: argparse.ArgumentParser) -> None:
        super().__init__(2)
        self.detail = detail
        places = [str(action.metavar or action.dest) for action in parser._actions if not action.option_strings]
        self.usage = f"usage: {' '.join([parser.prog, *places, '[options]'])}; `{parser.prog} --help` shows all options"


def _suggestion(typed: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(typed.partition("=")[0], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


Commands = Any  # the type in argparse is private


# --- values --------------------------------------------------------------------------------------


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        range_said = f"between {least} and {most}" if most is not None else f"of at least {least}"
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {range_said}, not {text}")
        return value

    return read


def or_none(read: Callable[[str], float]) -> Callable[[str], Any]:
    """ "none" clears the setting. argparse would take a plain None for an option that was left out."""

    def read_or_none(text: str) -> Any:
        if text == "none":
            return "none"
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number or none, not {text}") from None

    return read_or_none


port_number = number(0, 65_535)


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, as in 127.0.0.1:8463, not {text}")
    try:
        port_number(port)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"the port {error}") from None
    return text


def _store_url(text: str) -> str:
    if not re.match(r"\w[\w+.-]+:", text):
        raise argparse.ArgumentTypeError(f"must be a URL; for the file {text} write sqlite:///{text}")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return value


# --- commands and their options ------------------------------------------------------------------


def add_group(commands: Commands, name: str, help: str, example: str) -> Commands:
    parser = commands.add_parser(name, help=help, description=f"{help.capitalize()}.", epilog=f"example:\n  {example}")
    parser.set_defaults(run="help:overview", overview=None, parser=parser)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=False)


def add_command(
    commands: Commands,
    name: str,
    run: str,
    help: str,
    *examples: str,
    more: str = "",
    server: bool = False,
    timeout: float | None = 15.0,
) -> argparse.ArgumentParser:
    """`server`: the command calls a server. `timeout`: the default of `--timeout`."""
    listed = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.{more and chr(10) * 2 + more}",
        epilog=f"example{'s' * (len(examples) > 1)}:\n{listed}",
    )
    parser.set_defaults(run=run)
    if server:
        _server_options(parser, timeout)
    return parser


def _server_options(parser: argparse.ArgumentParser, timeout: float | None) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="URL of the server (default: DUETIME_URL, or http://127.0.0.1:8463)")
    group.add_argument(
        "--token", help="access token (default: DUETIME_TOKEN, which is safer: other users can see arguments)"
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=timeout,
        metavar="SECONDS",
        help=f"stop after this many seconds (default{': no limit' if timeout is None else f' {timeout:g}'})",
    )
    group.add_argument(
        "--json", action="store_true", help="print JSON, also for errors; a list is one object per line (default: text)"
    )


def add_namespace_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the timer (default: the namespace called default)"
    )


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=os.environ.get("DUETIME_CONFIG"),
        help="configuration file, TOML (default: DUETIME_CONFIG, or none)",
    )
    parser.add_argument(
        "--store",
        type=_store_url,
        metavar="URL",
        help="database of the timers: sqlite:///relative.db, sqlite:////absolute.db, memory:// (timers are lost when "
        "it stops), or postgresql://user:password@host/database; also mysql, mariadb, tidb, mongodb, cassandra, "
        "dynamodb, oracle and sqlserver (default sqlite:///duetime.db)",
    )
    parser.add_argument(
        "--listen", type=_address, metavar="HOST:PORT", help="address of the HTTP API (default 127.0.0.1:8463)"
    )
    parser.add_argument(
        "--workers",
        type=number(1),
        metavar="N",
        help="number of processes that share the address; more than 1 needs a database other than SQLite (default 1)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting that `duetime config show` lists; repeatable",
    )


def add_retry_options(parser: argparse.ArgumentParser, description: str) -> None:
    group = parser.add_argument_group("retries", description)
    group.add_argument("--max-retries", type=int, metavar="N", help="attempts after the first (default: no limit)")
    group.add_argument(
        "--retry-from", metavar="DURATION", help="longest first pause; it doubles with each attempt (default 1s)"
    )
    group.add_argument("--retry-up-to", metavar="DURATION", help="longest pause between attempts (default 10m)")
    group.add_argument(
        "--retry-for", metavar="DURATION", help="time from the first attempt to the last retry (default 24h)"
    )
