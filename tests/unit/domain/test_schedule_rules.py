"""Rules of RFC 5545 as dateutil reads them, cron as cronsim reads it, and a limit on the work of both."""
# ruff: noqa: DTZ001 - local times have no zone here

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, timedelta
from itertools import islice

import pytest
from cronsim import CronSim
from dateutil.rrule import rrulestr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from duetime.domain.schedule import SEARCH_STEPS_MAX, Schedule, Steps, check_schedule, occurrences
from duetime.domain.schedule.cron import parse_cron
from duetime.domain.schedule.rrule import parse_rrule
from duetime.domain.schedule.rule import Rule
from duetime.domain.schedule.steps import TooManySteps
from duetime.errors import InvalidField

EPOCH = datetime(1970, 1, 1)


def seconds(local: datetime) -> int:
    return (local - EPOCH) // timedelta(seconds=1)


def times(rule: Rule, count: int, from_: datetime = EPOCH) -> list[datetime]:
    found: list[datetime] = []
    steps = Steps()
    local_s: int | None = seconds(from_)
    while local_s is not None and len(found) < count:
        local_s = rule.next_from(local_s, steps)
        steps.found()
        if local_s is not None:
            found.append(EPOCH + timedelta(seconds=local_s))
            local_s += 1
    return found


def rrule_times(text: str, start: datetime, count: int) -> list[datetime]:
    return times(parse_rrule(text, seconds(start))[0], count)


