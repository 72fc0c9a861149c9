"""All zones of the tzdata package: changes of offset are all found, and local times resolve as zoneinfo says."""
# ruff: noqa: DTZ001 - local times have no zone here

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import islice

import tzdata
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.domain.schedule import TZDATA_VERSION, Schedule, occurrences
from duetime.domain.schedule.zones import BLOCK_S, load_zone, offset_changes, zone_names

DAY_S = 86_400
YEAR_2100_S = 4_102_444_800
ZONES = sorted(zone_names())


def data_of(name: str) -> bytes:
    return files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


def changes_in_data(data: bytes) -> list[int]:
    """When the UTC offset changes, of the explicit transitions of a TZif file of version 2 or later (RFC 9636)."""

    def counts(at: int) -> tuple[int, ...]:
        return struct.unpack(">6l", data[at + 20 : at + 44])

    utc, standard, leap, times, types, characters = counts(0)
    at = 44 + times * 5 + types * 6 + characters + leap * 8 + standard + utc
    utc, standard, leap, times, types, characters = counts(at)
    at += 44
    instants = struct.unpack(f">{times}q", data[at : at + 8 * times])
    indexes = data[at + 8 * times : at + 9 * times]
    at += 9 * times
    offsets = [struct.unpack(">l", data[at + 6 * index : at + 6 * index + 4])[0] for index in range(types)]
    found, before = [], offsets[0]
    for instant, index in zip(instants, indexes, strict=True):
        if offsets[index] != before:
            found.append(instant)
        before = offsets[index]
    return found


