"""Values that every request refuses, with the field named. tests/e2e/test_input_limits.py shows for one value of each
kind that a real server answers so, and changes nothing."""

from __future__ import annotations

import json

import pytest

from duetime.api import decode
from duetime.config import load_config
from duetime.errors import DuetimeError

LIMITS = load_config(environ={}).limits


def written(fields: dict[str, str]) -> bytes:
    """A JSON object of fields whose values are JSON text already: what no JSON library would write."""
    return ("{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}").encode()


def assert_refused(fields: dict[str, str], field: str | None) -> None:
    """By a create and, if it is not about the id of the timer, by an update."""
    key = {"namespace": '"n"', "timerId": '"t"'}
    due = {"executeAt": '"2127-01-01T09:00:00Z"', "callbackUrl": '"http://127.0.0.1:9/"'}
    with pytest.raises(DuetimeError) as refused:
        decode.decode_create(written({**key, **due, **fields}), LIMITS)
    assert (refused.value.status, refused.value.field) == (400, field)
    with pytest.raises(DuetimeError) as refused:
        decode.decode_update(written({**key, **fields}), LIMITS)
    assert (refused.value.status, refused.value.field) == (400, field)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-shop": "17\r\nhost: evil.example"},
        {"x-shop": "17\nx: y"},
        {"x-shop": "17\r"},
        {"x-shop": "nul\0"},
        {"x-shop": "bell\x07"},
        {"x-shop": "del\x7f"},
        {"x-shop": "ümlaut"},
        {"x-shop\r\nx-evil": "1"},
        {"x-shop:": "1"},
        {"x shop": "1"},
        {"": "1"},
        {"x-same": "1", "X-Same": "2"},
        {f"x-{n}": "1" for n in range(33)},
        {"x-long": "y" * 8_200},
    ],
    ids=lambda headers: ascii(next(iter(headers)))[:30],
)
def test_headers_of_a_wrong_form_are_refused(headers: dict[str, str]) -> None:
    assert_refused({"headers": json.dumps(headers)}, "headers")


@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_json_nested_too_deeply_is_refused(brackets: tuple[str, str]) -> None:
    times = 34 // len(brackets[1])
    assert_refused({"payload": brackets[0] * times + "1" + brackets[1] * times}, "payload")


HUGE = ["1" * 5_000, "-" + "9" * 5_000, "1e400", "-1e400", "1E+999999999", "0.1e310", "9" * 309 + ".5"]


@pytest.mark.parametrize("number", HUGE, ids=lambda number: number[:12])
@pytest.mark.parametrize("around", ["{}", '{{"a":[{}]}}', '["1e400",{}]'])
def test_a_number_beyond_a_double_is_refused(number: str, around: str) -> None:
    assert_refused({"payload": around.format(number)}, "payload")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "nan", "1e", "01", "+1", ".5", "0x10"])
def test_what_is_no_number_of_json_is_refused(number: str) -> None:
    assert_refused({"payload": f'{{"a":{number}}}'}, None)


@pytest.mark.parametrize("text", ["2027-06-30T23:59:60Z", "2016-12-31T23:59:60Z", "2027-06-30T23:59:60.5+02:00"])
def test_a_leap_second_is_refused(text: str) -> None:
    assert_refused({"executeAt": json.dumps(text)}, "executeAt")


@pytest.mark.parametrize(
    "text",
    [
        "0001-01-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "1969-12-31T23:59:59.999Z",
        "1970-01-01T00:00:00+00:01",
        "9999-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
        "9999-12-31T23:59:59-23:59",
        "9998-12-31T23:59:59-00:01",
        "9998-12-31T23:59:59.9999Z",
        "0001-01-01T00:00:00+23:59",
        "10000-01-01T00:00:00Z",
        "-2027-01-01T00:00:00Z",
        "+2027-01-01T00:00:00Z",
        "2027-02-29T00:00:00Z",
        "2027-13-01T00:00:00Z",
        "2027-01-01T24:00:00Z",
        "2027-01-01T00:00:00+24:00",
        "٢٠٢٧-01-01T00:00:00Z",
    ],
)
def test_a_time_out_of_range_is_refused(text: str) -> None:
    assert_refused({"executeAt": json.dumps(text)}, "executeAt")


@pytest.mark.parametrize(
    "value",
    [
        '"2027-01-01T09:00:00"',
        '"2027-01-01T09:00:00.123"',
        '"2027-01-01 09:00:00"',
        '"2027-01-01T09:00"',
        '"2027-01-01T09:00Z"',
        '"2027-01-01"',
        '"20270101T090000Z"',
        '"2027-W01-1T09:00:00Z"',
        '"2027-01-01T09:00:00 Europe/Berlin"',
        '"2027-01-01T09:00:00+01"',
        '"09:00:00Z"',
        '"tomorrow"',
        '""',
        '" 2027-01-01T09:00:00Z"',
        '"2027-01-01T09:00:00Z\\n"',
        "1798794000",
        "1798794000000.0",
        "[]",
        "true",
    ],
)
def test_a_time_without_an_offset_or_not_one_at_all_is_refused(value: str) -> None:
    assert_refused({"executeAt": value}, "executeAt")


BAD_NAMES = {
    "NUL": '"a\\u0000b"',
    "only NUL": '"\\u0000"',
    "high surrogate": '"a\\ud800"',
    "low surrogate": '"\\udfffb"',
    "surrogates in the wrong order": '"\\udc00\\ud800"',
    "256 bytes": json.dumps("x" * 256),
    "256 bytes in 128 characters": json.dumps("ü" * 128, ensure_ascii=False),
    "256 bytes in 64 characters": json.dumps("😀" * 64),
    "empty": '""',
}


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["timerId", "namespace", "correlationId"])
def test_a_name_that_is_none_is_refused(field: str, name: str) -> None:
    assert_refused({field: BAD_NAMES[name]}, field)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_tag_that_is_none_is_refused(name: str) -> None:
    assert_refused({"tags": f'["good",{BAD_NAMES[name]}]'}, "tags")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_none_cannot_be_asked_for(name: str) -> None:
    for field, decoded in (("timerId", decode.decode_timer_key), ("namespace", decode.decode_namespace_name)):
        with pytest.raises(DuetimeError) as refused:
            decoded(written({field: BAD_NAMES[name]}))
        assert (refused.value.status, refused.value.field) == (400, field)
