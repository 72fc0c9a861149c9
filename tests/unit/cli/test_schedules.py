"""`schedule preview`: what it shows, without any server."""

from __future__ import annotations

import json

import pytest
from command_line import Run

from duetime.domain.schedule import TZDATA_VERSION

NEW_YORK = ("--timezone", "America/New_York")


def test_it_shows_local_time_offset_utc_and_why(run: Run) -> None:
    arguments = ("--at", "2027-03-13T02:30", *NEW_YORK, "--repeat", "daily", "--from", "2027-03-01T00:00:00Z")
    code, out, _ = run("schedule", "preview", *arguments, "--count", "3")
    assert code == 0
    heading, *rows, rules = out.splitlines()
    assert heading.split() == ["local", "time", "offset", "UTC", "why"]
    assert rows == [
        "Sat 2027-03-13 02:30:00  -05:00  2027-03-13 07:30:00Z",
        "Sun 2027-03-14 03:30:00  -04:00  2027-03-14 07:30:00Z  gap: 2027-03-14 02:30:00 does not exist",
        "Mon 2027-03-15 02:30:00  -04:00  2027-03-15 06:30:00Z",
    ]
    assert rules == f"time zone America/New_York, rules of tzdata {TZDATA_VERSION}"


def test_it_says_which_of_the_two_instants_of_a_fold_it_is_and_that_the_schedule_ends(run: Run) -> None:
    arguments = ("--at", "2027-11-07T01:30", *NEW_YORK, "--fold", "both", "--from", "2027-01-01T00:00:00Z")
    _, out, _ = run("schedule", "preview", *arguments)
    assert "fold: the first 01:30:00 of that day" in out
    assert "fold: the second 01:30:00 of that day" in out
    assert "the schedule ends here" in out


def test_it_explains_29_february(run: Run) -> None:
    arguments = ("--at", "2028-02-29T09:00", "--timezone", "UTC", "--repeat", "yearly", "--feb29", "mar1")
    _, out, _ = run("schedule", "preview", *arguments, "--from", "2029-01-01T00:00:00Z", "-c", "1")
    assert "2029-03-01 09:00:00Z  feb29: that year has no 29 February" in out


def test_it_says_that_there_is_no_occurrence(run: Run) -> None:
    code, out, _ = run("schedule", "preview", "--at", "2001-01-01T09:00", "--timezone", "UTC")
    assert code == 0
    assert out.startswith("no occurrence from 2")


def test_json_is_that_of_the_api(run: Run) -> None:
    arguments = ("--at", "2027-03-14T02:30", *NEW_YORK, "--from", "2027-01-01T00:00:00Z", "--json")
    _, out, _ = run("schedule", "preview", *arguments)
    assert json.loads(out) == {
        "instants": [
            {
                "at": "2027-03-14T07:30:00.000Z",
                "local": "2027-03-14T03:30:00-04:00",
                "asked": "2027-03-14T02:30:00",
                "because": "gap",
            }
        ],
        "tzdata": TZDATA_VERSION,
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--timezone", "Europe/Berln", "--at", "2027-03-15T09:00"),
            "--timezone must be the name of",
        ),
        (("--timezone", "UTC"), "--at is required"),
        (("--timezone", "UTC", "--at", "2027-03-15T09:00", "--exclude", "Easter"), "--exclude must have local dates"),
        (("--timezone", "UTC", "--repeat", "cron:0 0 30 2 *"), "day-of-month"),
        (("--timezone", "UTC", "--at", "2027-03-15T09:00", "--until", "2027-01-01"), "--until must not be before --at"),
        (("--timezone", "UTC", "--at", "2027-03-15T09:00", "--from", "today"), "--from must be"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(run: Run, arguments: tuple[str, ...], text: str) -> None:
    code, out, error = run("schedule", "preview", *arguments)
    assert (code, out) == (4, "")
    assert text in error


def test_an_option_with_a_wrong_value_is_wrong_usage(run: Run) -> None:
    code, _, error = run("schedule", "preview", "--timezone", "UTC", "--gap", "forward")
    assert code == 2
    assert "later" in error
