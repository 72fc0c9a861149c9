"""The JSON of the API: what is taken, what is refused and how, and what is answered."""

from __future__ import annotations

import json
from typing import Any, cast, get_args

import msgspec
import pytest

from duetime import errors, wire
from duetime.api import decode, encode
from duetime.api.decode_json import Body
from duetime.config import Limits
from duetime.domain.secrets import kept_secrets
from duetime.domain.timer import (
    DAY_MS,
    NOT_BY_OLDER_VERSIONS_MS,
    SHARDS_BY_SIZE,
    Created,
    Extras,
    Missed,
    Namespace,
    Outcome,
    Reached,
    RetryPolicy,
    State,
    Timer,
    TimerKey,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import DuetimeError, InvalidField, TooLarge

LIMITS = Limits(
    payload_bytes_max=1_000,
    json_depth_max=32,
    batch_timers_max=3,
    page_timers_max=1_000,
    page_bytes_max=8_388_608,
    creates_per_second=0,
    requests_per_second=0,
)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
AT_MS = 1_798_794_000_000  # 2027-01-01T09:00:00Z


def create(**fields: Any) -> bytes:
    return json.dumps({"timerId": "t", "delay": "1s", **fields}).encode()


def raw_create(payload: bytes) -> bytes:
    return b'{"timerId":"t","delay":"1s","payload":' + payload + b"}"


def split(body: bytes) -> list[Body]:
    work = decode.decode_timers(body, LIMITS)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return cast(list[Body], stop.value)


def refusal(body: bytes) -> DuetimeError:
    with pytest.raises(DuetimeError) as caught:
        decode.decode_create(body, LIMITS)
    return caught.value


def timer(**fields: Any) -> Timer:
    known: dict[str, Any] = {
        "namespace": "orders",
        "timer_id": "order-17",
        "uuid_high": 1,
        "uuid_low": 2,
        "generation": 3,
        "execute_at_ms": AT_MS,
        "scheduled_at_ms": AT_MS,
        "created_at_ms": AT_MS - DAY_MS,
        "callback_url": "https://shop.example/hooks/expire",
    }
    return Timer(**{**known, **fields})


# --- a create ------------------------------------------------------------------------------------


def test_a_create_with_everything_becomes_a_spec() -> None:
    body = b"""{"namespace":"orders","timerId":"order-17","executeAt":"2027-01-01T10:00:00+01:00",
        "callbackUrl":"https://shop.example/hooks/expire","payload":{"order" : 17},
        "retryPolicy":{"maxRetries":5,"initialInterval":"2s","backoffMultiplier":3,"maxInterval":"1h","maxDuration":"2d"},
        "callbackTimeoutSeconds":10,"headers":{"x-shop":"17"},"correlationId":"c-99","tags":["a","b","a"],
        "missed":{"skipIfLateBy":"10m"},"flowKey":"shop","ifAbsent":true}"""
    spec = decode.decode_create(body, LIMITS)
    assert spec.namespace == "orders"
    assert spec.timer_id == "order-17"
    assert spec.execute_at_ms == AT_MS
    assert spec.delay_ms is None
    assert spec.payload == '{"order" : 17}'
    assert spec.retry_policy == RetryPolicy(
        max_retries=5,
        initial_interval_ms=2_000,
        backoff_multiplier=3.0,
        max_interval_ms=3_600_000,
        max_duration_ms=2 * DAY_MS,
    )
    assert spec.callback_timeout_seconds == 10
    assert spec.headers == {"x-shop": "17"}
    assert spec.correlation_id == "c-99"
    assert spec.tags == ("a", "b")
    assert spec.missed == Missed(skip_if_late_by_ms=600_000)
    assert spec.flow_key == "shop"
    assert spec.if_absent


def test_a_create_with_a_schedule_becomes_a_spec_without_a_time() -> None:
    spec = decode.decode_create(
        b"""{"timerId":"t","schedule":{"at":"2027-03-15T09:00","timezone":"Europe/Berlin","repeat":"daily",
        "gap":"skip","fold":"both","exclude":["2027-12-25"],"until":"2028-01-01","catchUp":"all"}}""",
        LIMITS,
    )
    assert (spec.execute_at_ms, spec.delay_ms) == (None, None)
    assert spec.schedule == Schedule(
        at="2027-03-15T09:00",
        timezone="Europe/Berlin",
        repeat="daily",
        gap="skip",
        fold="both",
        exclude=("2027-12-25",),
        until="2028-01-01",
        catch_up="all",
    )
    for time in ('"delay":"1s"', '"executeAt":"2027-01-01T09:00:00Z"'):
        error = refusal(b'{"timerId":"t","schedule":{"timezone":"UTC"},%s}' % time.encode())
        assert error.field == "schedule"


def test_an_update_with_a_schedule_is_refused_by_a_version_without_schedules() -> None:
    """It finds the delay too long, and not only an empty update."""
    _, patch = decode.decode_update(b'{"timerId":"t","schedule":null}', LIMITS)
    assert (patch.schedule, patch.delay_ms) == (None, NOT_BY_OLDER_VERSIONS_MS)
    _, patch = decode.decode_update(b'{"timerId":"t","schedule":null,"delay":"1s"}', LIMITS)
    assert (patch.schedule, patch.delay_ms) == (None, 1_000)
    _, patch = decode.decode_update(b'{"timerId":"t","schedule":{"timezone":"UTC"}}', LIMITS)
    assert (patch.schedule, patch.delay_ms) == (Schedule(timezone="UTC"), NOT_BY_OLDER_VERSIONS_MS)


def test_a_create_may_be_as_short_as_an_id_and_a_delay() -> None:
    spec = decode.decode_create(b'{"timerId":"t","delay":"PT1M30S"}', LIMITS)
    assert (spec.namespace, spec.delay_ms, spec.payload, spec.tags) == ("default", 90_000, None, ())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"timerId": ""}, "timerId"),
        ({"timerId": "a" * 256}, "timerId"),
        ({"timerId": "é" * 128}, "timerId"),
        ({"timerId": "a\0b"}, "timerId"),
        ({"timerId": "\ud800"}, "timerId"),
        ({"timerId": 17}, "timerId"),
        ({"timerId": None}, "timerId"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "n" * 256}, "namespace"),
        ({"namespace": None}, "namespace"),
        ({"executeAt": "2027-01-01T09:00:00Z"}, "delay"),
        ({"delay": None}, "executeAt"),
        ({"delay": "soon"}, "delay"),
        ({"delay": "-5s"}, "delay"),
        ({"delay": 5}, "delay"),
        ({"delay": None, "executeAt": "2027-01-01"}, "executeAt"),
        ({"delay": None, "executeAt": "2027-01-01T09:00:00"}, "executeAt"),
        ({"delay": None, "executeAt": "0001-01-01T00:00:00Z"}, "executeAt"),
        ({"delay": None, "executeAt": "9999-12-31T23:59:59-12:00"}, "executeAt"),
        ({"delay": None, "executeAt": "2016-12-31T23:59:60Z"}, "executeAt"),
        ({"delay": None, "executeAt": 1798794000}, "executeAt"),
        ({"schedule": {"at": "2027-03-15T09:00"}}, "schedule.timezone"),
        ({"schedule": {"timezone": "UTC"}}, "schedule"),  # and a time
        ({"schedule": {"timezone": "UTC", "holidays": "de"}}, "schedule.holidays"),
        ({"excuteAt": "2027-01-01T09:00:00Z"}, "excuteAt"),
        ({"callbackUrl": ""}, "callbackUrl"),
        ({"callbackUrl": "http://" + "a" * 2_048}, "callbackUrl"),
        ({"callbackTimeoutSeconds": 0}, "callbackTimeoutSeconds"),
        ({"callbackTimeoutSeconds": 301}, "callbackTimeoutSeconds"),
        ({"callbackTimeoutSeconds": "10"}, "callbackTimeoutSeconds"),
        ({"retryPolicy": {"maxRetries": -1}}, "retryPolicy.maxRetries"),
        ({"retryPolicy": {"maxRetries": 1_001}}, "retryPolicy.maxRetries"),
        ({"retryPolicy": {"initialInterval": "0s"}}, "retryPolicy.initialInterval"),
        ({"retryPolicy": {"initialInterval": "25h"}}, "retryPolicy.initialInterval"),
        ({"retryPolicy": {"backoffMultiplier": 0.5}}, "retryPolicy.backoffMultiplier"),
        ({"retryPolicy": {"backoffMultiplier": 11}}, "retryPolicy.backoffMultiplier"),
        ({"retryPolicy": {"maxInterval": "367d"}}, "retryPolicy.maxInterval"),
        ({"retryPolicy": {"initialInterval": "1m", "maxInterval": "1s"}}, "retryPolicy.maxInterval"),
        ({"retryPolicy": {"maxDuration": "367d"}}, "retryPolicy.maxDuration"),
        ({"retryPolicy": {"retries": 3}}, "retryPolicy.retries"),
        ({"correlationId": ""}, "correlationId"),
        ({"correlationId": "c" * 256}, "correlationId"),
        ({"tags": ["t"] * 21}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"tags": ["t" * 65]}, "tags"),
        ({"tags": "t"}, "tags"),
        ({"flowKey": ""}, "flowKey"),
        ({"flowKey": "k" * 256}, "flowKey"),
        ({"flowKey": "é" * 128}, "flowKey"),
        ({"flowKey": "a\0b"}, "flowKey"),
        ({"flowKey": "\ud800"}, "flowKey"),
        ({"flowKey": 17}, "flowKey"),
        ({"flowKey": "HTTPS://shop.example/hooks?order=17"}, "flowKey"),
        ({"missed": {}}, "missed"),
        ({"missed": {"skipIfLateBy": "1m", "failIfLateBy": "1m"}}, "missed"),
        ({"missed": {"skipIfLateBy": "x"}}, "missed.skipIfLateBy"),
        ({"headers": {"x": "a\r\nevil: 1"}}, "headers"),
        ({"headers": {"x": "é"}}, "headers"),
        ({"headers": {"x y": "1"}}, "headers"),
        ({"headers": {"": "1"}}, "headers"),
        ({"headers": {"x-a": "1", "X-A": "2"}}, "headers"),
        ({"headers": {"x": "v" * 9_000}}, "headers"),
        ({"headers": {f"x-{n}": "" for n in range(33)}}, "headers"),
        ({"ifAbsent": "yes"}, "ifAbsent"),
        ({"ifReached": "keep"}, "ifReached"),
        ({"ifReached": True}, "ifReached"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field_named(fields: dict[str, Any], field: str) -> None:
    error = refusal(create(**fields))
    assert isinstance(error, InvalidField)
    assert error.status == 400
    assert error.field == field
    assert field.rpartition(".")[2] in error.detail


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"delay": 5}, "delay must be a string, not a number"),
        ({"timerId": None}, "timerId must be a string, not null"),
        ({"ifAbsent": 1}, "ifAbsent must be true or false, not a number"),
        ({"tags": "x"}, "tags must be a list, not a string"),
        ({"tags": [1.5]}, "tags[0] must be a string, not a decimal number"),
        ({"headers": []}, "headers must be an object, not a list"),
        ({"headers": {"x": {}}}, "every value of headers must be a string, not an object"),
        ({"callbackTimeoutSeconds": True}, "callbackTimeoutSeconds must be a whole number, not true or false"),
        ({"callbackTimeoutSeconds": 301}, "callbackTimeoutSeconds must be a whole number of at most 300"),
        ({"retryPolicy": {"backoffMultiplier": 0}}, "retryPolicy.backoffMultiplier must be a number of at least 1"),
    ],
)
def test_a_wrong_type_is_named_as_in_json(fields: dict[str, Any], detail: str) -> None:
    assert refusal(create(**fields)).detail == detail


