"""Whatever a user may send comes back as it was sent, or is refused by name; it is never mangled.

Names, times, durations, payloads and headers are made up by Hypothesis and go through a real server: by
create, createMany or update in, by get, list and the callback at a real receiver out. An oracle that
shares no code with the server says which of them have to be taken.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from contract import FAR, URL, Asker
from fuzz import examples
from hypothesis import assume, example, given
from hypothesis import strategies as st
from real_server import RealReceiver, RealServer

from duetime.http.client import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBER = itertools.count()
WAYS = st.sampled_from(["create", "createMany", "update"])

# --- one field's way through the server ----------------------------------------------------------


class Sender:
    """Sends fields, each a JSON text, by one of three ways, as a timer `key` of a namespace."""

    def __init__(self, api: Asker, namespace: str, way: str) -> None:
        self.api = api
        self.namespace = json.dumps(namespace).encode()
        self.way = way

    async def send(self, fields: dict[str, bytes]) -> tuple[int, dict[str, Any]]:
        """Status and timer, or status and problem."""
        timer = {"namespace": self.namespace, "timerId": b'"key"', **fields}
        if not {"executeAt", "delay"} & fields.keys():
            timer["executeAt"] = json.dumps(FAR).encode()
        timer.setdefault("callbackUrl", json.dumps(URL).encode())
        if self.way == "update":
            before = {"namespace": timer["namespace"], "timerId": timer["timerId"]}
            fresh = {**before, "executeAt": json.dumps(FAR).encode(), "callbackUrl": json.dumps(URL).encode()}
            status, problem = await self.api.ask_raw("timers/create", written(fresh))
            if status != 200:  # it is the name that is at fault
                return status, problem
            status, answer = await self.api.ask_raw("timers/update", written(timer))
        elif self.way == "createMany":
            status, answer = await self.api.ask_raw("timers/createMany", b'{"timers":[' + written(timer) + b"]}")
            if status == 200:
                (answer,) = answer["results"]
                status = answer["error"]["status"] if "error" in answer else 200
                answer = answer.get("error", answer)
        else:
            status, answer = await self.api.ask_raw("timers/create", written(timer))
        return status, answer["timer"] if status == 200 else answer


def written(fields: dict[str, bytes]) -> bytes:
    """A JSON object of values that are JSON text already, some of which no JSON library would write."""
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in fields.items()) + b"}"


def assert_names(status: int, problem: dict[str, Any], field: str) -> None:
    assert status == 400, problem
    # A batch that is not text in all its parts is refused whole.
    assert problem["field"] == field or (problem["field"] == "timers" and "surrogate" in problem["detail"]), problem


async def found(server: RealServer, key: dict[str, str]) -> tuple[Answer, dict[str, Any]]:
    answer = await server.post("timers/get", json.dumps(key).encode())
    assert answer.status == 200, answer.body
    return answer, json.loads(answer.body)["timer"]


async def assert_listed(api: Asker, timer: dict[str, Any], **conditions: str) -> None:
    """The list that the conditions select has the timer, as get shows it."""
    cursor = None
    while True:
        page = await api.ok("timers/list", namespace=timer["namespace"], cursor=cursor, **conditions)
        listed = [other for other in page["timers"] if other["timerId"] == timer["timerId"]]
        if listed:
            assert listed == [timer]
            return
        cursor = page["nextCursor"]
        assert cursor is not None, (conditions, timer)


async def called_back(api: Asker, receiver: RealReceiver, key: dict[str, str]) -> bytes:
    """Fires the timer now; the body at the receiver."""
    before = len(receiver.requests)
    await api.ok("timers/update", **key, callbackUrl=receiver.url)
    await api.ok("timers/fireNow", **key)
    await receiver.received(before + 1)
    assert {name: receiver.bodies[before][name] for name in key} == key
    return receiver.requests[before].body


# --- names ---------------------------------------------------------------------------------------

ANY_CHARACTER = st.characters(exclude_categories=())  # surrogates too
NEAR_THE_LIMIT = st.builds(
    lambda character, bytes_wanted: character * (bytes_wanted // len(character.encode("utf-8", "surrogatepass"))),
    ANY_CHARACTER,
    st.integers(252, 260),
)
NORMALISED = st.builds(
    unicodedata.normalize,
    st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]),
    st.text("éÅK①ﬁ각ẛ̣Ω𝒳ß", min_size=1, max_size=9),
)
NASTY = st.sampled_from(
    ["\0", "a\0b", "\ud800", "\udc00\ud800", "\ufeff", "\uffff", "\U0010ffff", " ", "%", "_", "'", '"']
)
NAMES = st.one_of(st.text(ANY_CHARACTER, max_size=40), NEAR_THE_LIMIT, NORMALISED, NASTY)


def as_json(text: str, *, escaped: bool) -> bytes:
    """Escaped, or in UTF-8 where that is possible."""
    if not escaped and not has_surrogate(text):
        return json.dumps(text, ensure_ascii=False).encode()
    return json.dumps(text).encode()


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def said(text: str) -> str:
    """What the JSON of the text says: two halves of a pair, escaped side by side, are one character."""
    return str(json.loads(json.dumps(text)))


def is_name(text: str, bytes_max: int = 255) -> bool:
    return not has_surrogate(text) and "\0" not in text and 1 <= len(text.encode()) <= bytes_max


@given(name=NAMES, escaped=st.booleans(), way=WAYS)
@examples(120)
async def test_a_timer_id_comes_back_or_is_refused(
    api: Asker, namespace: str, receiver: RealReceiver, name: str, escaped: bool, way: str
) -> None:
    status, answer = await Sender(api, namespace, way).send({"timerId": as_json(name, escaped=escaped)})
    name = said(name)
    if not is_name(name):
        return assert_names(status, answer, "timerId")
    assert (status, answer["timerId"]) == (200, name), answer
    key = {"namespace": namespace, "timerId": name}
    timer = await api.timer(**key)
    assert timer["timerId"] == name
    await assert_listed(api, timer, idPrefix=name)
    await assert_listed(api, timer, idPrefix=name[: len(name) // 2])
    await called_back(api, receiver, key)
    return None


@given(name=NAMES, escaped=st.booleans(), way=WAYS)
@examples(80)
async def test_a_correlation_id_comes_back_or_is_refused(
    api: Asker, namespace: str, receiver: RealReceiver, name: str, escaped: bool, way: str
) -> None:
    status, answer = await Sender(api, namespace, way).send({"correlationId": as_json(name, escaped=escaped)})
    name = said(name)
    if not is_name(name):
        return assert_names(status, answer, "correlationId")
    assert (status, answer["correlationId"]) == (200, name), answer
    key = {"namespace": namespace, "timerId": "key"}
    timer = await api.timer(**key)
    assert timer["correlationId"] == name
    await assert_listed(api, timer, correlationId=name)
    assert json.loads(await called_back(api, receiver, key))["correlationId"] == name
    return None


TAGS = st.lists(
    st.one_of(st.text(ANY_CHARACTER, max_size=20), NASTY, st.text("ü", min_size=31, max_size=34)), max_size=24
)


@given(tags=TAGS, escaped=st.booleans(), way=WAYS)
@examples(80)
async def test_tags_come_back_or_are_refused(
    api: Asker, namespace: str, tags: list[str], escaped: bool, way: str
) -> None:
    sent = b"[" + b",".join(as_json(tag, escaped=escaped) for tag in tags) + b"]"
    status, answer = await Sender(api, namespace, way).send({"tags": sent})
    tags = [said(tag) for tag in tags]
    if len(tags) > 20 or not all(is_name(tag, 64) for tag in tags):
        return assert_names(status, answer, "tags")
    assert status == 200, answer
    timer = await api.timer(namespace=namespace, timerId="key")
    assert answer.get("tags", []) == timer.get("tags", []) == list(dict.fromkeys(tags))
    for tag in tags[:2]:
        await assert_listed(api, timer, tag=tag)
    return None


@given(name=NAMES, escaped=st.booleans())
@examples(60)
async def test_a_namespace_comes_back_or_is_refused(
    api: Asker, receiver: RealReceiver, name: str, escaped: bool
) -> None:
    text = as_json(name, escaped=escaped)
    status, answer = await api.ask_raw("namespaces/create", written({"namespace": text, "numShards": b"4"}))
    name = said(name)
    if not is_name(name):
        assert_names(status, answer, "namespace")
        return assert_names(*await Sender(api, name, "create").send({"namespace": text}), "namespace")
    assert status in (200, 409), answer  # 409: an example before had the same name
    assert (await api.ok("namespaces/get", namespace=name))["namespace"]["namespace"] == name
    assert name in {each["namespace"] for each in (await api.ok("namespaces/list"))["namespaces"]}
    status, timer = await Sender(api, name, "create").send({"namespace": text})
    assert (status, timer["namespace"]) == (200, name)
    await assert_listed(api, timer)
    await called_back(api, receiver, {"namespace": name, "timerId": "key"})
    return None


# --- times ---------------------------------------------------------------------------------------

_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d{1,30})?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
END_MS = 253_370_764_800_000  # the year 9999


def instant_ms(text: str) -> int | None:
    """Never early: a part of a millisecond is a whole one. None: not an instant, or not one a timer may have."""
    match = _INSTANT.fullmatch(text)
    if match is None:
        return None
    try:
        local = datetime.fromisoformat(f"{match[1]}T{match[2]}+00:00")
    except ValueError:
        return None
    zone = match[4]
    minutes = 0 if zone in "Zz" else int(zone[0] + "1") * (int(zone[1:3]) * 60 + int(zone[4:]))
    seconds = (local - EPOCH) // timedelta(seconds=1) - 60 * minutes + Fraction("0" + (match[3] or ".0"))
    milliseconds = math.ceil(seconds * 1_000)
    return milliseconds if 0 <= milliseconds < END_MS else None


def shown(milliseconds: int) -> str:
    return (EPOCH + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


TWO_DIGITS = st.integers(0, 99).map("{:02d}".format)
OFFSETS = st.one_of(
    st.sampled_from(
        ["Z", "z", "+00:00", "-00:00", "+14:00", "-12:00", "+23:59", "-23:59", "+24:00", "", "+01", "+0100"]
    ),
    st.builds("{}{}:{}".format, st.sampled_from("+-"), TWO_DIGITS, TWO_DIGITS),
)
FRACTIONS = st.one_of(
    st.just(""), st.from_regex(r"\.[0-9]{0,32}", fullmatch=True), st.from_regex(r"\.[0-9]{3}0*1?", fullmatch=True)
)
REAL_TIMES = st.integers(-86_400, END_MS // 1_000 + 86_400).map(lambda seconds: shown(seconds * 1_000)[:19])
ODD_TIMES = st.builds(
    "{}-{}-{}{}{}:{}:{}".format,
    st.one_of(st.integers(0, 99_999).map("{:04d}".format), st.sampled_from(["0000", "1970", "9998", "9999"])),
    st.integers(0, 14).map("{:02d}".format),
    st.integers(0, 33).map("{:02d}".format),
    st.sampled_from(["T", "t", " ", "", "_"]),
    st.integers(0, 25).map("{:02d}".format),
    st.integers(0, 61).map("{:02d}".format),
    st.integers(0, 61).map("{:02d}".format),
)
INSTANTS = st.one_of(
    st.builds("{}{}{}".format, st.one_of(REAL_TIMES, REAL_TIMES, ODD_TIMES), FRACTIONS, OFFSETS), st.text(max_size=30)
)


@given(text=INSTANTS, way=WAYS)
@example(text="9998-12-31T23:59:59.999Z", way="create")
@example(text="9998-12-31T23:59:59.9990000001Z", way="create")
@example(text="1969-12-31T23:59:59.999000001Z", way="create")
@example(text="2000-02-29T23:59:60Z", way="create")
@examples(250)
async def test_an_instant_comes_back_to_the_millisecond_or_is_refused(
    api: Asker, namespace: str, receiver: RealReceiver, text: str, way: str
) -> None:
    fields = {"executeAt": json.dumps(text).encode(), "callbackUrl": json.dumps(receiver.url).encode()}
    before = len(receiver.bodies)
    status, answer = await Sender(api, namespace, way).send(fields)
    expected = instant_ms(text)
    if expected is None:
        return assert_names(status, answer, "executeAt")
    assert (status, answer["executeAt"], answer["scheduledAt"]) == (200, shown(expected), shown(expected)), answer
    if answer["executeAt"] < datetime.now(UTC).isoformat():  # it is due, and goes out
        await receiver.received(before + 1)
        assert receiver.bodies[before]["executeAt"] == shown(expected)
        return None
    timer = await api.timer(namespace=namespace, timerId="key")
    assert timer["executeAt"] == timer["scheduledAt"] == shown(expected)
    await assert_listed(api, timer, state="scheduled", dueFrom=shown(expected))
    if expected + 1 < END_MS:
        await assert_listed(api, timer, state="scheduled", dueFrom=shown(expected), dueUntil=shown(expected + 1))
    page = await api.ok("timers/list", namespace=namespace, state="scheduled", dueUntil=shown(expected))
    assert page["timers"] == []
    return None


UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
HUNDRED_YEARS_MS = 100 * 366 * 86_400_000
_ISO = re.compile(r"P((\d{1,9})W)?((\d{1,9})D)?(T((\d{1,9})H)?((\d{1,9})M)?((\d{1,12}(\.\d{1,3})?)S)?)?", re.ASCII)


def duration_ms(text: str) -> int | None:
    if re.fullmatch(r"(\d{1,15}(\.\d{1,3})?(ms|s|m|h|d))+", text, re.ASCII):
        parts = re.findall(r"([\d.]+)([a-z]+)", text)
        total = sum(Fraction(number) * UNITS_MS[unit] for number, unit in parts)
    elif (match := _ISO.fullmatch(text)) and text[-1] not in "PT":
        weeks, days, hours, minutes, seconds = (Fraction(match[n] or 0) for n in (2, 4, 7, 9, 11))
        total = (((weeks * 7 + days) * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1_000
    else:
        return None
    return milliseconds if (milliseconds := math.ceil(total)) <= HUNDRED_YEARS_MS else None


NUMBERS = st.one_of(st.integers(0, 10_000).map(str), st.from_regex(r"[0-9]{1,16}(\.[0-9]{0,4})?", fullmatch=True))
SHORT_DURATIONS = st.lists(st.builds("{}{}".format, NUMBERS, st.sampled_from([*UNITS_MS, "w", "S", ""])), max_size=3)
ISO_DURATIONS = st.from_regex(
    r"P([0-9]{1,5}W)?([0-9]{1,6}D)?(T([0-9]{1,7}H)?([0-9]{1,9}M)?([0-9]{1,12}(\.[0-9]{1,4})?S)?)?", fullmatch=True
)
DURATIONS = st.one_of(SHORT_DURATIONS.map("".join), ISO_DURATIONS, st.text(max_size=12))


def milliseconds_between(earlier: str, later: str) -> int:
    return round((datetime.fromisoformat(later) - datetime.fromisoformat(earlier)) / timedelta(milliseconds=1))


@given(text=DURATIONS, way=st.sampled_from(["create", "createMany"]))
@examples(200)
async def test_a_delay_is_kept_to_the_millisecond_or_refused(api: Asker, namespace: str, text: str, way: str) -> None:
    status, answer = await Sender(api, namespace, way).send({"delay": json.dumps(text).encode()})
    expected = duration_ms(text)
    if expected is None:
        return assert_names(status, answer, "delay")
    assert status == 200, answer
    assert milliseconds_between(answer["createdAt"], answer["executeAt"]) == expected
    timer = await api.timer(namespace=namespace, timerId="key")
    assert timer["scheduledAt"] == answer["executeAt"]
    return None


DAY_MS = 86_400_000
BOUNDS = {
    ("retryPolicy", "initialInterval"): (1, DAY_MS),
    ("retryPolicy", "maxDuration"): (1, 366 * DAY_MS),
    ("missed", "skipIfLateBy"): (0, HUNDRED_YEARS_MS),
    ("missed", "failIfLateBy"): (0, HUNDRED_YEARS_MS),
}


@given(text=DURATIONS, where=st.sampled_from(sorted(BOUNDS)), way=WAYS)
@examples(150)
async def test_a_duration_of_a_policy_says_the_same_when_it_comes_back_or_is_refused(
    api: Asker, namespace: str, text: str, where: tuple[str, str], way: str
) -> None:
    outer, inner = where
    least, most = BOUNDS[where]
    status, answer = await Sender(api, namespace, way).send({outer: json.dumps({inner: text}).encode()})
    expected = duration_ms(text)
    if expected is None or not least <= expected <= most:
        return assert_names(status, answer, f"{outer}.{inner}")
    timer = await api.timer(namespace=namespace, timerId="key")
    assert status == 200, answer
    assert answer[outer] == timer[outer]
    assert duration_ms(timer[outer][inner]) == expected
    # What is answered may be sent again, and is answered alike.
    status, again = await Sender(api, namespace, way).send({outer: json.dumps(timer[outer]).encode()})
    assert (status, again[outer]) == (200, timer[outer])
    return None


# --- payloads ------------------------------------------------------------------------------------

SPACE = st.text(" \t\r\n", max_size=3)
JSON_NUMBERS = st.one_of(
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.from_regex(r"-?[1-9][0-9]{190,320}(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["-0", "-0.0e-0", "1e308", "1.8e308", "5e-324", "1e-9999", "1e400", "12345678901234567890", "0e999"]
    ),
)
ESCAPES = st.one_of(
    st.sampled_from(["\\n", "\\/", '\\"', "\\\\", "\\u0000", "\\ud83d\\ude00", "\\uD800", "\\udc00", "\\u2028"]),
    st.integers(0, 0xFFFF).map("\\u{:04x}".format),
)
PLAIN_CHARACTERS = st.characters(exclude_characters='"\\', min_codepoint=32, exclude_categories=["Cs"])
JSON_STRINGS = st.lists(st.one_of(PLAIN_CHARACTERS, PLAIN_CHARACTERS, ESCAPES), max_size=12).map(
    lambda parts: '"' + "".join(parts) + '"'
)


def spaced(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("{}{}{}".format, SPACE, text, SPACE)


def nested_json(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    keys = st.one_of(JSON_STRINGS, st.sampled_from(['"a"', '"a"', '"payload"', '"timerId"']))  # the same twice, often
    members = st.lists(st.builds("{}:{}".format, spaced(keys), spaced(inner)), max_size=4)
    return st.one_of(
        st.lists(spaced(inner), max_size=4).map(lambda items: "[" + ",".join(items) + "]"),
        members.map(lambda items: "{" + ",".join(items) + "}"),
        st.builds(lambda text, depth: "[" * depth + text + "]" * depth, inner, st.integers(1, 34)),
    )


JSON_TEXTS = st.recursive(
    st.one_of(st.sampled_from(["null", "true", "false"]), JSON_NUMBERS, JSON_STRINGS), nested_json, max_leaves=12
)


def is_payload(text: str) -> bool:
    """JSON that every reader reads alike: whole characters, numbers a double holds, at most 32 deep."""
    return not any(
        has_surrogate(value) if isinstance(value, str) else not math.isfinite(value)
        for value in scalars(json.loads(text, parse_int=float, object_pairs_hook=Members), 0)
    )


class Members(list[Any]):
    """An object's names and values, those that are there twice included."""


