"""The options of the commands `namespace …`."""

from __future__ import annotations

import argparse

from duetime.cli.flow_arguments import add_pause_commands
from duetime.cli.parser import Commands, add_command, add_retry_options, number, or_none
from duetime.domain.timer import SHARDS_BY_SIZE

__all__ = ["add_namespace_commands"]


def add_namespace_commands(commands: Commands) -> None:
    create = _namespace(
        commands,
        "create",
        "create a namespace",
        "duetime namespace create orders --size medium --to https://shop.example/hooks/timers",
    )
    shards = create.add_mutually_exclusive_group()
    shards.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="number of shards; cannot be changed later (default: the server's namespaces.default_num_shards, 16)",
    )
    shards.add_argument(
        "--size",
        choices=list(SHARDS_BY_SIZE),
        help="the number of shards by a name: small 16, medium 256, large 1024, xlarge 4096",
    )
    _namespace_options(create, "secret with which callbacks are signed; repeatable (default: not signed)")
    _namespace(commands, "get", "show a namespace", "duetime namespace get orders")
    add_command(commands, "list", "namespaces:list_all", "list namespaces", "duetime namespace list", server=True)
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
    add_pause_commands(commands)
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


def _namespace(commands: Commands, name: str, help: str, *examples: str, more: str = "") -> argparse.ArgumentParser:
    run = f"namespaces:{name.replace('-', '_')}"
    parser = add_command(commands, name, run, help, *examples, more=more, server=True)
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
    for quota in ("creates", "requests"):
        parser.add_argument(
            f"--{quota}-per-second",
            type=or_none(number(1)),
            metavar="N|none",
            help=f"{quota} per second that the cluster accepts for the namespace; none: as many as "
            f"limits.{quota}_per_second of the server allows",
        )
    parser.add_argument("--secret", action="append", metavar="whsec_…", help=secret_help)
    add_retry_options(
        parser,
        "The retry policy of timers without one of their own. If you give one of these options, the others have the\n"
        "defaults shown here.",
    )
