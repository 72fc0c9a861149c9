"""Wall-clock schedules: every policy, every refusal, and local times that zones made hard."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from duetime.domain.instants import format_instant, parse_instant
from duetime.domain.schedule import EXCLUDED_DATES_MAX, Schedule, check_schedule, occurrences, with_start
from duetime.errors import InvalidField

NEW_YORK = "America/New_York"


def schedule(at: str | None, timezone: str = NEW_YORK, **fields: Any) -> Schedule:
    return Schedule(at=at, timezone=timezone, **fields)


def instants(wanted: Schedule, count: int = 100, from_: str = "1970-01-01T00:00:00Z") -> list[str]:
    return [format_instant(each.instant_ms) for each in islice(occurrences(wanted, parse_instant(from_)), count)]


def local_times(wanted: Schedule, count: int = 100, from_: str = "1970-01-01T00:00:00Z") -> list[str]:
    return [each.local for each in islice(occurrences(wanted, parse_instant(from_)), count)]


def reasons(wanted: Schedule, count: int = 100) -> list[str | None]:
    return [each.because for each in islice(occurrences(wanted, 0), count)]


class TestASingleTime:
    def test_is_the_instant_at_which_the_clock_of_the_zone_shows_it(self) -> None:
        (only,) = occurrences(schedule("2027-03-15T09:00"), 0)
        assert format_instant(only.instant_ms) == "2027-03-15T13:00:00.000Z"
        assert (only.asked, only.local, only.because) == ("2027-03-15T09:00:00", "2027-03-15T09:00:00-04:00", None)

    @pytest.mark.parametrize(
        ("gap", "expected"),
        [
            (None, ["2027-03-14T03:30:00-04:00"]),
            ("later", ["2027-03-14T03:30:00-04:00"]),
            ("earlier", ["2027-03-14T01:30:00-05:00"]),
            ("skip", []),
        ],
    )
    def test_in_a_gap(self, gap: str | None, expected: list[str]) -> None:
        wanted = schedule("2027-03-14T02:30", gap=gap)
        assert local_times(wanted) == expected
        assert reasons(wanted) == ["gap"] * len(expected)

    def test_in_a_gap_still_says_what_was_asked_for(self) -> None:
        (only,) = occurrences(schedule("2027-03-14T02:30:15"), 0)
        assert only.asked == "2027-03-14T02:30:15"

    @pytest.mark.parametrize(
        ("fold", "expected"),
        [
            (None, ["2027-11-07T01:30:00-04:00"]),
            ("first", ["2027-11-07T01:30:00-04:00"]),
            ("second", ["2027-11-07T01:30:00-05:00"]),
            ("both", ["2027-11-07T01:30:00-04:00", "2027-11-07T01:30:00-05:00"]),
        ],
    )
    def test_in_a_fold(self, fold: str | None, expected: list[str]) -> None:
        wanted = schedule("2027-11-07T01:30", fold=fold)
        assert local_times(wanted) == expected
        assert reasons(wanted) == ["fold"] * len(expected)

    @pytest.mark.parametrize(
        ("at", "reason"),
        [
            ("2027-03-14T01:59:59", None),
            ("2027-03-14T02:00:00", "gap"),
            ("2027-03-14T02:59:59", "gap"),
            ("2027-03-14T03:00:00", None),
            ("2027-11-07T00:59:59", None),
            ("2027-11-07T01:00:00", "fold"),
            ("2027-11-07T01:59:59", "fold"),
            ("2027-11-07T02:00:00", None),
        ],
    )
    def test_gaps_and_folds_include_their_first_second_and_not_their_end(self, at: str, reason: str | None) -> None:
        assert reasons(schedule(at)) == [reason]

    def test_from_is_inclusive(self) -> None:
        wanted = schedule("2027-03-15T09:00")
        assert instants(wanted, from_="2027-03-15T13:00:00Z") == ["2027-03-15T13:00:00.000Z"]
        assert instants(wanted, from_="2027-03-15T13:00:00.001Z") == []


class TestRepeating:
    def test_daily_keeps_the_local_time_through_changes_of_the_clock(self) -> None:
        wanted = schedule("2027-03-13T09:00", repeat="daily")
        assert local_times(wanted, 3) == [
            "2027-03-13T09:00:00-05:00",
            "2027-03-14T09:00:00-04:00",
            "2027-03-15T09:00:00-04:00",
        ]

    def test_daily_out_of_a_gap_comes_back_to_its_time(self) -> None:
        wanted = schedule("2027-03-13T02:30", repeat="daily")
        assert local_times(wanted, 3) == [
            "2027-03-13T02:30:00-05:00",
            "2027-03-14T03:30:00-04:00",
            "2027-03-15T02:30:00-04:00",
        ]
        assert reasons(wanted, 3) == [None, "gap", None]

    def test_weekly_is_the_same_day_of_the_week(self) -> None:
        assert local_times(schedule("2027-12-24T09:00", "UTC", repeat="weekly"), 3) == [
            "2027-12-24T09:00:00+00:00",
            "2027-12-31T09:00:00+00:00",
            "2028-01-07T09:00:00+00:00",
        ]

    def test_monthly_on_the_31st_is_the_last_day_of_shorter_months_without_drift(self) -> None:
        wanted = schedule("2027-12-31T09:00", "UTC", repeat="monthly")
        assert [text[:10] for text in local_times(wanted, 6)] == [
            "2027-12-31", "2028-01-31", "2028-02-29", "2028-03-31", "2028-04-30", "2028-05-31",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("feb29", "dates"),
        [
            (None, ["2028-02-29", "2029-02-28", "2030-02-28", "2031-02-28", "2032-02-29"]),
            ("feb28", ["2028-02-29", "2029-02-28", "2030-02-28", "2031-02-28", "2032-02-29"]),
            ("mar1", ["2028-02-29", "2029-03-01", "2030-03-01", "2031-03-01", "2032-02-29"]),
            ("leap", ["2028-02-29", "2032-02-29", "2036-02-29", "2040-02-29", "2044-02-29"]),
        ],
    )
    def test_yearly_on_29_february(self, feb29: str | None, dates: list[str]) -> None:
        wanted = schedule("2028-02-29T09:00", "UTC", repeat="yearly", feb29=feb29)
        assert [text[:10] for text in local_times(wanted, 5)] == dates
        assert reasons(wanted, 5) == [None if date.endswith("02-29") else "feb29" for date in dates]

    def test_yearly_on_another_date_has_nothing_to_do_with_29_february(self) -> None:
        assert reasons(schedule("2028-02-28T09:00", "UTC", repeat="yearly"), 3) == [None, None, None]

    def test_every_second_is_every_second(self) -> None:
        found = instants(schedule("2027-01-01T00:00", "UTC", repeat="cron:* * * * * *"), 3)
        assert [text[17:19] for text in found] == ["00", "01", "02"]

    def test_2100_is_not_a_leap_year(self) -> None:
        wanted = schedule("2096-02-29T09:00", "UTC", repeat="yearly", feb29="leap")
        assert [text[:10] for text in local_times(wanted, 2)] == ["2096-02-29", "2104-02-29"]

    def test_29_february_that_is_moved_into_a_gap_is_because_of_29_february(self) -> None:
        # In Damascus clocks went forward at 02:00 on 1 March 1987.
        wanted = schedule("1984-02-29T02:30", "Asia/Damascus", repeat="yearly", feb29="mar1", until="1987-12-31")
        assert local_times(wanted)[-1] == "1987-03-01T03:30:00+03:00"
        assert reasons(wanted) == [None, "feb29", "feb29", "feb29"]

    def test_a_start_in_the_past_begins_with_the_next_occurrence(self) -> None:
        wanted = schedule("2001-03-31T09:00", "UTC", repeat="monthly")
        assert instants(wanted, 1, from_="2027-02-01T00:00:00Z") == ["2027-02-28T09:00:00.000Z"]

    def test_a_rule_has_its_start_as_occurrence_only_if_it_matches(self) -> None:
        wanted = schedule("2027-01-01T09:00", "UTC", repeat="rrule:FREQ=WEEKLY;BYDAY=MO")
        assert instants(wanted, 1) == ["2027-01-04T09:00:00.000Z"]

    def test_a_cron_expression_without_start_begins_now(self) -> None:
        wanted = with_start(schedule(None, repeat="cron:0 9 * * MON-FRI"), parse_instant("2027-03-12T14:30:00Z"))
        assert wanted.at == "2027-03-12T09:30:00"
        assert local_times(wanted, 1) == ["2027-03-15T09:00:00-04:00"]

    def test_a_time_that_is_given_is_not_replaced_by_now(self) -> None:
        wanted = schedule("2027-03-15T09:00", repeat="cron:0 9 * * *")
        assert with_start(wanted, 0) == wanted

    def test_until_is_local_and_inclusive(self) -> None:
        wanted = schedule("2027-07-01T23:00", repeat="daily", until="2027-07-03T23:00")
        assert instants(wanted) == ["2027-07-02T03:00:00.000Z", "2027-07-03T03:00:00.000Z", "2027-07-04T03:00:00.000Z"]

    def test_until_a_date_includes_that_day(self) -> None:
        assert len(instants(schedule("2027-07-01T23:59:59", repeat="daily", until="2027-07-03"))) == 3

    def test_until_may_be_the_only_occurrence(self) -> None:
        assert len(instants(schedule("2027-07-01T23:00", repeat="daily", until="2027-07-01T23:00"))) == 1

    def test_excluded_dates_are_those_that_the_rule_asks_for(self) -> None:
        wanted = schedule("2027-12-24T09:00", repeat="daily", exclude=("2027-12-25", "2027-12-26"), until="2027-12-28")
        assert [text[:10] for text in local_times(wanted)] == ["2027-12-24", "2027-12-27", "2027-12-28"]

    def test_an_excluded_date_counts_before_it_is_moved_out_of_a_gap(self) -> None:
        # In Beirut 00:30 on 28 March 2027 does not exist; `earlier` makes it 23:30 on the 27th.
        fields: dict[str, Any] = {"repeat": "daily", "gap": "earlier", "until": "2027-03-29"}
        kept = schedule("2027-03-28T00:30", "Asia/Beirut", exclude=("2027-03-27",), **fields)
        left_out = schedule("2027-03-28T00:30", "Asia/Beirut", exclude=("2027-03-28",), **fields)
        assert local_times(kept) == ["2027-03-27T23:30:00+02:00", "2027-03-29T00:30:00+03:00"]
        assert local_times(left_out) == ["2027-03-29T00:30:00+03:00"]

    def test_until_of_a_rule_may_be_in_utc(self) -> None:
        rule = "rrule:FREQ=DAILY;UNTIL=20270703T030000Z"
        assert len(instants(schedule("2027-07-01T23:00", repeat=rule))) == 2

    def test_occurrences_end_with_the_year_9998(self) -> None:
        wanted = schedule("9998-12-30T09:00", "UTC", repeat="daily")
        assert instants(wanted) == ["9998-12-30T09:00:00.000Z", "9998-12-31T09:00:00.000Z"]
        assert len(instants(schedule("9998-11-30T09:00", "UTC", repeat="monthly"))) == 2
        assert len(instants(schedule("9998-02-28T09:00", "UTC", repeat="yearly"))) == 1
        # In the year 9999 in UTC.
        assert instants(schedule("9998-12-31T19:00:00")) == []
        assert instants(schedule("9998-12-31T18:59:59")) == ["9998-12-31T23:59:59.000Z"]

    def test_nothing_is_before_1970(self) -> None:
        assert instants(schedule("1970-01-01T00:00", "Asia/Tokyo", repeat="daily"), 1) == ["1970-01-01T15:00:00.000Z"]


class TestFinerThanDaily:
    EVERY_HALF_HOUR = "cron:*/30 * * * *"

    def test_the_default_leaves_out_the_gap(self) -> None:
        wanted = schedule("2027-03-14T01:30", repeat=self.EVERY_HALF_HOUR)
        assert instants(wanted, 3) == [
            "2027-03-14T06:30:00.000Z",
            "2027-03-14T07:00:00.000Z",
            "2027-03-14T07:30:00.000Z",
        ]

    def test_the_default_fires_in_both_parts_of_a_fold_in_order(self) -> None:
        wanted = schedule("2027-11-07T00:30", repeat=self.EVERY_HALF_HOUR)
        assert local_times(wanted, 6) == [
            "2027-11-07T00:30:00-04:00",
            "2027-11-07T01:00:00-04:00",
            "2027-11-07T01:30:00-04:00",
            "2027-11-07T01:00:00-05:00",
            "2027-11-07T01:30:00-05:00",
            "2027-11-07T02:00:00-05:00",
        ]

    @pytest.mark.parametrize("gap", ["later", "earlier"])
    def test_times_moved_out_of_a_gap_to_others_count_once(self, gap: str) -> None:
        wanted = schedule("2027-03-14T00:00", repeat=self.EVERY_HALF_HOUR, gap=gap)
        found = instants(wanted, 8)
        assert found == sorted(set(found))
        assert reasons(wanted, 8) == [None] * 8

    def test_times_moved_later_out_of_a_gap_come_in_order_with_the_others(self) -> None:
        rule = "rrule:FREQ=DAILY;BYHOUR=2,3;BYMINUTE=15,45"
        wanted = schedule("2027-03-14T00:00", repeat=rule, gap="later", until="2027-03-14")
        assert [(each.asked[11:16], each.local[11:16]) for each in occurrences(wanted, 0)] == [
            ("03:15", "03:15"),
            ("03:45", "03:45"),
        ]
        rule = "rrule:FREQ=DAILY;BYHOUR=2,3;BYMINUTE=15,45;BYSETPOS=1,4"
        wanted = schedule("2027-03-14T00:00", repeat=rule, gap="later", until="2027-03-14")
        assert [(each.asked[11:16], each.local[11:16]) for each in occurrences(wanted, 0)] == [
            ("02:15", "03:15"),
            ("03:45", "03:45"),
        ]

    def test_times_moved_earlier_out_of_a_gap_come_in_order_with_the_others(self) -> None:
        rule = "rrule:FREQ=DAILY;BYHOUR=1,2;BYMINUTE=15,45;BYSETPOS=2,3"
        wanted = schedule("2027-03-14T00:00", repeat=rule, gap="earlier", until="2027-03-14")
        assert [(each.asked[11:16], each.local[11:16]) for each in occurrences(wanted, 0)] == [
            ("02:15", "01:15"),
            ("01:45", "01:45"),
        ]

    @pytest.mark.parametrize(
        ("repeat", "is_finer"),
        [
            ("cron:30 2 * * *", False),
            ("cron:0 30 2 * * *", False),
            ("cron:30 2,3 * * *", True),
            ("cron:*/30 2 * * *", True),
            ("rrule:FREQ=DAILY", False),
            ("rrule:FREQ=DAILY;BYHOUR=2,14", True),
            ("rrule:FREQ=HOURLY", True),
            ("rrule:FREQ=HOURLY;BYHOUR=2", False),
            ("rrule:FREQ=HOURLY;INTERVAL=24", False),
        ],
    )
    def test_a_rule_is_finer_than_daily_if_a_day_may_have_more_than_one_of_its_times(
        self, repeat: str, is_finer: bool
    ) -> None:
        # 02:30 does not exist on 14 March: the default is `skip` for finer rules, and `later` for the others.
        wanted = schedule("2027-03-13T02:30", repeat=repeat, until="2027-03-14")
        is_moved = any(each.because == "gap" for each in occurrences(wanted, 0))
        assert is_moved != is_finer


CASES = [
    # Lord Howe: clocks go forward and back by half an hour.
    ("Australia/Lord_Howe", "2027-10-03T02:15", "later", "2027-10-03T02:45:00+11:00"),
    ("Australia/Lord_Howe", "2027-10-03T02:15", "earlier", "2027-10-03T01:45:00+10:30"),
    ("Australia/Lord_Howe", "2027-04-04T01:45", "first", "2027-04-04T01:45:00+11:00"),
    ("Australia/Lord_Howe", "2027-04-04T01:45", "second", "2027-04-04T01:45:00+10:30"),
    # Samoa: 30 December 2011 did not exist; the gap is 24 hours long.
    ("Pacific/Apia", "2011-12-30T09:00", "later", "2011-12-31T09:00:00+14:00"),
    ("Pacific/Apia", "2011-12-30T09:00", "earlier", "2011-12-29T09:00:00-10:00"),
    ("Pacific/Apia", "2011-12-29T23:59:59", "later", "2011-12-29T23:59:59-10:00"),
    ("Pacific/Apia", "2011-12-31T00:00", "later", "2011-12-31T00:00:00+14:00"),
    # Kwajalein left out 21 August 1993.
    ("Pacific/Kwajalein", "1993-08-21T12:00", "later", "1993-08-22T12:00:00+12:00"),
    # Dublin: winter is the time with a negative saving; the local times are those of London.
    ("Europe/Dublin", "2027-03-28T01:30", "later", "2027-03-28T02:30:00+01:00"),
    ("Europe/Dublin", "2027-10-31T01:30", "first", "2027-10-31T01:30:00+01:00"),
    ("Europe/Dublin", "2027-10-31T01:30", "second", "2027-10-31T01:30:00+00:00"),
    ("Europe/Dublin", "2027-01-15T09:00", "later", "2027-01-15T09:00:00+00:00"),
    # Morocco: back for Ramadan, forward after it.
    ("Africa/Casablanca", "2025-02-23T02:30", "first", "2025-02-23T02:30:00+01:00"),
    ("Africa/Casablanca", "2025-02-23T02:30", "second", "2025-02-23T02:30:00+00:00"),
    ("Africa/Casablanca", "2025-03-15T09:00", "later", "2025-03-15T09:00:00+00:00"),
    ("Africa/Casablanca", "2025-04-06T02:30", "later", "2025-04-06T03:30:00+01:00"),
    # Sao Paulo: midnight did not exist; an evening hour was twice.
    ("America/Sao_Paulo", "2018-11-04T00:00", "later", "2018-11-04T01:00:00-02:00"),
    ("America/Sao_Paulo", "2018-11-04T00:30", "earlier", "2018-11-03T23:30:00-03:00"),
    ("America/Sao_Paulo", "2018-02-17T23:30", "first", "2018-02-17T23:30:00-02:00"),
    ("America/Sao_Paulo", "2018-02-17T23:30", "second", "2018-02-17T23:30:00-03:00"),
    # British Columbia: on 1 November 2026 clocks were not set back any more.
    ("America/Vancouver", "2026-11-01T01:30", "second", "2026-11-01T01:30:00-07:00"),
    ("America/Vancouver", "2027-01-15T09:00", "later", "2027-01-15T09:00:00-07:00"),
    ("America/Vancouver", "2027-03-14T02:30", "skip", "2027-03-14T02:30:00-07:00"),
    # Troll: two hours at once.
    ("Antarctica/Troll", "2027-03-28T02:30", "later", "2027-03-28T04:30:00+02:00"),
    ("Antarctica/Troll", "2027-10-31T01:30", "second", "2027-10-31T01:30:00+00:00"),
    # Offsets that are not whole hours, and one with seconds.
    ("Asia/Kathmandu", "2027-06-01T00:00", "later", "2027-06-01T00:00:00+05:45"),
    ("Africa/Monrovia", "1971-06-01T00:00", "later", "1971-06-01T00:00:00-00:44:30"),
    # The first and last moments of years, on both sides of the date line.
    ("Pacific/Kiritimati", "2027-12-31T23:59:59", "later", "2027-12-31T23:59:59+14:00"),
    ("Etc/GMT+12", "2028-01-01T00:00", "later", "2028-01-01T00:00:00-12:00"),
]


@pytest.mark.parametrize(("zone", "at", "policy", "expected"), CASES)
def test_local_times_that_zones_made_hard(zone: str, at: str, policy: str, expected: str) -> None:
    field = "gap" if policy in ("later", "earlier", "skip") else "fold"
    assert local_times(schedule(at, zone, **{field: policy})) == [expected]


def test_a_daily_schedule_over_the_day_that_samoa_left_out() -> None:
    wanted = schedule("2011-12-29T09:00", "Pacific/Apia", repeat="daily")
    # The 30th and the 31st are the same instant, which counts once.
    assert local_times(wanted, 3) == [
        "2011-12-29T09:00:00-10:00",
        "2011-12-31T09:00:00+14:00",
        "2012-01-01T09:00:00+14:00",
    ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "field", "text"),
        [
            ({"timezone": "Europe/Berln"}, "timezone", "did you mean Europe/Berlin?"),
            ({"timezone": "america/new_york"}, "timezone", "did you mean America/New_York?"),
            ({"timezone": "Paris"}, "timezone", "did you mean Europe/Paris?"),
            ({"timezone": "Middle-earth/Shire"}, "timezone", "such as America/New_York"),
            ({"timezone": "../../etc/passwd"}, "timezone", "IANA time zone"),
            ({"timezone": "Factory"}, "timezone", "IANA time zone"),
            ({"timezone": ""}, "timezone", "IANA time zone"),
            ({"timezone": "x" * 100_000}, "timezone", "IANA time zone"),
            ({"at": None}, "at", "is required"),
            ({"at": None, "repeat": "daily"}, "at", "is required"),
            ({"at": "2027-03-15"}, "at", "needs a time of day"),
            ({"at": "2027-03-15T09:00Z"}, "at", "without offset"),
            ({"at": "2027-03-15T09:00:00+01:00"}, "at", "without offset"),
            ({"at": "2027-03-15T24:00"}, "at", "time of day"),
            ({"at": "2027-03-15T09:60"}, "at", "time of day"),
            ({"at": "2027-03-15T09:00:60"}, "at", "time of day"),
            ({"at": "2027-02-29T09:00"}, "at", "day that exists"),
            ({"at": "1969-12-31T09:00"}, "at", "from 1970 to 9998"),
            ({"at": "9999-01-01T00:00"}, "at", "from 1970 to 9998"),
            ({"at": "tomorrow"}, "at", "local time such as"),
            ({"at": "٢٠٢٧-03-15T09:00"}, "at", "local time such as"),
            ({"gap": "forward"}, "gap", "later, earlier, skip"),
            ({"fold": "third"}, "fold", "first, second, both"),
            ({"catchUp": "some"}, "catchUp", "one, skip, all"),
            ({"feb29": "feb28"}, "feb29", "yearly"),
            ({"feb29": "mar2", "repeat": "yearly"}, "feb29", "feb28, mar1, leap"),
            ({"until": "2027-03-15T08:59"}, "until", "must not be before schedule.at"),
            ({"until": "2027-03-14"}, "until", "must not be before schedule.at"),
            ({"until": "2027-03-16T09:00Z"}, "until", "without offset"),
            ({"exclude": ("2027-13-01",)}, "exclude", "local dates"),
            ({"exclude": ("Christmas",)}, "exclude", "local dates"),
            ({"exclude": ("2027-12-25T00:00",)}, "exclude", "local dates"),
            ({"exclude": ("2027-01-01",) * (EXCLUDED_DATES_MAX + 1)}, "exclude", "at most 1,000"),
            ({"repeat": "hourly"}, "repeat", "daily, weekly, monthly, yearly"),
            ({"repeat": "ical:FREQ=DAILY"}, "repeat", "daily, weekly, monthly, yearly"),
            ({"repeat": "Daily"}, "repeat", "daily, weekly, monthly, yearly"),
            ({"repeat": "cron:* * * *"}, "repeat", "five fields"),
            ({"repeat": "cron:60 * * * *"}, "repeat", "minute is wrong"),
            ({"repeat": "cron:@reboot"}, "repeat", "@hourly"),
            ({"repeat": "rrule:FREQ=FORTNIGHTLY"}, "repeat", "FREQ"),
            ({"repeat": "rrule:INTERVAL=2"}, "repeat", "must have FREQ"),
        ],
    )
    def test_name_the_field(self, fields: dict[str, Any], field: str, text: str) -> None:
        given = {"at": "2027-03-15T09:00", "timezone": NEW_YORK, **fields}
        given["catch_up"] = given.pop("catchUp", None)
        with pytest.raises(InvalidField) as error:
            check_schedule(Schedule(**given))
        assert error.value.field == f"schedule.{field}"
        assert error.value.detail.startswith(f"schedule.{field} ")
        assert text in error.value.detail
        assert len(error.value.detail) < 500

    def test_a_rule_without_any_occurrence_is_refused(self) -> None:
        for repeat, fields in (
            ("cron:0 0 1 6 *", {"until": "2027-05-31"}),
            ("rrule:FREQ=DAILY;UNTIL=20270101", {}),
            ("daily", {"exclude": ("2027-03-15",), "until": "2027-03-15"}),
        ):
            with pytest.raises(InvalidField, match="no occurrence"):
                check_schedule(schedule("2027-03-15T09:00", repeat=repeat, **fields))

    def test_a_rule_needs_no_start_and_a_thousand_dates_may_be_excluded(self) -> None:
        dates = tuple(f"{year}-{month:02d}-01" for year in range(2027, 2111) for month in range(1, 13))
        assert len(dates[:EXCLUDED_DATES_MAX]) == EXCLUDED_DATES_MAX
        check_schedule(schedule(None, repeat="cron:@daily", until="2030-01-01", exclude=dates[:EXCLUDED_DATES_MAX]))
        check_schedule(schedule(None, repeat="rrule:FREQ=DAILY"))

    def test_a_single_time_in_a_gap_that_is_skipped_is_not_an_error_of_the_schedule(self) -> None:
        check_schedule(schedule("2027-03-14T02:30", gap="skip"))