def scalars(value: Any, depth: int) -> list[Any]:
    if isinstance(value, list):
        assert isinstance(value, list)
        flat = [part for pair in value for part in pair] if isinstance(value, Members) else value
        found = [math.inf] if depth == 32 else []
        return found + [scalar for part in flat for scalar in scalars(part, depth + 1)]
    return [value] if isinstance(value, (str, float)) else []


@given(text=JSON_TEXTS, before=SPACE, after=SPACE, way=WAYS)
@examples(300)
async def test_a_payload_comes_back_byte_for_byte_or_is_refused(
    api: Asker, namespace: str, receiver: RealReceiver, text: str, before: str, after: str, way: str
) -> None:
    status, answer = await Sender(api, namespace, way).send({"payload": f"{before}{text}{after}".encode()})
    if not is_payload(text):
        return assert_names(status, answer, "payload")
    assert status == 200, answer
    key = {"namespace": namespace, "timerId": "key"}
    await assert_shown(api, key, None if text == "null" else text.encode())
    body = await called_back(api, receiver, key)
    _, _, rest = body.partition(b'"attempt":1,"payload":')
    assert rest == text.encode() + b',"correlationId":null}'
    return None


async def assert_shown(api: Asker, key: dict[str, str], payload: bytes | None) -> None:
    """By get and by list, byte for byte; a payload of null is none."""
    got, timer = await found(api.server, key)
    page = await api.server.post("timers/list", json.dumps({"namespace": key["namespace"]}).encode())
    if payload is None:
        assert "payload" not in timer
        assert b'"payload"' not in page.body
    else:
        assert b',"payload":' + payload + b"}" in got.body
        assert b',"payload":' + payload + b"}" in page.body