def test_an_unknown_state_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidField) as caught:
        decode.decode_filter(b'{"state":"foo"}', LIMITS)
    assert caught.value.field == "state"
    for state in State:
        assert state.value in caught.value.detail


def test_a_missing_id_is_named() -> None:
    error = refusal(b'{"delay":"1s"}')
    assert (error.field, error.detail) == ("timerId", "timerId is required")


@pytest.mark.parametrize("timer_id", ["a" * 255, "é" * 127, "A", "a ", " a", "e\u0301", "\u00e9", "\U0001f550", "a/b"])
def test_ids_are_kept_as_they_are(timer_id: str) -> None:
    assert decode.decode_create(create(timerId=timer_id), LIMITS).timer_id == timer_id


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"{", "not valid JSON"),
        (b'{"timerId":"t"} x', "not valid JSON"),
        (b'{"timerId":"\xff","delay":"1s"}', "UTF-8"),
        (b'{"timerId":"t","delay":"1s","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"a\\ud800":1}', "surrogate"),
    ],
)
def test_a_body_that_is_no_request_is_refused_as_a_whole(body: bytes, words: str) -> None:
    error = refusal(body)
    assert error.status == 400
    assert words in error.detail


def test_a_retry_policy_that_starts_slowly_is_not_capped_below_its_start() -> None:
    spec = decode.decode_create(create(retryPolicy={"initialInterval": "1h"}), LIMITS)
    assert spec.retry_policy is not None
    assert spec.retry_policy.max_interval_ms == 3_600_000


