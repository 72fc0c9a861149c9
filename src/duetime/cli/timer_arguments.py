"""The options of the commands `timer …`."""

from __future__ import annotations

import argparse

from duetime.cli.parser import Commands, add_command, add_namespace_option, add_retry_options, number
from duetime.cli.schedule_arguments import add_rule_options

__all__ = ["add_timer_commands"]


def add_timer_commands(timer: Commands) -> None:
    create = _timer(
        timer,
        "create",
        "create a timer, or replace the timer with that id",
        "duetime timer create order-17 --in 30m --to http://127.0.0.1:9000/hook --payload '{\"order\":17}'",
        "duetime timer create party --at 2027-01-01T09:00:00+01:00 --to https://shop.example/hook --payload @body.json",
        "duetime timer create tea --at 2027-03-15T09:00 --timezone Europe/Paris --repeat daily --to http://127.0.0.1/tea",
        more="Give --in, --at, or --timezone. With --timezone the timer has a schedule, and --at is a local time\n"
        "without offset. `duetime schedule preview` shows the occurrences of a schedule, and explains its options.",
    )
    _timer_options(create)
    create.add_argument(
        "--if-absent",
        action="store_true",
        help="never replace: the same timer is not changed, a different one is refused; so the command can be repeated",
    )
    create.add_argument(
        "--if-reached",
        choices=["replace", "ignore"],
        help="if a timer with that id is over and still stored: replace creates a new one, ignore creates nothing and "
        "shows it (default: replace)",
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
    _timer_options(update).add_argument(
        "--no-schedule", action="store_true", help="end the schedule: the pending call is the last (default: no)"
    )
    _timer(timer, "delete", "cancel a timer", "duetime timer delete order-17", verb="delete")
    _timer(
        timer,
        "watch",
        "print each change of a timer until it is over",
        "duetime timer watch order-17",
        "duetime timer watch order-17 --timeout 60",
        more="The exit code is 0 if it was delivered, otherwise 1, also if --timeout ends the command first. If the\n"
        "server stops answering, the command waits up to 60 seconds for it.",
        timeout=None,
    )
    _timer(timer, "fire-now", "make a scheduled timer due now", "duetime timer fire-now order-17")
    _timer(timer, "replay", "fire again a timer that is over", "duetime timer replay order-17")
    _timer(timer, "pause", "pause a timer: it does not fire until it is resumed", "duetime timer pause report")
    _timer(timer, "resume", "resume a paused timer", "duetime timer resume report")
    _list_command(timer)


def _timer(
    commands: Commands,
    name: str,
    help: str,
    *examples: str,
    more: str = "",
    verb: str = "",
    timeout: float | None = 15.0,
) -> argparse.ArgumentParser:
    run = f"timers:{(verb or name).replace('-', '_')}"
    parser = add_command(commands, name, run, help, *examples, more=more, server=True, timeout=timeout)
    parser.add_argument("timer_id", metavar="ID", help="id of the timer")
    add_namespace_option(parser)
    return parser


def _timer_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Returns the group of the options of a schedule."""
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--in", dest="delay", metavar="DURATION", help="due after this time from now: 90s, 1h30m, 2d")
    when.add_argument(
        "--at",
        metavar="TIME",
        help="due at this time, with its UTC offset: 2027-01-01T09:00:00+01:00; with --timezone: a local time without",
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
        "--flow-key", metavar="KEY", help="flow whose limits, breaker and pause apply (default: the URL without query)"
    )
    parser.add_argument(
        "--callback-timeout",
        type=int,
        metavar="SECONDS",
        help="time limit of one attempt, in seconds (default: that of the namespace)",
    )
    add_retry_options(
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
    schedule = parser.add_argument_group("schedule", "Local times in a time zone, once or repeated.")
    schedule.add_argument(
        "--timezone", metavar="ZONE", help="name of an IANA time zone, as in America/New_York (default: no schedule)"
    )
    add_rule_options(schedule)
    schedule.add_argument(
        "--catch-up",
        choices=["one", "skip", "all"],
        help="of the occurrences that passed while nothing ran, call the latest (one), the latest if it is at most "
        "60 s late (skip), or all (default: one)",
    )
    return schedule


def _list_command(timer: Commands) -> None:
    listing = add_command(
        timer,
        "list",
        "timers:list_timers",
        "list timers: first the scheduled ones by due time, then those that are over",
        "duetime timer list --state failed",
        "duetime timer list --limit 0 --json | jq -r .timerId",
        "duetime timer list --correlation-id request-9f3 --all-namespaces",
        more="An id that was used several times is listed once for each timer that is still stored.",
        server=True,
    )
    which = listing.add_mutually_exclusive_group()
    add_namespace_option(which)
    which.add_argument(
        "--all-namespaces",
        action="store_true",
        help="timers of all namespaces; needs --correlation-id, and a token with admin for all namespaces",
    )
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
        "--limit", type=number(0), default=50, metavar="N", help="number of timers; 0: all (default 50)"
    )