class TestRecurrenceRules:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            # From the examples of RFC 5545, 3.8.5.3; all start at 1997-09-02T09:00.
            ("FREQ=DAILY;INTERVAL=10;COUNT=5", ["09-02", "09-12", "09-22", "10-02", "10-12"]),
            ("FREQ=WEEKLY;INTERVAL=2;COUNT=4;BYDAY=TU,TH", ["09-02", "09-04", "09-16", "09-18"]),
            ("FREQ=MONTHLY;COUNT=3;BYDAY=1FR", ["09-05", "10-03", "11-07"]),
            ("FREQ=MONTHLY;COUNT=3;BYDAY=-2MO", ["09-22", "10-20", "11-17"]),
            ("FREQ=MONTHLY;BYMONTHDAY=-3;COUNT=3", ["09-28", "10-29", "11-28"]),
            ("FREQ=YEARLY;INTERVAL=3;COUNT=3;BYYEARDAY=1,100,200", ["2000-01-01", "2000-04-09", "2000-07-18"]),
            ("FREQ=YEARLY;BYDAY=20MO;COUNT=3", ["1998-05-18", "1999-05-17", "2000-05-15"]),
            ("FREQ=YEARLY;BYWEEKNO=20;BYDAY=MO;COUNT=3", ["1998-05-11", "1999-05-17", "2000-05-15"]),
            ("FREQ=MONTHLY;BYDAY=FR;BYMONTHDAY=13;COUNT=3", ["1998-02-13", "1998-03-13", "1998-11-13"]),
            ("FREQ=MONTHLY;COUNT=3;BYDAY=TU,WE,TH;BYSETPOS=3", ["09-04", "10-07", "11-06"]),
            ("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2;COUNT=3", ["09-29", "10-30", "11-27"]),
            (
                "FREQ=YEARLY;INTERVAL=4;BYMONTH=11;BYDAY=TU;BYMONTHDAY=2,3,4,5,6,7,8;COUNT=2",
                ["1997-11-04", "2001-11-06"],
            ),
            ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;COUNT=2", ["2000-02-29", "2004-02-29"]),
            ("FREQ=MONTHLY;BYMONTHDAY=31;COUNT=3", ["10-31", "12-31", "1998-01-31"]),  # months without it are left out
        ],
    )
    def test_are_those_of_the_standard(self, text: str, expected: list[str]) -> None:
        found = rrule_times(text, datetime(1997, 9, 2, 9), 10)
        assert [f"{at:%Y-%m-%d}" for at in found] == [day if len(day) > 5 else f"1997-{day}" for day in expected]
        assert all((at.hour, at.minute, at.second) == (9, 0, 0) for at in found)

    @pytest.mark.parametrize(
        ("text", "count", "last"),
        [
            ("FREQ=MINUTELY;COUNT=100000", 100_000, datetime(2027, 1, 1, 9) + timedelta(minutes=99_999)),
            ("FREQ=SECONDLY;INTERVAL=90;COUNT=10000", 10_000, datetime(2027, 1, 1, 9) + timedelta(seconds=899_910)),
            ("FREQ=HOURLY;BYMINUTE=15,45;COUNT=3", 3, datetime(2027, 1, 1, 10, 15)),
            ("FREQ=DAILY;BYHOUR=8,10;COUNT=4", 4, datetime(2027, 1, 3, 8)),
        ],
    )
    def test_count_ends_with_the_last_time(self, text: str, count: int, last: datetime) -> None:
        rule = parse_rrule(text, seconds(datetime(2027, 1, 1, 9)))[0]
        assert times(rule, 2, last) == [last]
        if count <= 10_000:
            assert len(times(rule, count + 5)) == count

    @pytest.mark.parametrize(
        "text",
        [
            "FREQ=MINUTELY;INTERVAL=500",
            "FREQ=HOURLY;INTERVAL=7;BYMINUTE=5,50",
            "FREQ=MINUTELY;BYMINUTE=0,30;BYSECOND=10,20",
            "FREQ=SECONDLY;INTERVAL=11;BYHOUR=9,23",
            "FREQ=MONTHLY;BYDAY=MO,WE;BYHOUR=8,17;BYSETPOS=1,-1",
            "FREQ=WEEKLY;INTERVAL=2;BYDAY=SU,TU;WKST=SU",
            "FREQ=DAILY;BYHOUR=8,9,10",
        ],
    )
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
    def test_count_leaves_the_first_times_of_the_rule(self, text: str, count: int) -> None:
        start = datetime(2027, 1, 1, 9, 0, 5)
        assert rrule_times(f"{text};COUNT={count}", start, count + 1) == rrule_times(text, start, count)

    @pytest.mark.parametrize(
        ("text", "days"),
        [
            ("FREQ=WEEKLY;BYDAY=SU,WE;BYSETPOS=1;WKST=SU", ["01-10", "01-17", "01-24"]),
            ("FREQ=WEEKLY;BYDAY=SU,WE;BYSETPOS=1;WKST=MO", ["01-06", "01-13", "01-20"]),
            ("FREQ=WEEKLY;INTERVAL=2;BYDAY=SU,WE;BYSETPOS=-1;WKST=SU", ["01-06", "01-20", "02-03"]),
            ("FREQ=WEEKLY;INTERVAL=2;BYDAY=SU,WE;BYSETPOS=-1;WKST=MO", ["01-10", "01-24", "02-07"]),
            ("FREQ=WEEKLY;INTERVAL=52;BYDAY=MO,FR;BYSETPOS=-1;WKST=TH", ["2028-01-03", "2029-01-01", "2029-12-31"]),
        ],
    )
    def test_the_set_of_a_week_depends_on_the_day_on_which_weeks_begin(self, text: str, days: list[str]) -> None:
        found = rrule_times(text, datetime(2027, 1, 6, 9), 3)  # a Wednesday
        assert [f"{at:%Y-%m-%d}" for at in found] == [day if len(day) > 5 else f"2027-{day}" for day in days]

    @pytest.mark.parametrize(
        ("text", "last"),
        [
            ("FREQ=DAILY;UNTIL=20270103", datetime(2027, 1, 3, 9)),
            ("FREQ=DAILY;UNTIL=20270103T090000", datetime(2027, 1, 3, 9)),
            ("FREQ=DAILY;UNTIL=20270103T085959", datetime(2027, 1, 2, 9)),
        ],
    )
    def test_until_is_inclusive(self, text: str, last: datetime) -> None:
        assert rrule_times(text, datetime(2027, 1, 1, 9), 10)[-1] == last

    def test_the_set_of_a_week_is_the_whole_week_also_the_first(self) -> None:
        # dateutil cuts the first week at the start. The start is a Wednesday; the set of its week begins on Monday.
        found = rrule_times("FREQ=WEEKLY;BYDAY=MO,WE,FR;BYSETPOS=2", datetime(2027, 1, 6, 9), 2)
        assert found == [datetime(2027, 1, 6, 9), datetime(2027, 1, 13, 9)]

    @pytest.mark.parametrize("week", [1, 2, 51, 52, 53, -1, -2, -52, -53])
    @pytest.mark.parametrize("week_start", range(7))
    def test_weeks_are_those_of_the_iso_calendar_also_over_the_end_of_a_year(self, week: int, week_start: int) -> None:
        name = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")[week_start]
        rule = parse_rrule(f"FREQ=YEARLY;BYWEEKNO={week};WKST={name}", seconds(datetime(2000, 1, 1)))[0]
        first, last = date(2000, 1, 1).toordinal(), date(2012, 12, 31).toordinal()
        expected = [day for day in map(date.fromordinal, range(first, last + 1)) if is_in_week(day, week, week_start)]
        found = times(rule, len(expected) + 1)[: len(expected)]
        assert [at.date() for at in found] == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "has no part"),
            ("FREQ", "needs a value"),
            ("FREQ=DAILY;FREQ=DAILY", "only once"),
            ("FREQ=DAILY;DTSTART=20270101", "the start is `at`"),
            ("RRULE:FREQ=DAILY", "the start is `at`"),
            ("FREQ=DAILY;COUNT=1;UNTIL=20280101", "both COUNT and UNTIL"),
            ("FREQ=DAILY;INTERVAL=0", "INTERVAL a number from 1"),
            ("FREQ=DAILY;INTERVAL=99999999999999999999", "INTERVAL a number from 1"),
            ("FREQ=DAILY;COUNT=-1", "COUNT a number from 1"),
            ("FREQ=DAILY;BYHOUR=24", "BYHOUR numbers from 0 to 23"),
            ("FREQ=DAILY;BYHOUR=1,,2", "BYHOUR numbers"),
            ("FREQ=DAILY;BYSECOND=60", "BYSECOND numbers from 0 to 59"),
            ("FREQ=YEARLY;BYMONTHDAY=0", "BYMONTHDAY numbers from 1 to 31, or -31 to -1"),
            ("FREQ=WEEKLY;BYMONTHDAY=1", "BYMONTHDAY with FREQ=WEEKLY"),
            ("FREQ=MONTHLY;BYYEARDAY=1", "BYYEARDAY with FREQ=MONTHLY"),
            ("FREQ=MONTHLY;BYWEEKNO=1", "BYWEEKNO only with FREQ=YEARLY"),
            ("FREQ=WEEKLY;BYDAY=1MO", "numbers in BYDAY only with"),
            ("FREQ=MONTHLY;BYDAY=XX", "days such as MO"),
            ("FREQ=MONTHLY;BYDAY=0MO", "days such as MO"),
            ("FREQ=MONTHLY;BYSETPOS=1", "another BY part"),
            ("FREQ=WEEKLY;WKST=X", "WKST one of"),
            ("FREQ=DAILY;UNTIL=tomorrow", "UNTIL a date or time"),
            ("FREQ=DAILY;UNTIL=20270230", "UNTIL a date or time"),
            ("FREQ=DAILY;RSCALE=HEBREW", "has no part 'RSCALE'"),
            ("FREQ=DAİLY", "must be ASCII"),
            ("FREQ=DAILY;BYHOUR=" + ",".join(["1"] * 1_000), "at most 1,024 characters"),
            (
                "FREQ=DAILY;BYHOUR=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23;BYMINUTE="
                + ",".join(map(str, range(60)))
                + ";BYSECOND=0,30",
                "at most 288 times of day",
            ),
        ],
    )
    def test_that_are_wrong_are_refused_with_the_reason(self, text: str, message: str) -> None:
        with pytest.raises(ValueError) as error:
            parse_rrule(text, 0)
        assert message in str(error.value)