# --- the payload ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"0",
        b'""',
        b"false",
        b'{ "b" : 1.10, "a":1e2 ,"b":2}',
        b'"\\u0041\\ud83d\\ude00"',
        "\U0001f550".encode().join([b'"', b'"']),
        b"1e308",
        b"1e-400",
        b"0.1e-999",
        b"9" * 308,
        b'"' + b"9" * 900 + b'"',
        b'"1e400"',
        b'["' + b"[" * 500 + b'"]',
        b"[" * 32 + b"]" * 32,
        b"[" + b"[],{}," * 100 + b"1]",
        b'{"a":[{"b":{}}],"c":' + b'{"d":' * 30 + b"1" + b"}" * 31,
    ],
)
def test_a_payload_is_kept_byte_for_byte(payload: bytes) -> None:
    spec = decode.decode_create(raw_create(payload), LIMITS)
    assert spec.payload is not None
    assert spec.payload.encode() == payload


def test_a_null_payload_is_none() -> None:
    assert decode.decode_create(raw_create(b"null"), LIMITS).payload is None


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"1e400", "double"),
        (b"-1E+0400", "double"),
        (b"[1,2e999]", "double"),
        (b"9" * 400, "double"),
        (b"-" + b"9" * 400 + b".5", "double"),
        (b"1" + b"0" * 200 + b"e200", "double"),
        (b"1" + b"0" * 250 + b"e99", "double"),
        (b'"\xff"', "UTF-8"),
        (b'"\xed\xa0\x80"', "UTF-8"),
        (b"[" * 33 + b"]" * 33, "32 deep"),
        (b'{"a":[' * 17 + b"1" + b"]}" * 17, "32 deep"),
        (b'"\\ud800"', "surrogate"),
        (b'{"a":["\\udc00 \\ud83d\\ude00"]}', "surrogate"),
    ],
)
def test_a_payload_no_receiver_could_read_is_refused(payload: bytes, words: str) -> None:
    error = refusal(raw_create(payload))
    assert isinstance(error, InvalidField)
    assert error.field == "payload"
    assert words in error.detail


