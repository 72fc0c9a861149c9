"""What `duetime.client` offers: its names, and the functions for receivers of callbacks."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from scripted_server import NEW_YEAR

import duetime
from duetime import client as client_module
from duetime.client import (
    AsyncClient,
    Client,
    InvalidField,
    SignatureError,
    Unserved,
    again_at,
    ok,
    read_callback,
    retry,
    verify,
)
from duetime.clock import SystemClock
from duetime.signing import check_secret, new_secret, sign

BODY = (
    b'{"namespace":"n","timerId":"t","scheduledAt":"2027-01-01T09:00:00.000Z",'
    b'"executeAt":"2027-01-01T09:00:00.000Z","firedAt":"2027-01-01T09:00:00.003Z",'
    b'"attempt":2,"payload":{"a":1},"correlationId":"c"}'
)


def signed(body: bytes, secret: str, at_s: int | None = None) -> dict[str, str]:
    at_s = SystemClock().wall_ms() // 1_000 if at_s is None else at_s
    return {
        "Webhook-Id": "id-1",
        "Webhook-Timestamp": str(at_s),
        "Webhook-Signature": sign("id-1", at_s, body, [check_secret(secret)]),
        "Duetime-Fence": "3.7",
    }


def test_a_signed_callback_is_verified_and_read() -> None:
    secret = new_secret()
    callback = verify(BODY, signed(BODY, secret), [new_secret(), secret])
    assert callback.execute_at == NEW_YEAR
    assert callback.late_by == timedelta(milliseconds=3)
    assert (callback.namespace, callback.timer_id, callback.attempt) == ("n", "t", 2)
    assert (callback.payload, callback.correlation_id) == ({"a": 1}, "c")
    assert (callback.id, callback.fence) == ("id-1", "3.7")


def test_a_forged_or_stale_callback_is_refused() -> None:
    secret = new_secret()
    with pytest.raises(SignatureError):
        verify(BODY, signed(BODY, new_secret()), secret)
    with pytest.raises(SignatureError):
        verify(BODY, signed(BODY, secret, at_s=1), secret)
    with pytest.raises(InvalidField):
        read_callback(b"[]", {})


def test_the_server_decodes_the_answers_of_a_receiver() -> None:
    from duetime.domain.settle import read_answer

    assert read_answer(ok()) == (True, None, None)
    assert read_answer(retry()) == (False, None, None)
    at_ms = int(NEW_YEAR.timestamp() * 1_000)
    assert read_answer(again_at(NEW_YEAR)) == (True, at_ms, None)
    assert read_answer(again_at(NEW_YEAR, done=False)) == (False, at_ms, None)
    with pytest.raises(InvalidField):
        again_at(datetime(2027, 1, 1))  # noqa: DTZ001 - the point of the test


def test_the_public_names_are_these() -> None:
    assert client_module.__all__ == [
        "AsyncClient",
        "Broker",
        "Busy",
        "Callback",
        "Client",
        "ClusterStatus",
        "Conflict",
        "ConnectionFailed",
        "Created",
        "DuetimeError",
        "Ending",
        "Flow",
        "FlowLimits",
        "FlowPage",
        "FlowState",
        "Forbidden",
        "HeldFor",
        "InvalidField",
        "Member",
        "Missed",
        "Namespace",
        "NamespaceSettings",
        "NewTimer",
        "NotFound",
        "Occurrence",
        "Outcome",
        "OutcomeUnknown",
        "Page",
        "Rejected",
        "RetryPolicy",
        "Schedule",
        "SchedulePreview",
        "Shard",
        "ShardCounts",
        "SignatureError",
        "State",
        "Timer",
        "TimerChanges",
        "TimerFilter",
        "TooLarge",
        "Unanswered",
        "Unauthenticated",
        "Unserved",
        "Updated",
        "Verdict",
        "again_at",
        "ok",
        "read_callback",
        "retry",
        "verify",
    ]
    assert all(hasattr(client_module, name) for name in client_module.__all__)
    assert Unserved.code == "not_applied"


def test_the_package_imports_the_clients_only_when_they_are_used() -> None:
    assert duetime.Client is Client
    assert duetime.AsyncClient is AsyncClient