def is_in_week(day: date, week: int, week_start: int) -> bool:
    """The week that begins on `week_start` and has the day belongs to the year of its fourth day."""
    begin = day - timedelta(days=(day.weekday() - week_start) % 7)
    fourth = begin + timedelta(days=3)
    number = (fourth.timetuple().tm_yday - 1) // 7 + 1
    if week > 0:
        return number == week
    if fourth.year > day.year:  # the last days of December: the weeks of the next year are not counted from its end
        return False
    if fourth.year < day.year:  # the first days of January: likewise, but for the last week
        return week == -1
    end = date(day.year, 12, 31)
    last = end - timedelta(days=(end.weekday() - fourth.weekday()) % 7)
    return number - ((last.timetuple().tm_yday - 1) // 7 + 1) - 1 == week


def some(values: range) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([value for value in values if value]), min_size=1, max_size=4, unique=True)


@st.composite
def rules(draw: st.DrawFn) -> str:
    frequency = draw(st.sampled_from(("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")))
    parts: dict[str, object] = {"FREQ": frequency}
    if draw(st.booleans()):
        parts["INTERVAL"] = draw(st.integers(1, 12) | st.sampled_from((24, 25, 60, 61, 1_440, 5_000)))
    lists = {"BYMONTH": range(1, 13), "BYHOUR": range(1, 24), "BYMINUTE": range(1, 60), "BYSECOND": range(1, 60)}
    if frequency != "WEEKLY":
        lists["BYMONTHDAY"] = range(-31, 32)
    if frequency in ("YEARLY", "HOURLY", "MINUTELY", "SECONDLY"):
        lists["BYYEARDAY"] = range(-366, 367)
    if frequency == "YEARLY":
        # Not the last weeks: dateutil counts those of the year before with the first week of this year.
        lists["BYWEEKNO"] = range(-50, 52)
    for name in draw(st.lists(st.sampled_from(sorted(lists)), max_size=3, unique=True)):
        parts[name] = ",".join(map(str, draw(some(lists[name]))))
    if draw(st.booleans()):
        days = draw(st.lists(st.sampled_from(("MO", "TU", "WE", "TH", "FR", "SA", "SU")), min_size=1, unique=True))
        if frequency in ("YEARLY", "MONTHLY") and "BYWEEKNO" not in parts and draw(st.booleans()):
            days = [f"{draw(st.sampled_from((1, 2, 4, 5, -1, -2)))}{day}" for day in days]
        parts["BYDAY"] = ",".join(days)
    if draw(st.booleans()):
        parts["WKST"] = draw(st.sampled_from(("MO", "SU", "TH")))
    if any(name.startswith("BY") for name in parts) and frequency != "WEEKLY" and draw(st.booleans()):
        parts["BYSETPOS"] = draw(st.sampled_from((1, 2, -1, -2, "1,-1")))
    if draw(st.integers(0, 3)) == 0:
        parts["COUNT"] = draw(st.integers(1, 8))
    return ";".join(f"{name}={value}" for name, value in parts.items())


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(rules(), st.datetimes(datetime(1999, 1, 1), datetime(2030, 1, 1)))
def test_rules_have_the_times_that_dateutil_finds(text: str, start: datetime) -> None:
    start = start.replace(microsecond=0)
    try:
        rule = parse_rrule(text, seconds(start))[0]
        found = times(rule, 8)
    except (ValueError, TooManySteps):  # dateutil would search for long
        assume(False)
    assume(len(found) == 8 or (found and "COUNT" in text))
    # dateutil looks at every hour, minute or second in between.
    unit = {"HOURLY": 3_600, "MINUTELY": 60, "SECONDLY": 1}.get(text[5:].partition(";")[0], 4 * 86_400)
    assume(found[-1] - start < timedelta(seconds=5_000 * unit))
    try:
        expected = list(islice(rrulestr(text, dtstart=start), len(found)))
    except ValueError:  # it refuses some rules that never match
        expected = []
    assert found == expected