@pytest.mark.parametrize("payload", [b"NaN", b"Infinity", b"01", b"1.", b"'a'", b"{a:1}", b"[1,]", b'"\n"'])
def test_a_payload_that_is_not_json_is_refused(payload: bytes) -> None:
    assert refusal(raw_create(payload)).status == 400


def test_a_5000_digit_integer_is_refused_even_where_it_would_fit() -> None:
    roomy = msgspec.structs.replace(LIMITS, payload_bytes_max=1_000_000)
    with pytest.raises(InvalidField, match="double"):
        decode.decode_create(raw_create(b"9" * 5_000), roomy)


def test_a_payload_over_the_limit_is_too_large() -> None:
    fits = b'"' + b"x" * 998 + b'"'
    assert decode.decode_create(raw_create(fits), LIMITS).payload == fits.decode()
    error = refusal(raw_create(b'"' + b"x" * 999 + b'"'))
    assert isinstance(error, TooLarge)
    assert (error.status, error.code, error.field) == (413, "too_large", "payload")


# --- the other requests --------------------------------------------------------------------------


def test_an_update_keeps_what_it_does_not_name_and_resets_what_is_null() -> None:
    key, patch = decode.decode_update(b'{"timerId":"t","delay":"1m","tags":null,"payload":null}', LIMITS)
    assert key == TimerKey("default", "t")
    assert patch.delay_ms == 60_000
    assert patch.tags is None
    assert patch.payload is None
    assert patch.execute_at_ms is msgspec.UNSET
    assert patch.callback_url is msgspec.UNSET
    assert patch.retry_policy is msgspec.UNSET


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, None),
        ({"executeAt": None}, "executeAt"),
        ({"delay": "1s", "executeAt": "2027-01-01T09:00:00Z"}, "delay"),
        ({"callbackUrl": ""}, "callbackUrl"),
        ({"ifAbsent": True}, "ifAbsent"),
        ({"schedule": {}}, "schedule.timezone"),
        ({"schedule": {"timezone": "UTC"}, "delay": "1s"}, "schedule"),
        ({"payload": [[]] * 600}, "payload"),
    ],
)
def test_a_wrong_update_is_refused_with_its_field_named(fields: dict[str, Any], field: str | None) -> None:
    with pytest.raises(DuetimeError) as caught:
        decode.decode_update(json.dumps({"timerId": "t", **fields}).encode(), LIMITS)
    assert caught.value.field == field


