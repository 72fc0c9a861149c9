"""Instants and durations as text: what is read, what is refused and why, and that nothing is ever early."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.domain.instants import (
    DURATION_MAX_MS,
    EARLIEST_MS,
    LATEST_MS,
    format_duration,
    format_instant,
    parse_duration,
    parse_instant,
)

instants = st.integers(EARLIEST_MS, LATEST_MS - 1)


class TestInstants:
    @pytest.mark.parametrize(
        ("text", "milliseconds"),
        [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:00.001Z", 1),
            ("1970-01-01T01:00:00+01:00", 0),
            ("1969-12-31T19:00:00-05:00", 0),
            ("1970-01-01T05:30:00+05:30", 0),
            ("1970-01-01T00:00:00-00:00", 0),
            ("1970-01-01t00:00:01z", 1_000),
            ("1970-01-01 00:00:01Z", 1_000),
            ("1970-01-02T00:00:00+23:59", 60_000),
            ("2027-01-15T08:00:00Z", 1_800_000_000_000),
            ("2024-02-29T00:00:00Z", 1_709_164_800_000),
            ("9998-12-31T23:59:59.999Z", LATEST_MS - 1),
            ("9999-01-01T00:30:00+01:00", LATEST_MS - 1_800_000),
        ],
    )
    def test_what_is_read(self, text: str, milliseconds: int) -> None:
        assert parse_instant(text) == milliseconds

    @pytest.mark.parametrize(
        ("fraction", "milliseconds"),
        [
            ("5", 500),
            ("05", 50),
            ("123", 123),
            ("1230", 123),
            ("1230000000", 123),
            ("1230000001", 124),
            ("1231", 124),
            ("9990001", 1_000),
            ("000000000000000000000000000001", 1),
        ],
    )
    def test_anything_beyond_the_millisecond_is_rounded_up(self, fraction: str, milliseconds: int) -> None:
        assert parse_instant(f"1970-01-01T00:00:00.{fraction}Z") == milliseconds

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            # failure case 10
            ("2016-12-31T23:59:60Z", "leap second"),
            ("2016-12-31T18:59:60-05:00", "leap second"),
            ("2016-12-31T23:59:60.5Z", "leap second"),
            # failure case 42
            ("0001-01-01T00:00:00Z", "must be between"),
            ("0000-01-01T00:00:00Z", "a day that exists"),
            ("1969-12-31T23:59:59Z", "must be between"),
            ("1970-01-01T00:00:00+00:01", "must be between"),
            ("9999-01-01T00:00:00Z", "must be between"),
            ("9999-12-31T23:59:59-23:59", "must be between"),
            ("9998-12-31T23:59:59.9999Z", "must be between"),
            ("9998-12-31T23:59:59-01:00", "must be between"),
            # failure case 43
            ("2027-01-01T09:00:00", "offset"),
            ("2027-01-01T09:00", "offset"),
            ("2027-01-01T09:00:00.5", "offset"),
            ("2027-01-01", "offset"),
            # days and times that do not exist
            ("2027-02-29T00:00:00Z", "a day that exists"),
            ("2027-13-01T00:00:00Z", "a day that exists"),
            ("2027-00-01T00:00:00Z", "a day that exists"),
            ("2027-04-31T00:00:00Z", "a day that exists"),
            ("2027-01-01T24:00:00Z", "a time of day"),
            ("2027-01-01T23:60:00Z", "a time of day"),
            ("2027-01-01T23:59:61Z", "a time of day"),
            ("2027-01-01T00:00:00+24:00", "an offset of at most"),
            ("2027-01-01T00:00:00+00:60", "an offset of at most"),
            # other forms, and odd ones
            ("", "RFC 3339"),
            ("now", "RFC 3339"),
            ("1800000000000", "RFC 3339"),
            ("2027-1-1T09:00:00Z", "RFC 3339"),
            ("27-01-01T09:00:00Z", "RFC 3339"),
            ("12027-01-01T09:00:00Z", "RFC 3339"),
            ("-2027-01-01T09:00:00Z", "RFC 3339"),
            ("2027-01-01T09:00:00.Z", "RFC 3339"),
            ("2027-01-01T09:00:00,5Z", "RFC 3339"),
            ("2027-01-01T09:00:00+0100", "RFC 3339"),
            ("2027-01-01T09:00:00+01", "RFC 3339"),
            ("2027-01-01T09:00:00[Europe/Berlin]", "RFC 3339"),
            ("2027-01-01T09:00:00Z\n", "RFC 3339"),
            (" 2027-01-01T09:00:00Z", "RFC 3339"),
            ("2027-01-01T09:00:00−01:00", "RFC 3339"),
            ("2027-01-01T09:00:00." + "1" * 31 + "Z", "RFC 3339"),
            ("2027-01-01T09:00:00." + "1" * 1_000_000, "RFC 3339"),
            # digits of other scripts are not digits here
            ("２０２７-01-01T09:00:00Z", "RFC 3339"),
            ("2027-01-01T0٩:00:00Z", "RFC 3339"),
            ("2027-01-01T09:00:0०Z", "RFC 3339"),
        ],
    )
    def test_what_is_refused_and_why(self, text: str, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            parse_instant(text)

    @given(instants)
    def test_what_goes_out_comes_back_in(self, milliseconds: int) -> None:
        assert parse_instant(format_instant(milliseconds)) == milliseconds

    @given(instants)
    def test_what_goes_out_is_what_the_standard_library_says(self, milliseconds: int) -> None:
        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
        assert format_instant(milliseconds) == instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @given(st.integers(0, (LATEST_MS - 1) * 1_000), st.integers(-1_439, 1_439))
    def test_any_offset_and_any_microsecond_is_the_same_instant_and_never_early(
        self, microseconds: int, offset_minutes: int
    ) -> None:
        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
        there = instant.astimezone(timezone(timedelta(minutes=offset_minutes)))
        assert parse_instant(there.isoformat()) == -(-microseconds // 1_000)

    @given(st.text(max_size=40))
    def test_any_other_text_is_refused_with_a_reason(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"\w"):
            parse_instant(text)


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "milliseconds"),
        [
            ("0s", 0),
            ("250ms", 250),
            ("90s", 90_000),
            ("1m", 60_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("1d2h3m4s5ms", 93_784_005),
            ("0.5s", 500),
            ("1.5h", 5_400_000),
            ("PT1H30M", 5_400_000),
            ("PT90S", 90_000),
            ("PT0.25S", 250),
            ("P1D", 86_400_000),
            ("P1W", 604_800_000),
            ("P1DT12H", 129_600_000),
            ("PT0S", 0),
            ("36600d", DURATION_MAX_MS),
        ],
    )
    def test_what_is_read(self, text: str, milliseconds: int) -> None:
        assert parse_duration(text) == milliseconds

    @pytest.mark.parametrize(
        ("text", "milliseconds"), [("0.001ms", 1), ("0.5ms", 1), ("1.4ms", 2), ("2.0ms", 2), ("0.4ms0.6ms", 1)]
    )
    def test_anything_beyond_the_millisecond_is_rounded_up(self, text: str, milliseconds: int) -> None:
        assert parse_duration(text) == milliseconds

    @given(st.integers(0, 3_000_000_000))
    def test_thousandths_of_a_second_are_exact(self, milliseconds: int) -> None:
        text = f"{milliseconds // 1_000}.{milliseconds % 1_000:03d}"
        assert parse_duration(f"{text}s") == milliseconds
        assert parse_duration(f"PT{text}S") == milliseconds

    @pytest.mark.parametrize(
        "text",
        [
            *(
                "",
                "s",
                "90",
                "-1s",
                "+1s",
                "1 s",
                "1s ",
                "1S",
                "1H",
                "1w",
                "1y",
                "1.s",
                ".5s",
                "1.2345s",
                "1e3s",
                "1,5s",
            ),
            *("P", "PT", "P1DT", "P1Y", "P1M", "PT1H30", "PT-1S", "-PT1S", "pt1h", "PT1M1H", "PT1.5H", "PT1,5S"),
            *("٣s", "９0s", "PT९S", "infs", "nans", "1s\n", "1" * 16 + "s"),
        ],
    )
    def test_what_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="must be a duration such as"):
            parse_duration(text)

    @pytest.mark.parametrize("text", ["36600d1ms", "36600d0.001ms", "999999999999999d", "P999999999W"])
    def test_more_than_a_hundred_years_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="at most 100 years"):
            parse_duration(text)

    @given(st.integers(0, DURATION_MAX_MS))
    def test_what_goes_out_comes_back_in(self, milliseconds: int) -> None:
        assert parse_duration(format_duration(milliseconds)) == milliseconds

    @pytest.mark.parametrize(
        ("milliseconds", "text"),
        [
            (0, "0s"),
            (1, "1ms"),
            (1_500, "1500ms"),
            (60_000, "1m"),
            (90_000, "90s"),
            (5_400_000, "90m"),
            (86_400_000, "1d"),
        ],
    )
    def test_what_goes_out_is_short(self, milliseconds: int, text: str) -> None:
        assert format_duration(milliseconds) == text

    @given(st.text(alphabet="0123456789.PTWDHMSdhms ", max_size=20))
    def test_any_text_is_read_or_refused_and_nothing_else(self, text: str) -> None:
        try:
            milliseconds = parse_duration(text)
        except ValueError:
            return
        assert 0 <= milliseconds <= DURATION_MAX_MS
