"""Previews of schedules: what is answered, who may ask, and that one preview does not hold up other requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from recording_service import World, token

from duetime.api.routes import PREFIX
from duetime.domain.schedule import TZDATA_VERSION

GAP = {"at": "2027-03-14T02:30", "timezone": "America/New_York"}


async def preview(world: World, schedule: dict[str, Any], **others: Any) -> tuple[int, Any]:
    response, answer = await world.ask("schedules/preview", {"schedule": schedule, **others})
    return response.status, answer


async def test_the_answer_has_each_instant_with_its_local_time_and_the_version_of_the_rules(world: World) -> None:
    assert await preview(world, {**GAP, "gap": "later"}, count=3) == (
        200,
        {
            "instants": [
                {
                    "at": "2027-03-14T07:30:00.000Z",
                    "local": "2027-03-14T03:30:00-04:00",
                    "asked": "2027-03-14T02:30:00",
                    "because": "gap",
                }
            ],
            "tzdata": TZDATA_VERSION,
        },
    )


async def test_because_is_null_for_an_ordinary_local_time(world: World) -> None:
    _, answer = await preview(world, {"at": "2027-03-15T09:00", "timezone": "UTC"})
    assert [instant["because"] for instant in answer["instants"]] == [None]


async def test_a_single_time_in_a_gap_that_is_skipped_has_no_instants(world: World) -> None:
    assert (await preview(world, {**GAP, "gap": "skip"}))[1]["instants"] == []


async def test_the_preview_begins_now_and_has_five_instants(world: World) -> None:
    _, answer = await preview(world, {"at": "2001-01-01T09:00", "timezone": "UTC", "repeat": "daily"})
    assert [instant["at"][:10] for instant in answer["instants"]] == [f"2027-01-{day}" for day in range(15, 20)]


async def test_from_is_inclusive_and_may_be_in_the_past(world: World) -> None:
    hourly = {"timezone": "UTC", "repeat": "cron:@hourly"}
    _, answer = await preview(world, hourly, count=2, **{"from": "2020-06-01T10:00:00Z"})
    assert [instant["at"] for instant in answer["instants"]] == ["2020-06-01T10:00:00.000Z", "2020-06-01T11:00:00.000Z"]


async def test_a_rule_without_start_begins_now_also_if_the_preview_begins_later(world: World) -> None:
    rule = {"timezone": "UTC", "repeat": "rrule:FREQ=DAILY;INTERVAL=10"}
    _, answer = await preview(world, rule, count=1, **{"from": "2027-01-16T00:00:00Z"})
    assert answer["instants"][0]["at"] == "2027-01-25T08:00:00.000Z"


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({}, "schedule", "is required"),
        ({"schedule": {"at": "2027-03-15T09:00"}}, "schedule.timezone", "is required"),
        ({"schedule": {**GAP, "timezone": "Europe/Berln"}}, "schedule.timezone", "did you mean Europe/Berlin?"),
        ({"schedule": {**GAP, "zone": "UTC"}}, "schedule.zone", "is not a field"),
        ({"schedule": {**GAP, "at": 5}}, "schedule.at", "must be a string"),
        ({"schedule": {**GAP, "gap": "forward"}}, "schedule.gap", "later, earlier, skip"),
        ({"schedule": {**GAP, "exclude": [5]}}, "schedule.exclude[0]", "a string"),
        ({"schedule": {**GAP, "repeat": "cron:0 0 30 2 *"}}, "schedule.repeat", "day-of-month"),
        ({"schedule": {**GAP, "repeat": "rrule:FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"}}, "schedule.repeat", "never"),
        ({"schedule": GAP, "count": 0}, "count", "at least 1"),
        ({"schedule": GAP, "count": 1_001}, "count", "at most 1000"),
        ({"schedule": GAP, "from": "2027-03-14"}, "from", "needs a time and an offset"),
    ],
)
async def test_errors_name_the_field(world: World, body: Any, field: str, text: str) -> None:
    response, problem = await world.ask("schedules/preview", body)
    assert (response.status, problem["code"], problem["field"]) == (400, "invalid_field", field)
    assert text in problem["detail"]


async def test_a_million_excluded_dates_are_refused_before_they_are_decoded() -> None:
    world = World()
    body = json.dumps({"schedule": {**GAP, "exclude": ["2027-01-01"] * 1_000_000}}).encode()
    limit = world.api._posts[f"{PREFIX}schedules/preview"][2]
    assert limit == 64 * 1024
    assert (await world.ask("schedules/preview", body))[0].status == 413


async def test_a_preview_needs_the_verb_read_in_any_namespace() -> None:
    world = World(token("reader", namespaces=("orders",), verbs=("read",)), token("writer", verbs=("write",)))
    for bearer, status in (("reader", 200), ("writer", 403), ("nobody", 401)):
        assert (await world.ask("schedules/preview", {"schedule": GAP}, bearer=bearer))[0].status == status


async def test_other_requests_get_their_turn_during_a_long_preview(world: World) -> None:
    minutely = {"at": "2027-01-01T00:00", "timezone": "UTC", "repeat": "cron:* * * * *"}
    long = asyncio.create_task(preview(world, minutely, count=1_000))
    turns = 0
    while not long.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await long)[1]["instants"]) == 1_000
    assert turns > 20