def test_a_batch_is_split_into_items_that_are_not_decoded_yet() -> None:
    items = split(b'{"timers":[{"timerId":"a"},17]}')
    assert [bytes(item) for item in items] == [b'{"timerId":"a"}', b"17"]
    with pytest.raises(InvalidField, match="at most 3 items"):
        split(b'{"timers":[1,2,3,4]}')


def test_a_list_request_becomes_a_filter() -> None:
    body = b"""{"namespace":"orders","state":"failed","dueFrom":"2027-01-01T09:00:00Z",
        "dueUntil":"2027-01-01T09:00:01Z","tag":"eu","idPrefix":"order-","correlationId":"c","limit":7,"cursor":null}"""
    wanted = decode.decode_filter(body, LIMITS)
    assert wanted.state is State.FAILED
    assert (wanted.due_from_ms, wanted.due_until_ms) == (AT_MS, AT_MS + 1_000)
    assert (wanted.tag, wanted.id_prefix, wanted.correlation_id) == ("eu", "order-", "c")
    assert (wanted.limit, wanted.cursor) == (7, None)
    assert wanted.payloads
    assert not decode.decode_filter(b'{"payloads":false}', LIMITS).payloads


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"state": "lost"}, "state"),
        ({"dueFrom": "x"}, "dueFrom"),
        ({"payloads": "no"}, "payloads"),
    ],
)
def test_a_wrong_filter_is_refused_with_its_field_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        decode.decode_filter(json.dumps(fields).encode(), LIMITS)
    assert caught.value.field == field


def test_a_namespace_update_keeps_what_it_does_not_name_and_resets_what_is_null() -> None:
    body = b'{"namespace":"orders","callbackTimeoutSeconds":null,"failedRetention":"90d","callbackUrl":null}'
    spec = decode.decode_namespace_update(body, LIMITS)
    assert spec.callback_timeout_seconds == 10
    assert spec.failed_retention_ms == 90 * DAY_MS
    assert spec.callback_url is None
    assert spec.delivered_retention_ms is msgspec.UNSET
    assert spec.retry_policy is msgspec.UNSET
    assert spec.signing_secrets is msgspec.UNSET


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"numShards": 0}, "numShards"),
        ({"size": "huge"}, "size"),
        ({"size": None}, "size"),
        ({"size": "large", "numShards": 1_024}, "size"),
        ({"numShards": 16_385}, "numShards"),
        ({"payloadBytesMax": 1_001}, "payloadBytesMax"),
        ({"deliveredRetention": "4000d"}, "deliveredRetention"),
        ({"signingSecrets": ["secret"]}, "signingSecrets"),
        ({"signingSecrets": ["whsec_short"]}, "signingSecrets"),
        ({"signingSecrets": [SECRET] * 6}, "signingSecrets"),
    ],
)
def test_a_wrong_namespace_is_refused_with_its_field_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        decode.decode_namespace_create(json.dumps({"namespace": "n", **fields}).encode(), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "namespace"),
    [({"allNamespaces": True}, None), ({"allNamespaces": False}, "default"), ({"namespace": "n"}, "n")],
)
def test_a_list_is_of_all_namespaces_only_if_it_says_so(fields: dict[str, Any], namespace: str | None) -> None:
    wanted = decode.decode_filter(json.dumps({"correlationId": "c", **fields}).encode(), LIMITS)
    assert wanted.namespace == namespace


