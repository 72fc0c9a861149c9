"""The parser: every command with its options, a description and examples. It imports nothing else of the package.

Each command names the function that runs it as "module:function", so that a module is imported only when its command
is run.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ParseError", "build_parser"]

OVERVIEW = """\
Duetime: a durable timer service. You give a URL and a time; it calls the URL at that time, at least once.

  duetime demo                          watch timers fire on a temporary server, in ten seconds
  duetime serve                         run a server on ./duetime.db, at http://127.0.0.1:8463
  duetime timer create tea --in 3m --to http://127.0.0.1:9000/
                                        call this URL in three minutes

`duetime --help` lists all commands, `duetime COMMAND --help` explains one with examples."""

EXIT_CODES = """\
exit codes:
  0  done
  1  the operation failed: a watched timer failed, doctor or cluster status found something wrong
  2  wrong usage or configuration; no request was sent
  3  no such timer or namespace
  4  refused: invalid, conflict, too large, or not allowed; nothing was changed
  5  no Duetime server at that URL, or it cannot serve now; nothing was changed, try again
  6  outcome unknown: the write may or may not have happened
  130  interrupted
"""

ENVIRONMENT = """\
environment:
  DUETIME_URL      URL of the server (default http://127.0.0.1:8463)
  DUETIME_TOKEN    access token for the server (default: none)
  DUETIME_CONFIG   configuration file of `serve`, `doctor` and `config show` (default: none)
  NO_COLOR         if set, the output has no colours
"""


class _Parser(argparse.ArgumentParser):
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


_Commands = Any  # the type in argparse is private


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="duetime",
        description="A durable timer service: you give a URL and a time; it calls the URL at that time, at least once.",
        epilog=f"example:\n  duetime demo\n\n{ENVIRONMENT}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(run="help:overview", overview=OVERVIEW)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _serving_commands(commands)
    _timer_commands(_group(commands, "timer", "create, show, change and cancel timers", "duetime timer list"))
    _namespace_commands(
        _group(
            commands,
            "namespace",
            "create, show and change namespaces, which group timers and hold their defaults",
            "duetime namespace list",
        )
    )
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


# --- pieces --------------------------------------------------------------------------------------


def _group(commands: _Commands, name: str, help: str, example: str) -> _Commands:
    parser = commands.add_parser(name, help=help, description=f"{help.capitalize()}.", epilog=f"example:\n  {example}")
    parser.set_defaults(run="help:overview", overview=None, parser=parser)
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
    group.add_argument("--url", help="URL of the server (default: DUETIME_URL, or http://127.0.0.1:8463)")
    group.add_argument(
        "--token", help="access token (default: DUETIME_TOKEN, which is safer: other users can see arguments)"
    )
    group.add_argument(
        "--timeout", type=_seconds, default=15.0, metavar="SECONDS", help="stop after this many seconds (default 15)"
    )
    group.add_argument(
        "--json", action="store_true", help="print JSON, also for errors; a list is one object per line (default: text)"
    )


def _namespace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the timer (default: the namespace called default)"
    )


def _config_options(parser: argparse.ArgumentParser) -> None:
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
        type=_number(1),
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


# --- serve, demo, listen -------------------------------------------------------------------------


def _serving_commands(commands: _Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "demo:demo",
        "start a temporary server and watch three timers fire",
        "duetime demo",
        "duetime demo --exit --port 0",
    )
    demo.add_argument(
        "--exit", action="store_true", help="exit after the three timers (default: the server runs until Ctrl-C)"
    )
    demo.add_argument(
        "--port",
        type=_port,
        help="port of the server; 0: any free port (default: 8463, or if it is in use any free port)",
    )
    serve = _command(
        commands,
        "serve",
        "serve:serve",
        "run a server",
        "duetime serve",
        "duetime serve --store sqlite:////var/lib/duetime/timers.db --listen 0.0.0.0:8463 --config duetime.toml",
        "duetime serve --store postgresql://duetime@db.internal/duetime --workers 4",
        "duetime serve --set log.format=json --set delivery.concurrency_per_destination=16",
        more="Ctrl-C or SIGTERM stops it: deliveries in flight are finished first. A second signal stops it at once.\n"
        "Flags override environment variables, which override the configuration file. `duetime config show` with the\n"
        "same flags prints the resulting configuration.",
    )
    _config_options(serve)
    listen = _command(
        commands,
        "listen",
        "listen:listen",
        "receive callbacks on this machine and print each on one line",
        "duetime listen --port 9000",
        "duetime listen --secret whsec_… --answer again=10s",
        "duetime listen --answer fail --once 3",
    )
    listen.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    listen.add_argument("--port", type=_port, default=9000, help="port to listen on; 0: any free port (default 9000)")
    listen.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="whsec_…",
        help="signing secret: callbacks not signed with it are refused with 401; repeatable (default: no check)",
    )
    listen.add_argument(
        "--answer",
        default="ok",
        metavar="ok|fail|again=10s",
        help="body to answer: ok (done), fail (retry), again=DURATION (done, and call again after it) (default ok)",
    )
    listen.add_argument(
        "--status",
        type=_number(200, 599),
        default=200,
        metavar="CODE",
        help="HTTP status to answer, 200 to 599 (default 200)",
    )
    listen.add_argument(
        "--delay", default="0s", metavar="DURATION", help="wait this long before answering (default 0s)"
    )
    listen.add_argument(
        "--once", type=_number(1), metavar="N", help="exit after N callbacks that were not refused (default: Ctrl-C)"
    )
    listen.add_argument("--json", action="store_true", help="print one JSON object per callback (default: text)")


# --- timer ---------------------------------------------------------------------------------------


def _timer_commands(timer: _Commands) -> None:
    create = _timer(
        timer,
        "create",
        "create a timer, or replace the timer with that id",
        "duetime timer create order-17 --in 30m --to http://127.0.0.1:9000/hook --payload '{\"order\":17}'",
        "duetime timer create party --at 2027-01-01T09:00:00+01:00 --to https://shop.example/hook --payload @body.json",
    )
    _timer_options(create, when_required=True)
    create.add_argument(
        "--if-absent",
        action="store_true",
        help="never replace: the same timer is not changed, a different one is refused; so the command can be repeated",
    )
    _timer(timer, "get", "show a timer", "duetime timer get order-17", "duetime timer get order-17 --json")
    update = _timer(
        timer,
        "update",
        "change some fields of a timer",
        "duetime timer update order-17 --in 1h",
        "duetime timer update order-17 --payload - < body.json",
        more="Fields whose options are left out do not change.",
    )
    _timer_options(update)
    _timer(timer, "delete", "cancel a timer", "duetime timer delete order-17", verb="delete")
    _timer(
        timer,
        "watch",
        "print each change of a timer until it is over",
        "duetime timer watch order-17",
        more="The exit code is 0 if it was delivered, otherwise 1. If the server stops answering, the\n"
        "command waits up to 60 seconds for it.",
    )
    _timer(timer, "fire-now", "make a scheduled timer due now", "duetime timer fire-now order-17")
    _timer(timer, "replay", "fire again a timer that is over", "duetime timer replay order-17")
    _list_command(timer)


def _timer(
    commands: _Commands, name: str, help: str, *examples: str, more: str = "", verb: str = ""
) -> argparse.ArgumentParser:
    run = f"timers:{(verb or name).replace('-', '_')}"
    parser = _command(commands, name, run, help, *examples, more=more, server=True)
    parser.add_argument("timer_id", metavar="ID", help="id of the timer")
    _namespace_option(parser)
    return parser


def _timer_options(parser: argparse.ArgumentParser, *, when_required: bool = False) -> None:
    when = parser.add_mutually_exclusive_group(required=when_required)
    when.add_argument("--in", dest="delay", metavar="DURATION", help="due after this time from now: 90s, 1h30m, 2d")
    when.add_argument(
        "--at", metavar="INSTANT", help="due at this time, with its UTC offset: 2027-01-01T09:00:00+01:00"
    )
    parser.add_argument("--to", metavar="URL", help="URL to call (default: that of the namespace)")
    parser.add_argument(
        "--payload", metavar="JSON|@FILE|-", help="any JSON value; @FILE reads it from a file, - from standard input"
    )
    parser.add_argument(
        "--header", action="append", metavar="NAME:VALUE", help="HTTP header of the callback; repeatable"
    )
    parser.add_argument("--tag", action="append", metavar="TAG", help="tag, by which `timer list` finds it; repeatable")
    parser.add_argument("--correlation-id", metavar="TEXT", help="your own id, which the receiver gets in the callback")
    parser.add_argument(
        "--callback-timeout",
        type=int,
        metavar="SECONDS",
        help="time limit of one attempt, in seconds (default: that of the namespace)",
    )
    _retry_options(
        parser,
        "Without these options the timer has the retry policy of its namespace. If you give one of them, the\n"
        "others have the defaults shown here.",
    )
    late = parser.add_mutually_exclusive_group()
    late.add_argument(
        "--skip-if-late-by",
        metavar="DURATION",
        help="skip the callback if it would be later than this: 10m (default: never)",
    )
    late.add_argument(
        "--fail-if-late-by", metavar="DURATION", help="the same, but the timer is failed, not skipped (default: never)"
    )


def _retry_options(parser: argparse.ArgumentParser, description: str) -> None:
    group = parser.add_argument_group("retries", description)
    group.add_argument("--max-retries", type=int, metavar="N", help="attempts after the first (default: no limit)")
    group.add_argument(
        "--retry-from", metavar="DURATION", help="longest first pause; it doubles with each attempt (default 1s)"
    )
    group.add_argument("--retry-up-to", metavar="DURATION", help="longest pause between attempts (default 10m)")
    group.add_argument(
        "--retry-for", metavar="DURATION", help="time from the first attempt to the last retry (default 24h)"
    )


def _list_command(timer: _Commands) -> None:
    listing = _command(
        timer,
        "list",
        "timers:list_timers",
        "list timers: first the scheduled ones by due time, then those that are over",
        "duetime timer list --state failed",
        "duetime timer list --limit 0 --json | jq -r .timerId",
        more="An id that was used several times is listed once for each timer that is still stored.",
        server=True,
    )
    _namespace_option(listing)
    listing.add_argument(
        "--state",
        choices=["scheduled", "inFlight", "delivered", "failed", "skipped", "cancelled"],
        help="only timers in this state (default: all)",
    )
    listing.add_argument("--due-from", metavar="INSTANT", help="only timers due at or after it: 2027-01-01T09:00:00Z")
    listing.add_argument("--due-until", metavar="INSTANT", help="only timers due before it")
    listing.add_argument("--tag", metavar="TAG", help="only timers with this tag")
    listing.add_argument("--prefix", metavar="TEXT", help="only timers whose id begins with it")
    listing.add_argument("--correlation-id", metavar="TEXT", help="only timers with this correlation id")
    listing.add_argument(
        "--limit", type=_number(0), default=50, metavar="N", help="number of timers; 0: all (default 50)"
    )


# --- namespace -----------------------------------------------------------------------------------


def _namespace_commands(commands: _Commands) -> None:
    create = _namespace(
        commands,
        "create",
        "create a namespace",
        "duetime namespace create orders --shards 64 --to https://shop.example/hooks/timers",
    )
    create.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="number of shards; cannot be changed later (default: the server's namespaces.default_num_shards, 16)",
    )
    _namespace_options(create, "secret with which callbacks are signed; repeatable (default: not signed)")
    _namespace(commands, "get", "show a namespace", "duetime namespace get orders")
    _command(commands, "list", "namespaces:list_all", "list namespaces", "duetime namespace list", server=True)
    _namespace_options(
        _namespace(
            commands,
            "update",
            "change the defaults of a namespace",
            "duetime namespace update orders --callback-timeout 30",
            more="Options that are left out do not change. The defaults shown are those of a new namespace.",
        ),
        "replaces all secrets with which callbacks are signed; repeatable (`rotate-secret` keeps the newest)",
    )
    _namespace(commands, "delete", "delete a namespace that has no scheduled timers", "duetime namespace delete orders")
    rotate = _namespace(
        commands,
        "rotate-secret",
        "sign callbacks with a new secret, which is printed only once",
        "duetime namespace rotate-secret orders",
        "duetime namespace rotate-secret orders --drop-old",
        more="Callbacks are also signed with the previous secret, so that receivers can change to the new one;\n"
        "--drop-old removes it.",
    )
    rotate.add_argument(
        "--drop-old", action="store_true", help="sign with the new secret only (default: with the previous one too)"
    )


def _namespace(commands: _Commands, name: str, help: str, *examples: str, more: str = "") -> argparse.ArgumentParser:
    run = f"namespaces:{name.replace('-', '_')}"
    parser = _command(commands, name, run, help, *examples, more=more, server=True)
    parser.add_argument("name", metavar="NAME", help="name of the namespace")
    return parser


def _namespace_options(parser: argparse.ArgumentParser, secret_help: str) -> None:
    parser.add_argument("--to", metavar="URL", help="URL to call for timers that name none (default: none)")
    parser.add_argument(
        "--callback-timeout", type=int, metavar="SECONDS", help="time limit of one attempt, in seconds (default 10)"
    )
    parser.add_argument(
        "--require-ok",
        action=argparse.BooleanOptionalAction,
        help='a 2xx response counts as delivered only with the body {"ok": true} (default: no)',
    )
    parser.add_argument(
        "--keep-delivered", metavar="DURATION", help="how long delivered timers are stored (default 1d)"
    )
    parser.add_argument("--keep-failed", metavar="DURATION", help="how long failed timers are stored (default 30d)")
    parser.add_argument(
        "--payload-bytes-max", type=int, metavar="N", help="largest payload, in bytes (default: that of the server)"
    )
    parser.add_argument("--secret", action="append", metavar="whsec_…", help=secret_help)
    _retry_options(
        parser,
        "The retry policy of timers without one of their own. If you give one of these options, the others have the\n"
        "defaults shown here.",
    )


# --- operating -----------------------------------------------------------------------------------


def _operating_commands(commands: _Commands) -> None:
    cluster = _group(commands, "cluster", "show the instances, their shards and their timers", "duetime cluster status")
    status = _command(
        cluster,
        "status",
        "cluster:status",
        "show members, shards, backlog and lateness of the whole cluster",
        "duetime cluster status",
        "duetime cluster status --watch",
        more="The exit code is 1 if something is wrong, such as a member that cannot be reached or a shard without an\n"
        "owner; `duetime doctor` explains it.",
        server=True,
    )
    status.add_argument("--shards", action="store_true", help="also list every shard (default: no)")
    status.add_argument("--watch", action="store_true", help="print it again every second until Ctrl-C (default: once)")
    token = _group(commands, "token", "make access tokens", "duetime token new --name shop")
    new = _command(
        token,
        "new",
        "tokens:new_token",
        "make an access token, and print it with the configuration that a server needs to accept it",
        "duetime token new --name shop --namespace orders --verb read --verb write",
    )
    new.add_argument("--name", required=True, help="name of the token, which the server logs")
    new.add_argument(
        "--namespace", action="append", default=[], help="allow this namespace only; repeatable (default: all)"
    )
    new.add_argument(
        "--verb",
        action="append",
        default=[],
        choices=["read", "write", "admin"],
        help="allow only this kind of request; repeatable (default: all)",
    )
    new.add_argument("--json", action="store_true", help="print JSON (default: text)")
    config = _group(commands, "config", "show the configuration", "duetime config show")
    show = _command(
        config,
        "show",
        "settings:show_config",
        "print the configuration that `serve` would use with the same flags, file and environment, secrets redacted",
        "duetime config show",
        "duetime config show --env",
        "duetime config show --config duetime.toml --set log.level=debug --json",
    )
    _config_options(show)
    show.add_argument(
        "--env", action="store_true", help="list the settings as environment variables (default: as TOML)"
    )
    show.add_argument("--json", action="store_true", help="print JSON (default: text)")
    doctor = _command(
        commands,
        "doctor",
        "doctor:doctor",
        "check this machine, the configuration, the store, the server and the cluster, and explain what is wrong",
        "duetime doctor",
        "duetime doctor --config duetime.toml --url http://10.0.0.5:8463",
        server=True,
    )
    _config_options(doctor)
    _command(
        commands,
        "version",
        "version:version",
        "print the versions of Duetime, Python and packages",
        "duetime version",
        "duetime version --json",
    ).add_argument("--json", action="store_true", help="print JSON (default: text)")
