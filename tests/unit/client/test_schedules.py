"""The client's preview of schedules, against a real server on a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from threaded_server import free_port, serving

from duetime.client import Client, InvalidField, Occurrence, Schedule
from duetime.domain.schedule import TZDATA_VERSION


@pytest.fixture(scope="module")
def duetime() -> Iterator[Client]:
    with serving(free_port()) as url, Client(url) as client:
        yield client


def test_a_schedule_is_previewed_with_instants_as_datetimes(duetime: Client) -> None:
    schedule = Schedule(at="2027-03-13T02:30", timezone="America/New_York", repeat="daily", exclude=["2027-03-13"])
    found = duetime.preview_schedule(schedule, count=2, from_=datetime(2027, 3, 1, tzinfo=UTC))
    assert found.tzdata == TZDATA_VERSION
    assert found.instants == (
        Occurrence(
            at=datetime(2027, 3, 14, 7, 30, tzinfo=UTC),
            local="2027-03-14T03:30:00-04:00",
            asked="2027-03-14T02:30:00",
            because="gap",
        ),
        Occurrence(
            at=datetime(2027, 3, 15, 6, 30, tzinfo=UTC),
            local="2027-03-15T02:30:00-04:00",
            asked="2027-03-15T02:30:00",
        ),
    )


def test_a_mapping_has_the_names_of_the_api(duetime: Client) -> None:
    now = datetime.now(UTC)
    found = duetime.preview_schedule({"timezone": "UTC", "repeat": "cron:@hourly", "catchUp": "all"})
    assert len(found.instants) == 5
    assert found.instants[0].at > now.replace(minute=0, second=0, microsecond=0)


def test_an_error_names_the_field(duetime: Client) -> None:
    with pytest.raises(InvalidField, match=r"did you mean Europe/Berlin\?") as error:
        duetime.preview_schedule({"at": "2027-03-15T09:00", "timezone": "Europe/Berln"})
    assert error.value.field == "schedule.timezone"
