"""duetime.receiver: a callback is accepted only if it is signed and recent; an invalid one raises an error that names
it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from duetime import receiver
from duetime.errors import InvalidField
from duetime.receiver import SignatureError, again_at, read_callback, verify
from duetime.signing import check_secret, new_secret, sign

NOW_S = 1_800_000_000
SECRET = new_secret()
BODY = (
    b'{"namespace":"n","timerId":"t","scheduledAt":"2027-01-01T09:00:00.000Z",'
    b'"executeAt":"2027-01-01T09:00:00.000Z","firedAt":"2027-01-01T09:00:00.003Z",'
    b'"attempt":2}'
)


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def wall_ms(self) -> int:
            return NOW_S * 1_000

    monkeypatch.setattr(receiver, "SystemClock", Clock)


def headers(age_s: int = 0, body: bytes = BODY) -> dict[str, str]:
    at_s = NOW_S - age_s
    return {
        "webhook-id": "id-1",
        "webhook-timestamp": str(at_s),
        "webhook-signature": sign("id-1", at_s, body, [check_secret(SECRET)]),
    }


@pytest.mark.parametrize(
    ("tolerance", "limit_s"), [(None, 300), (timedelta(seconds=10), 10), (timedelta(hours=1), 3_600)]
)
def test_a_callback_is_accepted_within_the_tolerance_only(tolerance: timedelta | None, limit_s: int) -> None:
    given = {} if tolerance is None else {"tolerance": tolerance}
    for age_s in (limit_s, 0, -limit_s):
        assert verify(BODY, headers(age_s), SECRET, **given).timer_id == "t"
    for age_s in (limit_s + 1, -limit_s - 1):
        with pytest.raises(SignatureError):
            verify(BODY, headers(age_s), SECRET, **given)


def test_secrets_may_be_one_text_or_any_collection() -> None:
    for secrets in (SECRET, [SECRET], (new_secret(), SECRET), iter([new_secret(), SECRET])):
        assert verify(BODY, headers(), secrets).id == "id-1"
    with pytest.raises(SignatureError):
        verify(BODY, headers(), new_secret())
    with pytest.raises(ValueError, match="no secrets"):
        verify(BODY, headers(), [])


def test_the_signature_covers_the_exact_bytes_of_the_body() -> None:
    with pytest.raises(SignatureError):
        verify(BODY.replace(b'"attempt":2', b'"attempt":1'), headers(), SECRET)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"\xff", b'{"namespace":"\xff"}', BODY[:-1] + b',"payload":' + b"[" * 100_000, BODY + b"x"],
    ids=["nothing", "a list", "no fields", "not UTF-8", "not UTF-8 inside", "too deep", "more after it"],
)
def test_a_signed_body_that_is_not_a_callback_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidField, match="the body is not a callback"):
        read_callback(body, {})
    with pytest.raises(InvalidField, match="the body is not a callback"):
        verify(body, headers(body=body), SECRET)


def test_header_names_are_case_insensitive_and_optional_without_verification() -> None:
    read = read_callback(BODY, {"WEBHOOK-ID": "id-2", "Duetime-Fence": "3.7"})
    assert (read.id, read.fence) == ("id-2", "3.7")
    read = read_callback(BODY, {})
    assert (read.id, read.fence) == ("", None)


def test_again_at_needs_an_aware_datetime_and_encodes_it_in_utc() -> None:
    at = datetime(2027, 1, 1, 11, tzinfo=timezone(timedelta(hours=2)))
    assert again_at(at) == b'{"ok":true,"nextExecuteAt":"2027-01-01T09:00:00Z"}'
    assert again_at(at.astimezone(UTC), done=False) == b'{"ok":false,"nextExecuteAt":"2027-01-01T09:00:00Z"}'
    with pytest.raises(InvalidField, match="aware"):
        again_at(datetime(2027, 1, 1))  # noqa: DTZ001 - the point of the test
