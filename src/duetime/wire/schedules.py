"""Wall-clock schedules: the request for a preview, and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field

from duetime.domain.instants import format_instant
from duetime.wire.parts import AnswerJson, InstantText, RequestJson

if TYPE_CHECKING:  # the client needs these structs, but not the code that computes occurrences
    from duetime.domain.schedule import Occurrence

PREVIEW_COUNT_MAX = 1_000


class ScheduleJson(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Local times in a time zone, once or repeated."""

    timezone: Annotated[
        str, Meta(description="The name of an IANA time zone; upper and lower case matter.", examples=["Europe/Paris"])
    ]
    at: (
        Annotated[
            str,
            Meta(
                description="Local time, from 1970 to 9998, with seconds if wanted, without an offset. The first "
                "occurrence of a schedule that repeats daily to yearly; for cron and RFC 5545 rules the start, which "
                "is an occurrence only if it matches. Omitted, for these rules only: now.",
                examples=["2027-03-15T09:00"],
            ),
        ]
        | None
    ) = None
    repeat: (
        Annotated[
            str,
            Meta(
                description="`daily`, `weekly`, `monthly` or `yearly`; `cron:` and an expression of five fields, or "
                "six with seconds first; or `rrule:` and a recurrence rule of RFC 5545. `monthly` is the last day of "
                "months that are too short. Omitted: a single time.",
                examples=["daily", "cron:0 9 * * MON-FRI", "rrule:FREQ=MONTHLY;BYDAY=-1FR"],
            ),
        ]
        | None
    ) = None
    gap: (
        Annotated[
            str,
            Meta(
                description="What becomes of a local time that the clock leaves out. `later`: it counts with the "
                "offset before the gap, so 02:30 becomes 03:30. `earlier`: with the offset after it, so 02:30 becomes "
                "01:30. `skip`: nothing. Omitted: `later`, or `skip` if a day may have several times.",
                extra_json_schema={"enum": ["later", "earlier", "skip"]},
            ),
        ]
        | None
    ) = None
    fold: (
        Annotated[
            str,
            Meta(
                description="Which of the two instants of a local time that the clock shows twice. Omitted: `first`, "
                "or `both` if a day may have several times.",
                extra_json_schema={"enum": ["first", "second", "both"]},
            ),
        ]
        | None
    ) = None
    exclude: (
        Annotated[
            list[str],
            Meta(
                description="Local dates without an occurrence, at most 1,000. They are compared with the local time "
                "that the schedule asks for.",
                examples=[["2027-12-25", "2027-12-26"]],
                extra_json_schema={"maxItems": 1_000},
            ),
        ]
        | None
    ) = None
    until: (
        Annotated[
            str,
            Meta(
                description="The last local time, inclusive; a date without a time means the end of that day.",
                examples=["2027-12-31T23:59"],
            ),
        ]
        | None
    ) = None
    feb29: (
        Annotated[
            str,
            Meta(
                description="Only for `yearly`, and only if `at` is 29 February: what happens in other years. `leap`: "
                "nothing. Omitted: `feb28`.",
                extra_json_schema={"enum": ["feb28", "mar1", "leap"]},
            ),
        ]
        | None
    ) = None
    catch_up: (
        Annotated[
            str,
            Meta(
                description="Of the occurrences that passed while nothing ran, `one`: the latest fires; `skip`: "
                "the latest, if it is at most 60 s late; `all`: each. It does not change a preview. Omitted: `one`.",
                extra_json_schema={"enum": ["one", "skip", "all"]},
            ),
        ]
        | None
    ) = None


class PreviewScheduleJson(RequestJson, kw_only=True):
    """A schedule, and how many of its instants to show."""

    schedule: ScheduleJson
    count: Annotated[int, Meta(ge=1, le=PREVIEW_COUNT_MAX, description="The largest number of instants.")] = 5
    from_: Annotated[InstantText, Meta(description="The earliest instant, inclusive. Omitted: now.")] | None = field(
        default=None, name="from"
    )


class OccurrenceJson(AnswerJson, kw_only=True):
    """An instant of a schedule, and the local time that it stands for."""

    at: InstantText
    local: Annotated[
        str,
        Meta(description="The local time of the instant, with its offset.", examples=["2027-03-14T03:30:00-04:00"]),
    ]
    asked: Annotated[
        str,
        Meta(
            description="The local time that the schedule asks for. If it is in a gap, it does not exist.",
            examples=["2027-03-14T02:30:00"],
        ),
    ]
    because: Annotated[
        str | None,
        Meta(
            description="What had to be decided. `gap`: the local time does not exist. `fold`: it exists twice. "
            "`feb29`: the year has no 29 February. `null`: nothing.",
            extra_json_schema={"enum": ["gap", "fold", "feb29", None]},
        ),
    ]


class PreviewAnswer(AnswerJson, kw_only=True):
    """The next instants of a schedule, in order. Fewer than asked for: the schedule ends with the last one."""

    instants: list[OccurrenceJson]
    tzdata: Annotated[
        str, Meta(description="The version of the time-zone rules by which they were computed.", examples=["2026b"])
    ]


def occurrence_json(occurrence: Occurrence) -> OccurrenceJson:
    return OccurrenceJson(
        at=format_instant(occurrence.instant_ms),
        local=occurrence.local,
        asked=occurrence.asked,
        because=occurrence.because,
    )
