"""Every command with its options, a description and examples. It imports nothing but the other modules of the parser.

Each command names the function that runs it as "module:function", so that a module is imported only when its command
is run.
"""

from __future__ import annotations

import argparse

from duetime.cli.flow_arguments import add_flow_commands
from duetime.cli.namespace_arguments import add_namespace_commands
from duetime.cli.parser import (
    Commands,
    ParseError,
    Parser,
    add_command,
    add_config_options,
    add_group,
    number,
    port_number,
)
from duetime.cli.schedule_arguments import add_schedule_commands
from duetime.cli.timer_arguments import add_timer_commands

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
  1  failed: a watched timer failed or was not over in time, doctor or cluster status found something wrong
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


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="duetime",
        description="A durable timer service: you give a URL and a time; it calls the URL at that time, at least once.",
        epilog=f"example:\n  duetime demo\n\n{ENVIRONMENT}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(run="help:overview", overview=OVERVIEW)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _serving_commands(commands)
    add_timer_commands(add_group(commands, "timer", "create, show, change and cancel timers", "duetime timer list"))
    add_namespace_commands(
        add_group(
            commands,
            "namespace",
            "create, show and change namespaces, which group timers and hold their defaults",
            "duetime namespace list",
        )
    )
    add_flow_commands(
        add_group(
            commands,
            "flow",
            "show, limit, pause and resume flows: timers that call the same target, or have the same flow key",
            "duetime flow list",
        )
    )
    add_schedule_commands(
        add_group(
            commands,
            "schedule",
            "show when a wall-clock schedule has its occurrences",
            "duetime schedule preview --at 2027-03-15T09:00 --timezone Europe/Paris --repeat daily",
        )
    )
    _operating_commands(commands)
    return parser


def _version() -> str:
    from duetime import __version__

    return f"duetime {__version__}"


# --- serve, demo, listen -------------------------------------------------------------------------


def _serving_commands(commands: Commands) -> None:
    demo = add_command(
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
        type=port_number,
        help="port of the server; 0: any free port (default: 8463, or if it is in use any free port)",
    )
    serve = add_command(
        commands,
        "serve",
        "serve:serve",
        "run a server",
        "duetime serve",
        "duetime serve --store sqlite:////var/lib/duetime/timers.db --listen 0.0.0.0:8463 --config duetime.toml",
        "duetime serve --store postgresql://duetime@db.internal/duetime --workers 4",
        "duetime serve --set log.format=json --set delivery.concurrency_per_flow=16",
        more="Ctrl-C or SIGTERM stops it: deliveries in flight are finished first. A second signal stops it at once.\n"
        "Flags override environment variables, which override the configuration file. `duetime config show` with the\n"
        "same flags prints the resulting configuration.",
    )
    add_config_options(serve)
    serve.add_argument(
        "--paused",
        action="store_true",
        help="pause every namespace in the database before the first timer fires, for example after a restore; "
        "`duetime namespace resume` resumes them (default: no)",
    )
    listen = add_command(
        commands,
        "listen",
        "listen:listen",
        "receive callbacks on this machine and print each on one line",
        "duetime listen --port 9000",
        "duetime listen --secret whsec_… --answer again=10s",
        "duetime listen --answer fail --once 3",
    )
    listen.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    listen.add_argument(
        "--port", type=port_number, default=9000, help="port to listen on; 0: any free port (default 9000)"
    )
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
        type=number(200, 599),
        default=200,
        metavar="CODE",
        help="HTTP status to answer, 200 to 599 (default 200)",
    )
    listen.add_argument(
        "--delay", default="0s", metavar="DURATION", help="wait this long before answering (default 0s)"
    )
    listen.add_argument(
        "--once", type=number(1), metavar="N", help="exit after N callbacks that were not refused (default: Ctrl-C)"
    )
    listen.add_argument("--json", action="store_true", help="print one JSON object per callback (default: text)")


# --- operating -----------------------------------------------------------------------------------


def _operating_commands(commands: Commands) -> None:
    cluster = add_group(
        commands, "cluster", "show the instances, their shards and their timers", "duetime cluster status"
    )
    status = add_command(
        cluster,
        "status",
        "cluster:status",
        "show members, shards, held timers, lateness and message brokers of the whole cluster",
        "duetime cluster status",
        "duetime cluster status --watch",
        more="The exit code is 1 if something is wrong, such as a member that cannot be reached or a shard without an\n"
        "owner; `duetime doctor` explains it.",
        server=True,
    )
    status.add_argument("--shards", action="store_true", help="also list every shard (default: no)")
    status.add_argument("--watch", action="store_true", help="print it again every second until Ctrl-C (default: once)")
    token = add_group(commands, "token", "make access tokens", "duetime token new --name shop --namespace orders")
    new = add_command(
        token,
        "new",
        "tokens:new_token",
        "make an access token, and print it with the configuration that a server needs to accept it",
        "duetime token new --name shop --namespace orders --verb read --verb write",
        "duetime token new --name operator --all",
    )
    new.add_argument("--name", required=True, help="name of the token, which the server logs")
    names = "allow this namespace only; repeatable (default: all, with --verb)"
    new.add_argument("--namespace", action="append", default=[], help=names)
    verbs = "allow only this kind of request; repeatable (default: all, with --namespace)"
    new.add_argument("--verb", action="append", default=[], choices=["read", "write", "admin"], help=verbs)
    new.add_argument("--all", action="store_true", help="allow everything in all namespaces (default: no)")
    new.add_argument("--json", action="store_true", help="print JSON (default: text)")
    config = add_group(commands, "config", "show the configuration", "duetime config show")
    show = add_command(
        config,
        "show",
        "settings:show_config",
        "print the configuration that `serve` would use with the same flags, file and environment, secrets redacted",
        "duetime config show",
        "duetime config show --env",
        "duetime config show --config duetime.toml --set log.level=debug --json",
    )
    add_config_options(show)
    show.add_argument(
        "--env", action="store_true", help="list the settings as environment variables (default: as TOML)"
    )
    show.add_argument("--json", action="store_true", help="print JSON (default: text)")
    doctor = add_command(
        commands,
        "doctor",
        "doctor:doctor",
        "check machine, configuration, store, message brokers, server and cluster, and explain what is wrong",
        "duetime doctor",
        "duetime doctor --config duetime.toml --url http://10.0.0.5:8463",
        server=True,
    )
    add_config_options(doctor)
    add_command(
        commands,
        "version",
        "version:version",
        "print the versions of Duetime, Python and packages",
        "duetime version",
        "duetime version --json",
    ).add_argument("--json", action="store_true", help="print JSON (default: text)")
