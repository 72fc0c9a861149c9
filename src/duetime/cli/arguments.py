"""What can be typed: every command with its options, a description and examples. No import of the package.

Each command names the function that runs it as "file:function", so that nothing is imported before it is needed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Misuse", "build_parser"]

OVERVIEW = """\
Duetime: a durable timer service. You say what to call and when; it calls, at least once.

  duetime demo                          watch timers fire on a temporary server, in ten seconds
  duetime serve                         run a server on ./duetime.db, at http://127.0.0.1:8463
  duetime timer create tea --in 3m --to http://127.0.0.1:9000/
                                        have something called in three minutes

`duetime --help` lists all commands, `duetime COMMAND --help` explains one with examples."""

EXIT_CODES = """\
exit codes:
  0  done
  1  the operation failed: a watched timer failed, doctor or cluster status found something wrong
  2  wrong usage or configuration; no server was asked
  3  no such timer or namespace
  4  refused: invalid, in conflict, too large, or not allowed; nothing was changed
  5  no Duetime at that URL, or it cannot serve now; nothing was changed, try again
  6  outcome unknown: the write may or may not have happened
  130  interrupted
"""

ENVIRONMENT = """\
environment:
  DUETIME_URL, DUETIME_TOKEN   the server to talk to, and the token to show it
  DUETIME_CONFIG               configuration file of `serve`, `doctor` and `config show`
  NO_COLOR                     no colours
