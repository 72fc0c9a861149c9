"""Input limits of the failure catalogue, a test for each case, on a real server through HTTP.

A refusal has the right status and names the field, and it changes nothing: not the timer that was to be
made, not its neighbours in a batch, not the timer that was to be updated. Here is one value of each kind; all values
are in tests/unit/api/test_input_limits.py.
"""

from __future__ import annotations

import asyncio
import json
import unicodedata
from typing import Any

import pytest
from contract import Asker
from real_server import RealReceiver, until

from duetime.api.decode_json import WHOLE_BYTES_MAX

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT, TO = "2127-01-01T09:00:00Z", "http://127.0.0.1:9/hooks"
FAR, URL = json.dumps(AT), json.dumps(TO)
EXPECTED = {400: "invalid_field", 413: "too_large"}


def written(fields: dict[str, str]) -> str:
    """A JSON object of fields whose values are JSON text already: what no JSON library would write."""
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}"


async def assert_refused(
    api: Asker, namespace: str, fields: dict[str, str], status: int, field: str | None, *, is_json: bool = True
) -> None:
    """The fields are refused by create, by createMany beside good items, and by update; nothing changes by it.

    Not `is_json`: a body with them cannot be read at all, so that a batch is refused whole.
    """
    good = {"namespace": json.dumps(namespace), "executeAt": FAR, "callbackUrl": URL}
    bad = {**good, "timerId": '"bad"', **fields}

    answered, problem = await api.ask_raw("timers/create", written(bad).encode())
    assert (answered, problem["code"], problem.get("field")) == (status, EXPECTED[status], field), problem

    items = [written({**good, "timerId": '"before"'}), written(bad), written({**good, "timerId": '"after"'})]
    answered, answer = await api.ask_raw("timers/createMany", f'{{"timers":[{",".join(items)}]}}'.encode())
    if is_json:
        before, refused, after = answer["results"]
        assert refused.keys() == {"error"}
        problem = refused["error"]
        assert (problem["status"], problem["code"], problem.get("field")) == (status, EXPECTED[status], field)
        assert (before["timer"]["timerId"], after["timer"]["timerId"]) == ("before", "after")
    else:
        assert answered == 400

    await assert_not_made(api, namespace, "bad", *(() if is_json else ("before", "after")))
    if "timerId" not in fields and "namespace" not in fields:
        await assert_update_refused(api, namespace, fields, status, field)


async def assert_not_made(api: Asker, namespace: str, *timer_ids: str) -> None:
    for timer_id in timer_ids:
        assert (await api.refused("timers/get", namespace=namespace, timerId=timer_id))[0] == 404
    page = await api.ok("timers/list", namespace=namespace, state="scheduled")
    assert {timer["timerId"] for timer in page["timers"]} <= {"before", "after", "kept"}


async def assert_update_refused(
    api: Asker, namespace: str, fields: dict[str, str], status: int, field: str | None
) -> None:
    key = {"namespace": namespace, "timerId": "kept"}
    made = await api.timer("timers/create", **key, executeAt=AT, callbackUrl=TO, payload=1)
    patch = {"namespace": json.dumps(namespace), "timerId": '"kept"', **fields}
    answered, problem = await api.ask_raw("timers/update", written(patch).encode())
    assert (answered, problem["code"], problem.get("field")) == (status, EXPECTED[status], field), problem
    assert await api.timer(**key) == made


async def make(api: Asker, namespace: str, timer_id: str, **fields: str) -> dict[str, Any]:
    """The timer made with these fields, given as JSON text; it has to be accepted."""
    good = {"namespace": json.dumps(namespace), "timerId": json.dumps(timer_id), "executeAt": FAR, "callbackUrl": URL}
    status, answer = await api.ask_raw("timers/create", written({**good, **fields}).encode())
    assert status == 200, answer
    timer = answer["timer"]
    assert isinstance(timer, dict)
    assert await api.timer(namespace=namespace, timerId=timer_id) == timer
    return timer


# --- sizes ---------------------------------------------------------------------------------------

PAYLOAD_MAX = 262_144


async def test_case_37_a_payload_too_large_is_413(api: Asker, namespace: str) -> None:
    await assert_refused(api, namespace, {"payload": json.dumps("x" * (PAYLOAD_MAX - 1))}, 413, "payload")
    await assert_refused(api, namespace, {"payload": json.dumps("ü" * 131_072, ensure_ascii=False)}, 413, "payload")
    assert (await make(api, namespace, "just fits", payload=json.dumps("x" * (PAYLOAD_MAX - 2))))["payload"]


