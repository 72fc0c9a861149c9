"""Requests about schedules: from the JSON of `wire` to the types of the domain, as `decode.py`."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from duetime import wire
from duetime.api.decode_json import Body, decoded
from duetime.api.fields import checked_instant
from duetime.domain.schedule import Schedule

__all__ = ["PreviewQuery", "decode_preview"]

_preview = msgspec.json.Decoder(wire.PreviewScheduleJson)


class PreviewQuery(Struct, frozen=True):
    schedule: Schedule
    count: int
    from_ms: int | None


def decode_preview(body: Body) -> PreviewQuery:
    """The schedule is not checked yet: to look for its first occurrence takes time."""
    given = decoded(_preview, body)
    return PreviewQuery(
        schedule=domain_schedule(given.schedule),
        count=given.count,
        from_ms=None if given.from_ is None else checked_instant("from", given.from_),
    )


def domain_schedule(given: wire.ScheduleJson) -> Schedule:
    return Schedule(
        timezone=given.timezone,
        at=given.at,
        gap=given.gap,
        fold=given.fold,
        repeat=given.repeat,
        exclude=tuple(given.exclude or ()),
        until=given.until,
        feb29=given.feb29,
        catch_up=given.catch_up,
    )