def test_every_change_in_the_data_is_found() -> None:
    """If a zone ever has two changes that a search by days misses, this fails, with the zone."""
    by_data = {data_of(name): name for name in ZONES}  # many zones are links
    assert len(by_data) > 300
    compared = 0
    for data, name in by_data.items():
        expected = [at for at in changes_in_data(data) if 0 < at < YEAR_2100_S]
        blocks = {-(-at // BLOCK_S) - 1 for at in expected}
        found = [change.at_s for block in sorted(blocks) for change in offset_changes(name, block)]
        assert [at for at in found if at in set(expected)] == expected, name
        compared += len(expected)
    assert compared > 10_000


def test_zones_are_those_of_the_package_and_its_version_is_known() -> None:
    assert tzdata.IANA_VERSION == TZDATA_VERSION
    assert "America/New_York" in ZONES
    for name in ZONES:
        assert load_zone(name).key == name


def test_local_times_around_every_change_resolve_as_zoneinfo_says() -> None:
    by_data = {data_of(name): name for name in ZONES}
    late_years = [((year - 1970) * 365 + year // 4) * DAY_S // BLOCK_S for year in (2040, 2071, 2099)]
    compared = 0
    for data, name in by_data.items():
        blocks = {-(-at // BLOCK_S) - 1 for at in changes_in_data(data) if 0 < at < YEAR_2100_S}
        blocks |= {block for first in late_years for block in range(first, first + 23)}
        for change in (change for block in blocks for change in offset_changes(name, block)):
            begin = min(change.before_s, change.after_s)  # of the gap or fold, in local time
            end = max(change.before_s, change.after_s)
            for local_s in (begin - 1, begin, end - 1, end):
                local = datetime(1970, 1, 1) + timedelta(seconds=max(0, change.at_s + local_s))
                check(name, local, *(("later", "first"), ("earlier", "second"))[compared % 2])
                compared += 1
    assert compared > 40_000


def check(name: str, local: datetime, gap: str, fold: str) -> None:
    expected = [(int(at.timestamp()), why) for at, why in as_zoneinfo_says(name, local, gap, fold)]
    found = occurrences(Schedule(at=local.isoformat(), timezone=name, gap=gap, fold=fold), 0)
    assert [(each.instant_ms // 1_000, each.because) for each in found] == [one for one in expected if one[0] >= 0]


@st.composite
def local_times(draw: st.DrawFn) -> tuple[str, datetime]:
    """A zone and a local time, mostly within a day of a change of its offset."""
    name = draw(st.sampled_from(ZONES))
    around = draw(st.integers(1, YEAR_2100_S))
    for block in range(around // BLOCK_S, around // BLOCK_S + draw(st.integers(0, 23))):
        if changes := offset_changes(name, block):
            change = changes[0]
            around = change.at_s + draw(st.sampled_from((change.before_s, change.after_s)))
            around += draw(st.integers(-DAY_S, DAY_S) | st.sampled_from((-1, 0, 1)) | st.integers(-7_200, 7_200))
            break
    return name, datetime(1970, 1, 1) + timedelta(seconds=max(0, around))


def as_zoneinfo_says(name: str, local: datetime, gap: str, fold: str) -> list[tuple[datetime, str | None]]:
    """PEP 495: in a gap, fold=0 has the offset before it and fold=1 the one after it; in a fold likewise."""
    zone = load_zone(name)
    first, second = (local.replace(tzinfo=zone, fold=number).astimezone(UTC) for number in (0, 1))
    if first == second:
        return [(first, None)]
    if first.astimezone(zone).replace(tzinfo=None) != local:
        return [] if gap == "skip" else [(first if gap == "later" else second, "gap")]
    return [(at, "fold") for at, kept in ((first, fold != "second"), (second, fold != "first")) if kept]


@settings(max_examples=1_500, deadline=None)
@given(local_times(), st.sampled_from(("later", "earlier", "skip")), st.sampled_from(("first", "second", "both")))
def test_a_local_time_resolves_as_zoneinfo_says(case: tuple[str, datetime], gap: str, fold: str) -> None:
    name, local = case
    expected = [(at, why) for at, why in as_zoneinfo_says(name, local, gap, fold) if at.timestamp() >= 0]
    wanted = Schedule(at=local.isoformat(), timezone=name, gap=gap, fold=fold)
    found = list(occurrences(wanted, 0))
    assert [(datetime.fromtimestamp(each.instant_ms // 1_000, UTC), each.because) for each in found] == expected
    for each in found:
        assert each.asked == local.isoformat()
        shown = datetime.fromisoformat(each.local)
        assert shown.timestamp() * 1_000 == each.instant_ms
        assert shown.utcoffset() == datetime.fromtimestamp(each.instant_ms / 1_000, load_zone(name)).utcoffset()


@settings(max_examples=200, deadline=None)
@given(
    local_times(),
    st.sampled_from(("later", "earlier", "skip")),
    st.sampled_from(("first", "second", "both")),
    st.sampled_from(("daily", "cron:*/10 * * * *", "cron:17 */3 * * *", "rrule:FREQ=HOURLY;INTERVAL=5")),
)
def test_a_repetition_is_each_of_its_local_times_in_order_and_once(
    case: tuple[str, datetime], gap: str, fold: str, repeat: str
) -> None:
    name, around = case
    start = max(around - timedelta(days=1), datetime(1970, 1, 2)).replace(minute=0, second=0)
    wanted = Schedule(at=start.isoformat(), timezone=name, gap=gap, fold=fold, repeat=repeat)
    found = [each.instant_ms // 1_000 for each in islice(occurrences(wanted, 0), 200)]
    assert found == sorted(set(found))

    expected: set[int] = set()
    local, step = start, timedelta(minutes=1)
    end = start + timedelta(days=3)
    while local < end:
        if is_in(repeat, start, local):
            expected |= {int(at.timestamp()) for at, _ in as_zoneinfo_says(name, local, gap, fold)}
        local += step
    # What is moved over the end of the three days is left out of the comparison.
    last = min(found[-1], int(end.replace(tzinfo=UTC).timestamp()) - 40 * 3_600)
    assert [at for at in found if at <= last] == sorted(at for at in expected if at <= last)


def is_in(repeat: str, start: datetime, local: datetime) -> bool:
    if repeat == "daily":
        return (local.hour, local.minute) == (start.hour, start.minute)
    if repeat == "cron:*/10 * * * *":
        return local.minute % 10 == 0
    if repeat == "cron:17 */3 * * *":
        return local.minute == 17 and local.hour % 3 == 0
    return local.minute == 0 and (local - start) // timedelta(hours=1) % 5 == 0


@settings(max_examples=300, deadline=None)
@given(local_times(), st.integers(0, 400))
def test_to_start_later_gives_the_rest_of_the_same_instants(case: tuple[str, datetime], skipped: int) -> None:
    name, local = case
    wanted = Schedule(at=local.isoformat(), timezone=name, repeat="cron:*/20 * * * *")
    whole = [each.instant_ms for each in islice(occurrences(wanted, 0), skipped + 5)]
    rest = [each.instant_ms for each in islice(occurrences(wanted, whole[skipped]), 5)]
    assert rest == whole[skipped:]