async def test_case_37_a_payload_too_large_for_its_namespace_is_413(api: Asker, namespace: str) -> None:
    await api.ok("namespaces/update", namespace=namespace, payloadBytesMax=10)
    await assert_refused(api, namespace, {"payload": '"123456789"'}, 413, "payload")
    await make(api, namespace, "just fits", payload='"12345678"')


async def test_case_37_a_body_too_large_is_413_and_nothing_of_it_is_made(api: Asker, namespace: str) -> None:
    small = written({"namespace": json.dumps(namespace), "timerId": '"bad"', "executeAt": FAR, "callbackUrl": URL})
    body = f'{{"timers":[{small}]{" " * (16 * 1024 * 1024)}}}'.encode()
    status, problem = await api.ask_raw("timers/createMany", body)
    assert (status, problem["code"]) == (413, "too_large")
    await assert_not_made(api, namespace, "bad")


async def test_case_38_more_than_the_store_takes_in_one_commit_is_split_and_all_acknowledged(
    api: Asker, namespace: str
) -> None:
    """SQLite takes 2,000 operations in a commit."""

    async def thousand(letter: str) -> list[bool]:
        timers = [
            {"namespace": namespace, "timerId": f"{letter}{n}", "executeAt": AT, "callbackUrl": TO}
            for n in range(1_000)
        ]
        return [result["replaced"] for result in (await api.ok("timers/createMany", timers=timers))["results"]]

    answers = await asyncio.gather(*(thousand(letter) for letter in "abcde"))
    assert answers == [[False] * 1_000] * 5
    count, cursor = 0, None
    while count == 0 or cursor is not None:
        page = await api.ok("timers/list", namespace=namespace, state="scheduled", limit=1_000, cursor=cursor)
        count, cursor = count + len(page["timers"]), page["nextCursor"]
    assert count == 5_000


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [{"x-shop": "17\r\nhost: evil.example"}, {"Host": "evil.example"}],
    ids=lambda headers: ascii(next(iter(headers)))[:30],
)
async def test_case_39_headers_that_could_change_the_request_are_refused(
    api: Asker, namespace: str, headers: dict[str, str]
) -> None:
    await assert_refused(api, namespace, {"headers": json.dumps(headers)}, 400, "headers")


async def test_case_39_a_good_header_arrives_as_it_was_given(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    headers = {"X-Shop": '17 & 18; q="1"', "Authorization": "Bearer for-the-receiver"}
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, headers=headers)
    await receiver.received(1)
    assert receiver.requests[0].header(b"x-shop") == headers["X-Shop"]
    assert receiver.requests[0].header(b"authorization") == headers["Authorization"]


# --- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("brackets", [("[", "]")])
async def test_case_40_json_nested_too_deeply_is_refused(api: Asker, namespace: str, brackets: tuple[str, str]) -> None:
    def nested(depth: int) -> str:
        times = depth // len(brackets[1])
        return brackets[0] * times + "1" + brackets[1] * times

    await assert_refused(api, namespace, {"payload": nested(34)}, 400, "payload")
    assert (await make(api, namespace, "just fits", payload=nested(32)))["payload"]


async def test_case_40_a_depth_bomb_is_refused_wherever_it_stands(api: Asker, namespace: str) -> None:
    bomb = "[" * 100_000 + "]" * 100_000
    good = {"namespace": json.dumps(namespace), "timerId": '"bad"', "executeAt": FAR, "callbackUrl": URL}
    bodies = [
        bomb,
        "[" * 1_000_000,
        '{"a":' * 100_000,
        written({**good, "payload": bomb}),
        written({**good, "headers": bomb}),
        written({**good, "unknown": bomb}),
        f'{{"timers":{bomb}}}',
    ]
    for body in bodies:
        for path in ("timers/create", "timers/createMany", "timers/update", "timers/list"):
            status, problem = await api.ask_raw(path, body.encode())
            is_large = len(body) > WHOLE_BYTES_MAX and status == 413  # refused by its size, before it is decoded
            expected = (413, "too_large") if is_large else (400, "invalid_field")
            assert (status, problem["code"]) == expected, (path, body[:40])
    await assert_not_made(api, namespace, "bad")


HUGE = ["1" * 5_000, "1e400"]


@pytest.mark.parametrize("number", HUGE, ids=lambda number: number[:12])
@pytest.mark.parametrize("around", ['["1e400",{}]'])
async def test_case_41_a_number_beyond_a_double_is_refused(
    api: Asker, namespace: str, number: str, around: str
) -> None:
    await assert_refused(api, namespace, {"payload": around.format(number)}, 400, "payload")


