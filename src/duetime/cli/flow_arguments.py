"""The options of the commands `flow …`, and of `namespace pause` and `namespace resume`."""

from __future__ import annotations

import argparse
import math

from duetime.cli.parser import Commands, add_command, number, or_none

__all__ = ["add_flow_commands", "add_pause_commands"]

_WHAT_A_FLOW_IS = (
    "FLOW is the flow key of its timers; for timers without one, their URL as it was\ngiven, without its query."
)
_LASTS = "The pause holds for the whole cluster within 2 s, and survives restarts, until\nyou resume it."


def add_flow_commands(commands: Commands) -> None:
    listing = add_command(
        commands,
        "list",
        "flows:list_flows",
        "list flows with due timers, limits, a pause or recent failures",
        "duetime flow list",
        "duetime flow list --namespace orders --state open",
        "duetime flow list --limit 0 --json | jq -r 'select(.waiting > 1000).flowKey'",
        more="States: closed (timers are delivered within the limits), open (the receiver fails; timers wait until\n"
        'the time shown), halfOpen (one call is tried), paused (the flow, or with the words "by namespace" its\n'
        "namespace, is paused).",
        server=True,
    )
    listing.add_argument("-n", "--namespace", help="only flows of this namespace (default: all that the token allows)")
    listing.add_argument(
        "--state", choices=["closed", "halfOpen", "open", "paused"], help="only flows in this state (default: all)"
    )
    listing.add_argument(
        "--limit", type=number(0), default=50, metavar="N", help="number of flows; 0: all (default 50)"
    )
    _flow(commands, "get", "show a flow: what waits, and why", "duetime flow get https://shop.example/hooks")
    update = _flow(
        commands,
        "update",
        "limit the calls of a flow",
        "duetime flow update https://shop.example/hooks --rate 5",
        "duetime flow update shop-webhooks --namespace orders --rate 20 --concurrency 4",
        "duetime flow update https://shop.example/hooks --rate none",
        more="Limits hold for the whole cluster within 2 s and survive restarts. Options that are left out do not\n"
        "change.",
    )
    update.add_argument(
        "--rate",
        type=or_none(_finite),
        metavar="N|none",
        help="calls per second, 0.001 to 100,000; none: that of delivery.rate_per_flow",
    )
    update.add_argument(
        "--concurrency",
        type=or_none(_calls),
        metavar="N|none",
        help="calls in flight at once, 1 to 10,000; none: that of delivery.concurrency_per_flow, for each instance",
    )
    _flow(
        commands,
        "pause",
        "fire no timer of a flow until it is resumed",
        "duetime flow pause https://shop.example/hooks",
        more=f"{_LASTS} Calls in flight end normally. Timers that are due wait and use\nno attempts.",
    )
    _flow(
        commands,
        "resume",
        "fire the timers of a paused flow again",
        "duetime flow resume https://shop.example/hooks",
        more="What is overdue fires at once, the oldest first, within the limits of the flow. To call a receiver\n"
        "slowly that has just recovered, set a limit first: duetime flow update FLOW --rate 5",
    )


def add_pause_commands(commands: Commands) -> None:
    pause = add_command(
        commands,
        "pause",
        "namespaces:pause",
        "fire no timer of a namespace until it is resumed",
        "duetime namespace pause orders",
        more=f"{_LASTS} Calls in flight end normally. Timers can still be created,\nchanged and cancelled.",
        server=True,
    )
    pause.add_argument("name", metavar="NAME", help="name of the namespace")
    resume = add_command(
        commands,
        "resume",
        "namespaces:resume",
        "fire the timers of a paused namespace again",
        "duetime namespace resume orders",
        "duetime namespace resume --all",
        more="What is overdue fires at once, the oldest first. Flows that are themselves paused stay paused.",
        server=True,
    )
    which = resume.add_mutually_exclusive_group(required=True)
    which.add_argument("name", metavar="NAME", nargs="?", help="name of the namespace")
    which.add_argument("--all", action="store_true", help="every namespace that is paused, as after `serve --paused`")


def _flow(commands: Commands, name: str, help: str, *examples: str, more: str = "") -> argparse.ArgumentParser:
    text = f"{more}\n{_WHAT_A_FLOW_IS}" if more else _WHAT_A_FLOW_IS
    parser = add_command(commands, name, f"flows:{name}", help, *examples, more=text, server=True)
    parser.add_argument("flow_key", metavar="FLOW", help="flow key, or URL without its query")
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the flow (default: the namespace called default)"
    )
    return parser


def _calls(text: str) -> int:
    try:
        return number(1, 10_000)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none; for no calls, pause the flow") from None


def _finite(text: str) -> float:
    """JSON has no NaN and no infinity: sent as null, they would clear the limit."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