@st.composite
def expressions(draw: st.DrawFn) -> str:
    def field(least: int, most: int) -> str:
        low = draw(st.integers(least, most))
        high = draw(st.integers(low, most))
        step = draw(st.integers(1, 12))
        forms = ("*", "*", f"{low}", f"{low}-{high}", f"*/{step}", f"{low},{high}", f"{low}-{high}/{step}")
        return draw(st.sampled_from(forms))

    day = draw(st.sampled_from((field(1, 31), "L", "LW", "15,L")))
    weekday = draw(st.sampled_from((field(0, 7), "MON-FRI", "SUN", "5#2", "1L", "7")))
    fields = [field(0, 59), field(0, 23), day, field(1, 12), weekday]
    return " ".join(([field(0, 59)] if draw(st.booleans()) else []) + fields)


@settings(max_examples=400, deadline=None)
@given(expressions(), st.datetimes(datetime(1999, 1, 1), datetime(2090, 1, 1)))
def test_cron_expressions_have_the_times_that_cronsim_finds(expression: str, start: datetime) -> None:
    start = start.replace(microsecond=0)
    try:
        rule = parse_cron(expression, seconds(start))
        found = times(rule, 6)
    except (ValueError, TooManySteps):
        assume(False)
    assume(found and found[-1] < start + timedelta(days=40 * 366))
    expected = list(islice(CronSim(expression, start - timedelta(seconds=1)), len(found)))
    assert found == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("@daily", "2027-01-02 00:00:00"),
        ("@hourly", "2027-01-01 10:00:00"),
        ("@weekly", "2027-01-03 00:00:00"),
        ("@Monthly", "2027-02-01 00:00:00"),
        ("@yearly", "2028-01-01 00:00:00"),
        ("0 9 * * 0", "2027-01-03 09:00:00"),
        ("0 9 * * 7", "2027-01-03 09:00:00"),
        ("0 9 13 * 5", "2027-01-08 09:00:00"),  # the 13th or a Friday
        ("0 0 1-31 * 1", "2027-01-02 00:00:00"),  # any day of the month, or a Monday: every day
        ("30 0 9 * * *", "2027-01-02 09:00:30"),
    ],
)
def test_cron_as_its_users_know_it(expression: str, expected: str) -> None:
    rule = parse_cron(expression, seconds(datetime(2027, 1, 1, 9, 0, 31)))
    assert str(times(rule, 1)[0]) == expected


