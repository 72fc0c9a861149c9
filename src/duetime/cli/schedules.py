"""schedule preview: computed here, without a server."""

from __future__ import annotations

from argparse import Namespace as Arguments
from itertools import islice

from duetime.cli.output import now_ms, print_json, print_line, print_table, styled
from duetime.domain.instants import format_instant, parse_instant
from duetime.domain.schedule import (
    PREVIEW_STEPS_MAX,
    TZDATA_VERSION,
    Occurrence,
    Schedule,
    Steps,
    check_schedule,
    occurrences,
    with_start,
)
from duetime.errors import InvalidField
from duetime.wire import PreviewAnswer, occurrence_json

__all__ = ["preview"]


def preview(arguments: Arguments) -> int:
    now = now_ms()
    from_ms = now if arguments.from_ is None else _instant(arguments.from_)
    schedule = Schedule(
        timezone=arguments.timezone,
        at=arguments.at,
        gap=arguments.gap,
        fold=arguments.fold,
        repeat=arguments.repeat,
        exclude=tuple(arguments.exclude),
        until=arguments.until,
        feb29=arguments.feb29,
    )
    schedule = with_start(schedule, min(from_ms, now))
    check_schedule(schedule)
    following = occurrences(schedule, from_ms, Steps(total=PREVIEW_STEPS_MAX))
    found = list(islice(following, arguments.count))
    if arguments.json:
        print_json(PreviewAnswer(instants=[occurrence_json(each) for each in found], tzdata=TZDATA_VERSION))
        return 0
    if found:
        print_table(["local time", "offset", "UTC", "why"], [_row(each) for each in found])
    is_end = len(found) < arguments.count
    if is_end:
        print_line("the schedule ends here" if found else f"no occurrence from {format_instant(from_ms)} on")
    print_line(styled(f"time zone {schedule.timezone}, rules of tzdata {TZDATA_VERSION}", "dim"))
    return 0


def _instant(text: str) -> int:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise InvalidField("from", f"--from {error}") from None


def _row(occurrence: Occurrence) -> tuple[str, str, str, str]:
    local = occurrence.local
    return (
        f"{_weekday(occurrence)} {local[:10]} {local[11:19]}",
        local[19:],
        format_instant(occurrence.instant_ms).replace("T", " ").replace(".000Z", "Z"),
        styled(_reason(occurrence), "yellow"),
    )


def _weekday(occurrence: Occurrence) -> str:
    day = (occurrence.instant_ms // 1_000 + occurrence.offset_s) // 86_400  # day 0 was a Thursday
    return ("Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed")[day % 7]


def _reason(occurrence: Occurrence) -> str:
    asked = occurrence.asked.replace("T", " ")
    if occurrence.because == "gap":
        return f"gap: {asked} does not exist"
    if occurrence.because == "fold":
        return f"fold: the {'second' if occurrence.is_second else 'first'} {asked[11:]} of that day"
    if occurrence.because == "feb29":
        return "feb29: that year has no 29 February"
    return ""