BROKEN = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.builds(lambda text: text.encode("utf-16"), JSON_TEXTS),
    st.builds(
        lambda text, wrong: b'"' + text.encode() + wrong + b'"',
        st.text("aé😀", max_size=9),
        st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"\n", b"\\x", b"\\u12"]),
    ),
    st.builds(
        lambda text, at, wrong: text[: at % (len(text) + 1)] + wrong + text[at % (len(text) + 1) :],
        JSON_TEXTS.map(str.encode),
        st.integers(0, 1_000),
        st.sampled_from([b",", b"]", b"}", b'"', b"\\", b"0", b"-", b"\x00", b"\xff", b"\x0c", b"//", b"NaN"]),
    ),
)


@given(payload=BROKEN, way=WAYS)
@examples(250)
async def test_what_is_not_json_is_refused_as_a_payload_and_nothing_is_made(
    api: Asker, namespace: str, payload: bytes, way: str
) -> None:
    assume(not is_json(payload) and not is_json(b'{"payload":' + payload + b"}"))
    key = {"namespace": namespace, "timerId": f"timer {next(NUMBER)}"}
    fields = {"timerId": json.dumps(key["timerId"]).encode(), "payload": payload}
    status, problem = await Sender(api, namespace, way).send(fields)
    assert status == 400, problem
    assert problem.get("field") in (None, "payload"), problem
    if way == "update":
        assert "payload" not in await api.timer(**key)
    else:
        assert await api.refused("timers/get", **key) == (404, "timer_not_found", "timerId")