HOSTILE = [
    "rrule:FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30",
    "rrule:FREQ=MINUTELY;BYMONTH=2;BYMONTHDAY=30",
    "rrule:FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30",
    "rrule:FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
    "rrule:FREQ=MONTHLY;INTERVAL=12;BYMONTHDAY=31",  # from a start in February
    "rrule:FREQ=WEEKLY;BYMONTH=2;BYDAY=MO;BYSETPOS=366",
    "rrule:FREQ=YEARLY;BYDAY=MO,TU,WE,TH,FR,SA,SU;BYSETPOS=366;BYMONTH=1",
    "rrule:FREQ=MINUTELY;INTERVAL=60;BYMINUTE=59",
    "rrule:FREQ=SECONDLY;INTERVAL=60;BYSECOND=59",
    "rrule:FREQ=SECONDLY;INTERVAL=999983;BYHOUR=1;BYMINUTE=1;BYSECOND=1",
    "rrule:FREQ=SECONDLY;BYSECOND=1,2,3;BYSETPOS=2",
    "rrule:FREQ=SECONDLY;COUNT=1000000000",
    "rrule:FREQ=DAILY;INTERVAL=1000000;COUNT=1000000000",
    "rrule:FREQ=YEARLY;INTERVAL=1000000;BYMONTH=2;BYMONTHDAY=30",
    "cron:0 0 30 2 *",
    "cron:0 0 31 4,6,9,11 *",
    "cron:* * */20 * 1L",
    "cron:59 59 23 30 2 *",
    "cron:" + "1," * 100_000 + "1 * * * *",
    "cron:" + "*/1" + "/1" * 80 + " * * * *",
    "cron:" + "9" * 250 + " * * * *",
    "rrule:FREQ=DAILY;BYHOUR=" + "1," * 100_000 + "1",
    "rrule:" + ";" * 1_000,
]


@pytest.mark.parametrize("repeat", HOSTILE, ids=lambda repeat: repeat[:60])
def test_what_never_comes_is_refused_or_ends_after_a_limited_number_of_steps(
    repeat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    take = Steps.take

    def counted(self: Steps, count: int = 1) -> None:
        used.append(count)
        take(self, count)

    monkeypatch.setattr(Steps, "take", counted)
    wanted = Schedule(at="2027-02-15T09:00", timezone="America/New_York", repeat=repeat)
    with suppress(InvalidField):
        next(occurrences(wanted, 0))
    # The check, the search, and the count of COUNT.
    assert sum(used) <= 2 * SEARCH_STEPS_MAX + 1_100


def test_a_search_over_many_excluded_days_takes_few_steps_for_each() -> None:
    days = tuple(str((datetime(2027, 1, 1) + timedelta(days=day)).date()) for day in range(400))
    wanted = Schedule(at="2027-01-01T00:00", timezone="UTC", repeat="cron:* * * * * *", exclude=days)
    steps = Steps()
    first = next(occurrences(wanted, 0, steps))
    assert first.local == "2028-02-05T00:00:00+00:00"
    assert steps.used < SEARCH_STEPS_MAX


def test_a_time_far_from_the_start_is_found_at_once() -> None:
    for repeat in ("daily", "monthly", "yearly", "rrule:FREQ=MINUTELY;INTERVAL=7", "cron:*/7 * * * *"):
        wanted = Schedule(at="1970-01-01T00:00", timezone="Europe/Paris", repeat=repeat)
        check_schedule(wanted)
        steps = Steps()
        assert next(occurrences(wanted, 250_000_000_000_000, steps)).instant_ms >= 250_000_000_000_000
        assert steps.used < 50


def test_the_total_of_many_searches_may_be_limited_too() -> None:
    wanted = Schedule(at="2027-01-01T00:00", timezone="UTC", repeat="daily")
    with pytest.raises(InvalidField, match="ask for fewer occurrences"):
        list(islice(occurrences(wanted, 0, Steps(total=500)), 1_000))