@pytest.mark.parametrize("fields", [{}, {"correlationId": ""}, {"tag": "a"}, {"correlationId": "c", "namespace": "n"}])
def test_a_list_of_all_namespaces_needs_a_correlation_id_and_no_namespace(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        decode.decode_filter(json.dumps({"allNamespaces": True, **fields}).encode(), LIMITS)
    assert caught.value.field == "allNamespaces"


@pytest.mark.parametrize("field", ['"numShards":4', '"size":"large"'])
def test_the_shards_of_a_namespace_cannot_be_updated(field: str) -> None:
    with pytest.raises(InvalidField, match="never changes"):
        decode.decode_namespace_update(f'{{"namespace":"n",{field}}}'.encode(), LIMITS)


@pytest.mark.parametrize(("size", "shards"), [("small", 16), ("medium", 256), ("large", 1_024), ("xlarge", 4_096)])
def test_a_size_stands_for_a_number_of_shards(size: str, shards: int) -> None:
    assert decode.decode_namespace_create(f'{{"namespace":"n","size":"{size}"}}'.encode(), LIMITS).num_shards == shards


def test_every_size_has_a_number_of_shards() -> None:
    assert list(SHARDS_BY_SIZE) == list(get_args(wire.NamespaceSize))


def test_a_secret_is_rotated_without_knowing_the_old_one() -> None:
    shown = json.loads(encode.encode_namespace(namespace()))["namespace"]["signingSecrets"]
    assert shown == ["whsec_…LaSw"]
    new = "whsec_" + "B" * 32
    body = json.dumps({"namespace": "orders", "signingSecrets": [new, *shown]}).encode()
    asked = decode.decode_namespace_update(body, LIMITS).signing_secrets
    assert isinstance(asked, tuple)
    assert kept_secrets(asked, (SECRET,)) == (new, SECRET)
    assert kept_secrets(("whsec_...LaSw",), (new, SECRET)) == (SECRET,)
    with pytest.raises(ValueError, match="matches 0"):
        kept_secrets(("whsec_…none",), (SECRET,))
    with pytest.raises(ValueError, match="matches 2"):
        kept_secrets(("whsec_…LaSw",), (SECRET, "whsec_" + "A" * 28 + "LaSw"))


# --- answers -------------------------------------------------------------------------------------


def namespace() -> Namespace:
    return Namespace(name="orders", num_shards=256, created_at_ms=AT_MS, signing_secrets=(SECRET,))


def test_a_created_timer_is_answered_in_the_documented_shape() -> None:
    view = TimerView(timer(payload='{"order":  17}'), State.SCHEDULED)
    answer = encode.encode_created(Created(view, False), says_existed=False)
    assert b'"payload":{"order":  17}' in answer
    assert json.loads(answer) == {
        "timer": {
            "namespace": "orders",
            "timerId": "order-17",
            "state": "scheduled",
            "executeAt": "2027-01-01T09:00:00.000Z",
            "scheduledAt": "2027-01-01T09:00:00.000Z",
            "createdAt": "2026-12-31T09:00:00.000Z",
            "attempts": 0,
            "callbackUrl": "https://shop.example/hooks/expire",
            "payload": {"order": 17},
        },
        "replaced": False,
    }


def test_a_timer_with_a_schedule_shows_it_as_given_with_its_local_time() -> None:
    schedule = Schedule(at="2027-01-01T10:00", timezone="Europe/Berlin", repeat="daily", exclude=("2027-12-25",))
    state = ScheduleState(
        schedule, None, AT_MS, 3, "2026b", asked="2027-01-01T10:00:00", local="2027-01-01T10:00:00+01:00"
    )
    answer = json.loads(encode.encode_view(TimerView(timer(extras=Extras(later=state)), State.SCHEDULED)))["timer"]
    assert answer["schedule"] == {
        "at": "2027-01-01T10:00",
        "timezone": "Europe/Berlin",
        "repeat": "daily",
        "exclude": ["2027-12-25"],
    }
    assert (answer["occurrence"], answer["tzdata"]) == (3, "2026b")
    assert answer["scheduledAtLocal"] == "2027-01-01T10:00:00+01:00"
    assert "paused" not in answer
    extra = ScheduleState(schedule, None, AT_MS, 3, "2026b")
    answer = json.loads(encode.encode_view(TimerView(timer(extras=Extras(later=extra)), State.SCHEDULED)))["timer"]
    assert "scheduledAtLocal" not in answer


def test_a_paused_timer_shows_when_it_was_due() -> None:
    paused = timer(execute_at_ms=HELD_MS, extras=Extras(later=ScheduleState(held_ms=AT_MS + 5)))
    answer = json.loads(encode.encode_view(TimerView(paused, State.SCHEDULED)))["timer"]
    assert (answer["paused"], answer["executeAt"]) == (True, "2027-01-01T09:00:00.005Z")
    assert "schedule" not in answer
    stopped = timer(execute_at_ms=HELD_MS, extras=Extras(later=ScheduleState(held_ms=HELD_MS)))
    answer = json.loads(encode.encode_view(TimerView(stopped, State.SCHEDULED)))["timer"]
    assert answer["executeAt"] == answer["scheduledAt"] == "2027-01-01T09:00:00.000Z"


def test_a_reached_timer_says_how_it_ended() -> None:
    extras = Extras(
        headers={"x": "1"},
        tags=("a",),
        missed=Missed(fail_if_late_by_ms=60_000),
        first_attempt_at_ms=AT_MS + 2,
        last_attempt_at_ms=AT_MS + 1_000,
        late_by_ms=2,
        last_error="HTTP 500",
        flow_key="shop",
    )
    ended = timer(
        attempts=2,
        execute_at_ms=AT_MS + 900,
        extras=extras,
        correlation_id="c",
        callback_timeout_seconds=5,
        retry_policy=RetryPolicy(max_retries=1),
    )
    reached = Reached(timer=ended, outcome=Outcome.FAILED, reached_at_ms=AT_MS + 1_001, purge_at_ms=AT_MS + DAY_MS)
    answer = json.loads(encode.encode_view(TimerView(ended, State.FAILED, reached)))["timer"]
    assert answer["outcome"] == "failed"
    assert answer["state"] == "failed"
    assert answer["executeAt"] == "2027-01-01T09:00:00.900Z"
    assert answer["reachedAt"] == "2027-01-01T09:00:01.001Z"
    assert answer["firstAttemptAt"] == "2027-01-01T09:00:00.002Z"
    assert answer["lastAttemptAt"] == "2027-01-01T09:00:01.000Z"
    assert (answer["lateByMs"], answer["lastError"], answer["attempts"]) == (2, "HTTP 500", 2)
    assert answer["missed"] == {"failIfLateBy": "1m"}
    assert answer["flowKey"] == "shop"
    assert answer["retryPolicy"] == {
        "maxRetries": 1,
        "initialInterval": "1s",
        "backoffMultiplier": 2.0,
        "maxInterval": "10m",
        "maxDuration": "1d",
    }


def test_what_is_answered_can_be_sent_back() -> None:
    answer = json.loads(encode.encode_view(TimerView(timer(retry_policy=RetryPolicy(max_retries=1)), State.SCHEDULED)))
    fields = ("namespace", "timerId", "executeAt", "callbackUrl", "retryPolicy")
    spec = decode.decode_create(json.dumps({name: answer["timer"][name] for name in fields}).encode(), LIMITS)
    assert spec.execute_at_ms == AT_MS
    assert spec.retry_policy == RetryPolicy(max_retries=1)


def test_the_client_reads_answers_with_the_same_types() -> None:
    view = TimerView(timer(payload="[1.10]"), State.SCHEDULED)
    updated = msgspec.json.decode(encode.encode_updated(Updated(view, Verdict.IN_FLIGHT)), type=wire.UpdatedAnswer)
    assert updated.verdict is Verdict.IN_FLIGHT
    assert isinstance(updated.timer.payload, msgspec.Raw)
    assert bytes(updated.timer.payload) == b"[1.10]"
    refused = InvalidField("timerId", "timerId is required")
    many = msgspec.json.decode(
        encode.encode_created_many([Created(view, True), refused], [TimerSpec(namespace="a", timer_id="b"), refused]),
        type=wire.CreatedManyAnswer,
    )
    assert many.results[0].replaced is True
    assert isinstance(many.results[1].error, wire.ProblemJson)
    assert many.results[1].error.field == "timerId"


@pytest.mark.parametrize(
    "error",
    [
        InvalidField("executeAt", "executeAt must be …"),
        TooLarge("payload too large", field="payload"),
        errors.NotFound("no such timer", code="timer_not_found"),
        errors.Conflict("exists", code="if_absent"),
        errors.Busy(),
        errors.Unserved("not now"),
        errors.OutcomeUnknown(),
        errors.Forbidden("no"),
        errors.Unauthenticated("no"),
    ],
)
def test_an_error_is_encoded_as_a_problem(error: DuetimeError) -> None:
    problem = msgspec.json.decode(wire.encode_problem(wire.problem_of(error)), type=wire.ProblemJson)
    assert (problem.status, problem.code, problem.field) == (error.status, error.code, error.field)
    assert (problem.title, problem.detail) == (error.title, error.detail)
    assert problem.type == f"urn:duetime:problem:{error.code}"