def is_json(text: bytes) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text.decode(), parse_constant=refuse)
    except ValueError:
        return False
    return True


# --- headers -------------------------------------------------------------------------------------

HEADER_NAMES = st.one_of(
    st.from_regex(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,20}", fullmatch=True),
    st.sampled_from(
        ["Host", "content-length", "Transfer-Encoding", "webhook-id", "Duetime-x", "Authorization", "Cookie"]
    ),
    st.text(max_size=6),
)
HEADER_VALUES = st.one_of(
    st.from_regex(r"[!-~]([ -~]{0,40}[!-~])?", fullmatch=True),
    st.sampled_from(["", " ", " a", "a ", "a\tb", "a\r\nb: c", "a\nb", "\0", "é", "\x7f", "x" * 8_200]),
    st.text(max_size=6),
)
OURS = re.compile(
    r"host|content-.*|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|proxy-.*|accept|accept-encoding"
    r"|user-agent|idempotency-key|traceparent|http2-settings|(webhook|duetime)-.*"
)


@given(headers=st.dictionaries(HEADER_NAMES, HEADER_VALUES, min_size=1, max_size=4), way=WAYS)
@examples(200)
async def test_headers_arrive_as_they_were_sent_or_are_refused(
    api: Asker, namespace: str, receiver: RealReceiver, headers: dict[str, str], way: str
) -> None:
    status, answer = await Sender(api, namespace, way).send({"headers": json.dumps(headers).encode()})
    if status != 200:
        assert_names(status, answer, "headers")
        assert not all(is_header(name, value) for name, value in headers.items()) or are_too_many(headers)
        return
    key = {"namespace": namespace, "timerId": "key"}
    assert answer["headers"] == (await api.timer(**key))["headers"] == headers
    await called_back(api, receiver, key)
    for name, value in headers.items():
        assert receiver.requests[-1].header(name.lower().encode()) == value


def is_header(name: str, value: str) -> bool:
    return (
        re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name, re.ASCII) is not None
        and OURS.fullmatch(name.lower()) is None
        and re.fullmatch(r"[!-~]([ -~]*[!-~])?", value, re.ASCII) is not None
    )


def are_too_many(headers: dict[str, str]) -> bool:
    size = sum(len(name) + len(value) + 4 for name, value in headers.items())
    return size > 8_192 or len({name.lower() for name in headers}) < len(headers)