@pytest.mark.parametrize("number", ["NaN"])
async def test_case_41_what_is_no_number_of_json_is_refused(api: Asker, namespace: str, number: str) -> None:
    await assert_refused(api, namespace, {"payload": f'{{"a":{number}}}'}, 400, None, is_json=False)


@pytest.mark.parametrize("number", [*HUGE, "1.5"], ids=lambda number: number[:12])
async def test_case_41_a_huge_number_in_a_field_of_its_own_is_refused(api: Asker, namespace: str, number: str) -> None:
    field = "callbackTimeoutSeconds"
    status, problem = await api.ask_raw(
        "timers/create",
        written(
            {
                "namespace": json.dumps(namespace),
                "timerId": '"bad"',
                "executeAt": FAR,
                "callbackUrl": URL,
                field: number,
            }
        ).encode(),
    )
    assert status == 400
    assert problem.get("field") in (field, None)
    await assert_not_made(api, namespace, "bad")
    assert (await api.ask_raw("timers/list", f'{{"limit":{number}}}'.encode()))[0] == 400


async def test_case_41_numbers_a_double_holds_come_back_digit_by_digit(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    payload = '{"big":12345678901234567890123,"long":0.1000000000000000055511151231257827,"e":1E+300,"text":"1e400"}'
    due = {"executeAt": '"2020-01-01T00:00:00Z"', "callbackUrl": json.dumps(receiver.url)}
    good = {"namespace": json.dumps(namespace), "timerId": '"a"', "payload": payload, **due}
    assert (await api.server.post("timers/create", written(good).encode())).status == 200
    await receiver.received(1)
    assert f'"payload":{payload},'.encode() in receiver.requests[0].body


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2016-12-31T23:59:60Z"])
async def test_case_10_a_leap_second_is_refused(api: Asker, namespace: str, text: str) -> None:
    await assert_refused(api, namespace, {"executeAt": json.dumps(text)}, 400, "executeAt")


@pytest.mark.parametrize(
    "text",
    ["1969-12-31T23:59:59.999Z", "9999-01-01T00:00:00Z"],
)
async def test_case_42_a_time_out_of_range_is_refused(api: Asker, namespace: str, text: str) -> None:
    await assert_refused(api, namespace, {"executeAt": json.dumps(text)}, 400, "executeAt")


async def test_case_42_a_delay_that_leads_out_of_range_is_refused(api: Asker, namespace: str) -> None:
    key = {"namespace": namespace, "timerId": "bad", "callbackUrl": TO}
    for delay in ("36601d", "99999999999999d", "P999999999W"):
        assert await api.refused("timers/create", **key, delay=delay) == (400, "invalid_field", "delay")
    await assert_not_made(api, namespace, "bad")


async def test_case_42_the_ends_of_the_range_are_kept_and_the_past_fires_at_once(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    latest = await make(api, namespace, "latest", executeAt='"9999-01-01T00:30:00.999+00:31"')
    assert latest["executeAt"] == "9998-12-31T23:59:00.999Z"
    past = ["1970-01-01T00:00:00Z", "1969-12-31T23:30:00-00:30", "2001-09-09T01:46:40Z"]
    for number, text in enumerate(past):
        body = {"namespace": namespace, "timerId": f"past {number}", "executeAt": text, "callbackUrl": receiver.url}
        await api.ok("timers/create", **body)
    await receiver.received(len(past))
    assert {body["executeAt"] for body in receiver.bodies} == {"1970-01-01T00:00:00.000Z", "2001-09-09T01:46:40.000Z"}


@pytest.mark.parametrize(
    "value",
    ['"2027-01-01T09:00:00"', "1798794000"],
)
async def test_case_43_a_time_without_an_offset_or_not_one_at_all_is_refused(
    api: Asker, namespace: str, value: str
) -> None:
    await assert_refused(api, namespace, {"executeAt": value}, 400, "executeAt")


# --- names ---------------------------------------------------------------------------------------

BAD_NAMES = {
    "NUL": '"a\\u0000b"',
    "high surrogate": '"a\\ud800"',
    "256 bytes": json.dumps("x" * 256),
}


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["timerId", "namespace", "correlationId"])
async def test_case_44_a_name_that_is_none_is_refused(api: Asker, namespace: str, field: str, name: str) -> None:
    is_json = "surrogate" not in name
    await assert_refused(api, namespace, {field: BAD_NAMES[name]}, 400, field, is_json=is_json)


@pytest.mark.parametrize("name", ["NUL"])
async def test_case_44_a_tag_that_is_none_is_refused(api: Asker, namespace: str, name: str) -> None:
    tags = f'["good",{BAD_NAMES[name]}]'
    await assert_refused(api, namespace, {"tags": tags}, 400, "tags", is_json="surrogate" not in name)


@pytest.mark.parametrize("path", ["timers/get", "timers/delete", "timers/fireNow", "timers/replay"])
async def test_case_44_a_name_that_is_none_cannot_be_asked_for(api: Asker, path: str) -> None:
    for name in BAD_NAMES.values():
        status, problem = await api.ask_raw(path, written({"timerId": name}).encode())
        assert (status, problem["field"]) == (400, "timerId")


@pytest.mark.parametrize("path", ["create", "get", "update", "delete"])
async def test_case_44_a_namespace_cannot_be_named_so(api: Asker, path: str) -> None:
    for name in BAD_NAMES.values():
        status, problem = await api.ask_raw(f"namespaces/{path}", written({"namespace": name}).encode())
        assert (status, problem["field"]) == (400, "namespace")


async def test_case_44_bytes_that_are_not_utf_8_are_refused(api: Asker, namespace: str) -> None:
    good = written({"namespace": json.dumps(namespace), "timerId": '"bad"', "executeAt": FAR, "callbackUrl": URL})
    for wrong in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80"):
        for place in (b"bad", b"hooks"):
            status, problem = await api.ask_raw("timers/create", good.encode().replace(place, place + wrong))
            assert (status, problem["code"]) == (400, "invalid_field")
        payload = good.encode()[:-1] + b',"payload":"' + wrong + b'"}'
        status, problem = await api.ask_raw("timers/create", payload)
        assert (status, problem["code"]) == (400, "invalid_field")
        assert (await api.ask_raw("timers/createMany", b'{"timers":[' + payload + b"]}"))[0] in (200, 400)
    await assert_not_made(api, namespace, "bad")


async def test_case_44_names_of_255_bytes_are_kept(api: Asker) -> None:
    for name in ("x" * 255, "ü" * 127 + "x", "😀" * 63 + "üx", "/", "a\tb\n", "\u200b"):
        await api.ok("namespaces/create", namespace=name, numShards=1)
        made = await make(api, name, name, correlationId=json.dumps(name))
        assert (made["namespace"], made["timerId"], made["correlationId"]) == (name, name, name)


async def test_case_45_ids_that_look_alike_are_different_timers(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    alike = [
        "order",
        "Order",
        "ORDER",
        "order ",
        " order",
        "order\t",
        composed,
        decomposed,
        "ß",
        "ss",
        "ﬁ",
        "fi",
        "K",
        "\u212a",  # the sign of the kelvin
    ]
    timers = [
        {"namespace": namespace, "timerId": name, "executeAt": AT, "callbackUrl": receiver.url, "payload": n}
        for n, name in enumerate(alike)
    ]
    results = (await api.ok("timers/createMany", timers=timers))["results"]
    assert [result["replaced"] for result in results] == [False] * len(alike)
    for number, name in enumerate(alike):
        assert (await api.timer(namespace=namespace, timerId=name))["payload"] == number
    assert await api.ok("timers/delete", namespace=namespace, timerId="order") == {"verdict": "cancelled"}
    for name in alike[1:]:
        await api.ok("timers/fireNow", namespace=namespace, timerId=name)
    await receiver.received(len(alike) - 1)
    assert {body["timerId"]: body["payload"] for body in receiver.bodies} == {
        name: number for number, name in enumerate(alike) if number
    }


async def test_case_45_namespaces_that_look_alike_are_different(api: Asker) -> None:
    for number, name in enumerate(["shop", "Shop", "shop ", "shöp", "sho\u0308p"]):
        await api.ok("namespaces/create", namespace=name, numShards=1)
        await make(api, name, "a", payload=str(number))
    for number, name in enumerate(["shop", "Shop", "shop ", "shöp", "sho\u0308p"]):
        assert (await api.timer(namespace=name, timerId="a"))["payload"] == number


async def test_the_server_is_as_well_as_before(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    """After all that: it takes a timer and fires it."""
    await api.ok("timers/create", namespace=namespace, timerId="a", delay="0s", callbackUrl=receiver.url)
    await receiver.received(1)

    async def is_delivered() -> bool:
        return bool((await api.timer(namespace=namespace, timerId="a"))["state"] == "delivered")

    await until(is_delivered, "the timer is delivered")