"""


class _Parser(argparse.ArgumentParser):
    """Without abbreviations (a script must not break when an option is added), examples kept as written."""

    def __init__(self, **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**options)
        # "-5s" is a wrong duration, not an option: no option here begins with a digit.
        self._negative_number_matcher = re.compile(r"-\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An unknown option is the fault of the command it was given to: argparse would leave it to `duetime`."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}{_did_you_mean(unknown[0], self._option_string_actions)}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = _did_you_mean(str(value), action.choices) or f"; there are {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}{known}")

    def error(self, message: str) -> Any:
        raise Misuse(message.removeprefix("argument "), self)


class Misuse(SystemExit):
    """A command line that cannot be understood: why, and how the command is used, in a line."""

    def __init__(self, detail: str, parser: argparse.ArgumentParser) -> None:
        super().__init__(2)
        self.detail = detail
        places = [str(action.metavar or action.dest) for action in parser._actions if not action.option_strings]
        self.usage = f"usage: {' '.join([parser.prog, *places, '[options]'])}; `{parser.prog} --help` explains"


def _did_you_mean(typed: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(typed.partition("=")[0], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


_Commands = Any  # argparse's own name for this is private


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="duetime",
        description="A durable timer service: say what to call and when; it calls, at least once.",
        epilog=f"example:\n  duetime demo\n\n{ENVIRONMENT}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(run="about:overview", overview=OVERVIEW)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _serving_commands(commands)
    _timer_commands(_group(commands, "timer", "create, look at, change and cancel timers", "duetime timer list"))
    _namespace_commands(_group(commands, "namespace", "scopes of timers and their defaults", "duetime namespace list"))
    _operating_commands(commands)
    return parser


def _version() -> str:
    from duetime import __version__

    return f"duetime {__version__}"


# --- values --------------------------------------------------------------------------------------


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
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


_port = _number(0, 65_535)


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, as in 127.0.0.1:8463, not {text}")
    try:
        _port(port)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"the port {error}") from None
    return text


def _store_url(text: str) -> str:
    if not re.match(r"\w[\w+.-]+:", text):
        raise argparse.ArgumentTypeError(f"must be a URL; the file {text} is sqlite:///{text}")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return value


# --- pieces --------------------------------------------------------------------------------------


def _group(commands: _Commands, name: str, help: str, example: str) -> _Commands:
    parser = commands.add_parser(name, help=help, description=f"{help.capitalize()}.", epilog=f"example:\n  {example}")
    parser.set_defaults(run="about:overview", overview=None, parser=parser)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=False)


def _command(
    commands: _Commands, name: str, run: str, help: str, *examples: str, more: str = "", server: bool = False
) -> argparse.ArgumentParser:
    listed = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.{more and chr(10) * 2 + more}",
        epilog=f"example{'s' * (len(examples) > 1)}:\n{listed}",
    )
    parser.set_defaults(run=run)
    if server:
        _server_options(parser)
    return parser


def _server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="the server (DUETIME_URL; else http://127.0.0.1:8463)")
    group.add_argument("--token", help="bearer token (better: DUETIME_TOKEN)")
    group.add_argument("--timeout", type=_seconds, default=15.0, metavar="SECONDS", help="give up after (default 15)")
    group.add_argument(
        "--json", action="store_true", help="JSON for programs, errors too; a list is one object per line"
    )


def _namespace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", default="default", help='namespace of the timer (default: "default")')


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", default=os.environ.get("DUETIME_CONFIG"), help="TOML file (DUETIME_CONFIG)"
    )
    parser.add_argument(
        "--store",
        type=_store_url,
        metavar="URL",
        help="where timers are kept: sqlite:///relative.db, sqlite:////absolute.db, postgresql://user:password@host/database;"
        " likewise mysql, mariadb, tidb, mongodb, cassandra, dynamodb, oracle, sqlserver; memory://",
    )
    parser.add_argument(
        "--listen", type=_address, metavar="HOST:PORT", help="address of the HTTP API (default 127.0.0.1:8463)"
    )
    parser.add_argument(
        "--workers",
        type=_number(1),
        metavar="N",
        help="processes that serve together (default 1; needs a database, not SQLite)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting; repeatable"
    )


# --- serve, demo, listen -------------------------------------------------------------------------


def _serving_commands(commands: _Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "demo:demo",
        "watch timers fire on a temporary server",
        "duetime demo",
        "duetime demo --exit --port 0",
    )
    demo.add_argument("--exit", action="store_true", help="end after the show instead of serving on")
    demo.add_argument("--port", type=_port, help="of the server (default: 8463 if it is free; 0: any free one)")
    serve = _command(
        commands,
        "serve",
        "serving:serve",
        "run a server",
        "duetime serve",
        "duetime serve --store sqlite:////var/lib/duetime/timers.db --listen 0.0.0.0:8463 --config duetime.toml",
        "duetime serve --store postgresql://duetime@db.internal/duetime --workers 4",
        "duetime serve --set log.format=json --set delivery.concurrency_per_destination=16",
        more="Ends cleanly on Ctrl-C or SIGTERM. Settings: flags win over environment variables, those over the\n"
        "file; `duetime config show` with the same flags prints what comes of it.",
    )
    _config_options(serve)
    listen = _command(
        commands,
        "listen",
        "listen:listen",
        "receive callbacks on this machine and print each on a line",
        "duetime listen --port 9000",
        "duetime listen --secret whsec_… --answer again=10s",
        "duetime listen --answer fail --once 3",
    )
    listen.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    listen.add_argument("--port", type=_port, default=9000, help="port (default 9000; 0: any free one)")
    listen.add_argument(
        "--secret", action="append", default=[], metavar="whsec_…", help="refuse (401) what it did not sign; repeatable"
    )
    listen.add_argument(
        "--answer", default="ok", metavar="ok|fail|again=10s", help="what to answer: done, try again, or call again at"
    )
    listen.add_argument(
        "--status", type=_number(200, 599), default=200, metavar="CODE", help="HTTP status to answer (default 200)"
    )
    listen.add_argument("--delay", default="0s", metavar="DURATION", help="wait before answering")
    listen.add_argument("--once", type=_number(1), metavar="N", help="end after N callbacks that were not refused")
    listen.add_argument("--json", action="store_true", help="one JSON object per callback")


# --- timer ---------------------------------------------------------------------------------------


def _timer_commands(timer: _Commands) -> None:
    create = _timer(
        timer,
        "create",
        "create a timer, or replace the one of that id",
        "duetime timer create order-17 --in 30m --to http://127.0.0.1:9000/hook --payload '{\"order\":17}'",
        "duetime timer create party --at 2027-01-01T09:00:00+01:00 --to https://shop.example/hook --payload @body.json",
    )
    _timer_options(create, when_required=True)
    create.add_argument(
        "--if-absent",
        action="store_true",
        help="never replace: the same timer is left as it is, a different one refused; makes a repeat safe",
    )
    _timer(timer, "get", "show a timer", "duetime timer get order-17", "duetime timer get order-17 --json")
    update = _timer(
        timer,
        "update",
        "change some of a timer, keep the rest",
        "duetime timer update order-17 --in 1h",
        "duetime timer update order-17 --payload - < body.json",
    )
    _timer_options(update)
    _timer(timer, "delete", "cancel a timer", "duetime timer delete order-17", verb="delete")
    _timer(
        timer,
        "watch",
        "print each change of a timer until it is over",
        "duetime timer watch order-17",
        more="Ends with 0 if it was delivered, else with 1. Waits up to a minute for a server that goes away.",
    )
    _timer(timer, "fire-now", "fire a scheduled timer at once", "duetime timer fire-now order-17")
    _timer(timer, "replay", "fire a timer that is over once more", "duetime timer replay order-17")
    _list_command(timer)


def _timer(
    commands: _Commands, name: str, help: str, *examples: str, more: str = "", verb: str = ""
) -> argparse.ArgumentParser:
    run = f"timers:{(verb or name).replace('-', '_')}"
    parser = _command(commands, name, run, help, *examples, more=more, server=True)
    parser.add_argument("timer_id", metavar="ID")
    _namespace_option(parser)
    return parser


def _timer_options(parser: argparse.ArgumentParser, *, when_required: bool = False) -> None:
    when = parser.add_mutually_exclusive_group(required=when_required)
    when.add_argument("--in", dest="delay", metavar="DURATION", help='from now, as in "90s", "1h30m", "2d"')
    when.add_argument("--at", metavar="INSTANT", help='with an offset, as in "2027-01-01T09:00:00+01:00"')
    parser.add_argument("--to", metavar="URL", help="what to call (default: the namespace's)")
    parser.add_argument("--payload", metavar="JSON|@FILE|-", help="any JSON value; @FILE and - read it")
    parser.add_argument("--header", action="append", metavar="NAME:VALUE", help="sent with the callback; repeatable")
    parser.add_argument("--tag", action="append", metavar="TAG", help="to find it by; repeatable")
    parser.add_argument("--correlation-id", metavar="TEXT", help="handed on to the receiver")
    parser.add_argument("--callback-timeout", type=int, metavar="SECONDS", help="of one attempt")
    _retry_options(parser, "if one is given, the others have the defaults below, not the namespace's")
    late = parser.add_mutually_exclusive_group()
    late.add_argument("--skip-if-late-by", metavar="DURATION", help="rather not at all than later than this")
    late.add_argument("--fail-if-late-by", metavar="DURATION", help="the same, but counted as failed")


def _retry_options(parser: argparse.ArgumentParser, description: str) -> None:
    group = parser.add_argument_group("retries", description)
    group.add_argument("--max-retries", type=int, metavar="N", help="attempts after the first (default: no limit)")
    group.add_argument("--retry-from", metavar="DURATION", help="first pause between attempts (default 1s)")
    group.add_argument("--retry-up-to", metavar="DURATION", help="longest pause between attempts (default 10m)")
    group.add_argument("--retry-for", metavar="DURATION", help="how long to keep trying (default 24h)")


def _list_command(timer: _Commands) -> None:
    listing = _command(
        timer,
        "list",
        "timers:list_timers",
        "list timers: first those to come by due time, then the ended ones",
        "duetime timer list --state failed",
        "duetime timer list --limit 0 --json | jq -r .timerId",
        more="An id that was used again appears once for each of its lives that is still kept.",
        server=True,
    )
    _namespace_option(listing)
    listing.add_argument("--state", choices=["scheduled", "inFlight", "delivered", "failed", "skipped", "cancelled"])
    listing.add_argument("--due-from", metavar="INSTANT", help="due at or after")
    listing.add_argument("--due-until", metavar="INSTANT", help="due before")
    listing.add_argument("--tag", metavar="TAG")
    listing.add_argument("--prefix", metavar="TEXT", help="ids that begin with it")
    listing.add_argument("--correlation-id", metavar="TEXT")
    listing.add_argument("--limit", type=_number(0), default=50, metavar="N", help="at most (default 50; 0: all)")


# --- namespace -----------------------------------------------------------------------------------


def _namespace_commands(commands: _Commands) -> None:
    create = _namespace(
        commands,
        "create",
        "create a namespace",
        "duetime namespace create orders --shards 64 --to https://shop.example/hooks/timers",
    )
    create.add_argument("--shards", type=int, metavar="N", help="never changes afterwards (default: the server's)")
    _namespace_options(create, "sign callbacks by it; repeatable")
    _namespace(commands, "get", "show a namespace", "duetime namespace get orders")
    _command(commands, "list", "namespaces:list_all", "list namespaces", "duetime namespace list", server=True)
    _namespace_options(
        _namespace(
            commands,
            "update",
            "change defaults of a namespace",
            "duetime namespace update orders --callback-timeout 30",
        ),
        "sign by it instead of all there are; repeatable (rotate-secret keeps the newest)",
    )
    _namespace(commands, "delete", "delete a namespace", "duetime namespace delete orders")
    rotate = _namespace(
        commands,
        "rotate-secret",
        "sign callbacks with a fresh secret, printed once",
        "duetime namespace rotate-secret orders",
        "duetime namespace rotate-secret orders --drop-old",
        more="The newest older secret keeps signing beside it, so that receivers can follow; --drop-old ends that.",
    )
    rotate.add_argument("--drop-old", action="store_true", help="sign by the new secret alone")


def _namespace(commands: _Commands, name: str, help: str, *examples: str, more: str = "") -> argparse.ArgumentParser:
    run = f"namespaces:{name.replace('-', '_')}"
    parser = _command(commands, name, run, help, *examples, more=more, server=True)
    parser.add_argument("name", metavar="NAME")
    return parser


def _namespace_options(parser: argparse.ArgumentParser, secret_help: str) -> None:
    parser.add_argument("--to", metavar="URL", help="default target of its timers")
    parser.add_argument("--callback-timeout", type=int, metavar="SECONDS", help="of one attempt (default 10)")
    parser.add_argument("--require-ok", action=argparse.BooleanOptionalAction, help='demand {"ok": true} of receivers')
    parser.add_argument("--keep-delivered", metavar="DURATION", help="retention of delivered timers (default 1d)")
    parser.add_argument("--keep-failed", metavar="DURATION", help="retention of failed timers (default 30d)")
    parser.add_argument("--payload-bytes-max", type=int, metavar="N", help="largest payload (default: the server's)")
    parser.add_argument("--secret", action="append", metavar="whsec_…", help=secret_help)
    _retry_options(parser, "of timers without their own; if one is given, the others have the defaults below")


# --- operating -----------------------------------------------------------------------------------


def _operating_commands(commands: _Commands) -> None:
    cluster = _group(commands, "cluster", "the instances and what they hold", "duetime cluster status")
    status = _command(
        cluster,
        "status",
        "cluster:status",
        "members, shards, backlog, lateness of the whole cluster",
        "duetime cluster status",
        "duetime cluster status --watch",
        more="Ends with 1 if something is wrong, as a member that cannot be reached or a shard without an owner;\n"
        "`duetime doctor` explains.",
        server=True,
    )
    status.add_argument("--shards", action="store_true", help="list every shard too")
    status.add_argument("--watch", action="store_true", help="look again every second until Ctrl-C")
    token = _group(commands, "token", "access tokens", "duetime token new --name shop")
    new = _command(
        token,
        "new",
        "serving:new_token",
        "make an access token and the configuration that accepts it",
        "duetime token new --name shop --namespace orders --verb read --verb write",
    )
    new.add_argument("--name", required=True, help="for logs")
    new.add_argument("--namespace", action="append", default=[], help="only this namespace; repeatable")
    new.add_argument(
        "--verb", action="append", default=[], choices=["read", "write", "admin"], help="only this; repeatable"
    )
    new.add_argument("--json", action="store_true")
    config = _group(commands, "config", "settings", "duetime config show")
    show = _command(
        config,
        "show",
        "serving:show_config",
        "print the configuration that `serve` would use with the same flags, file and environment, secrets redacted",
        "duetime config show",
        "duetime config show --env",
        "duetime config show --config duetime.toml --set log.level=debug --json",
    )
    _config_options(show)
    show.add_argument("--env", action="store_true", help="list the environment variables instead")
    show.add_argument("--json", action="store_true")
    doctor = _command(
        commands,
        "doctor",
        "doctor:doctor",
        "check this machine, the configuration, the store and the server, with advice",
        "duetime doctor",
        "duetime doctor --config duetime.toml --url http://10.0.0.5:8463",
        server=True,
    )
    _config_options(doctor)
    _command(
        commands, "version", "about:version", "print versions", "duetime version", "duetime version --json"
    ).add_argument("--json", action="store_true")
