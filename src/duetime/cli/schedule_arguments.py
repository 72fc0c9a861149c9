"""The options of the command `schedule preview`."""

from __future__ import annotations

import argparse

from duetime.cli.parser import Commands, add_command, number

__all__ = ["add_rule_options", "add_schedule_commands"]

_ABOUT = """\
It needs no server: the rules are those of the time-zone data that is installed here.

When clocks go forward, some local times do not exist (a gap). --gap later counts them with the offset before the
gap, so 02:30 becomes 03:30; earlier with the offset after it, so 02:30 becomes 01:30; skip leaves them out. When
clocks go back, some local times exist twice (a fold): --fold first, second or both.

Rules: daily, weekly, monthly, yearly; "cron:0 9 * * MON-FRI" (five fields, or six with seconds first);
"rrule:FREQ=MONTHLY;BYDAY=-1FR" (RFC 5545)."""


def add_schedule_commands(commands: Commands) -> None:
    preview = add_command(
        commands,
        "preview",
        "schedules:preview",
        "show the next occurrences of a schedule: local time, offset, UTC, and why",
        "duetime schedule preview --at 2027-03-13T02:30 --timezone America/New_York --repeat daily",
        "duetime schedule preview --timezone Europe/Paris --repeat 'cron:0 9 * * MON-FRI' --exclude 2027-12-24 -c 10",
        more=_ABOUT,
    )
    preview.add_argument(
        "--at",
        metavar="LOCAL",
        help="local time without offset, as in 2027-03-15T09:00: the only occurrence, the first one, or the start of a "
        "rule (default: now, for cron and rrule)",
    )
    preview.add_argument(
        "--timezone", required=True, metavar="ZONE", help="name of an IANA time zone, as in America/New_York"
    )
    add_rule_options(preview)
    preview.add_argument(
        "--from", dest="from_", metavar="INSTANT", help="show occurrences at and after this instant (default: now)"
    )
    preview.add_argument(
        "-c", "--count", type=number(1, 1_000), default=5, metavar="N", help="number of occurrences (default 5)"
    )
    preview.add_argument("--json", action="store_true", help="print JSON (default: text)")


def add_rule_options(parser: argparse._ActionsContainer) -> None:
    """The options of a schedule that its time and zone leave open."""
    parser.add_argument(
        "--repeat",
        metavar="RULE",
        help="how it repeats: daily, weekly, monthly, yearly, 'cron:…' or 'rrule:…' (default: once)",
    )
    parser.add_argument(
        "--gap",
        choices=["later", "earlier", "skip"],
        help="times that do not exist (default: later; skip if a day may have several times)",
    )
    parser.add_argument(
        "--fold",
        choices=["first", "second", "both"],
        help="times that exist twice (default: first; both if a day may have several times)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="DATE",
        help="no occurrence on this local date, as in 2027-12-25; repeatable (default: none)",
    )
    parser.add_argument(
        "--until", metavar="LOCAL", help="last local time or date, inclusive (default: it does not end)"
    )
    parser.add_argument(
        "--feb29",
        choices=["feb28", "mar1", "leap"],
        help="29 February in other years, for yearly: the day before, the day after, or only leap years "
        "(default: feb28)",
    )
