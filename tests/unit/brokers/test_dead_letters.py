"""Dead letters: what is published of a command that can never succeed."""

from __future__ import annotations

import json
from base64 import b64decode

import pytest

from duetime.brokers.envelopes import encode_dead_letter


def test_text_stays_readable_and_unknown_fields_are_left_out() -> None:
    letter = encode_dead_letter(b'{"id":"\xc3\xa9"}', subject="a.b", reason="no", bytes_max=1_000)
    assert json.loads(letter) == {"reason": "no", "subject": "a.b", "body": '{"id":"é"}'}


def test_all_fields() -> None:
    letter = encode_dead_letter(
        b"\xff\x00",
        subject="a.b",
        reason="dueAt is required",
        field="payload.dueAt",
        command_id="c-1",
        received_at_ms=1_700_000_000_123,
        bytes_max=1_000,
    )
    assert json.loads(letter) == {
        "reason": "dueAt is required",
        "field": "payload.dueAt",
        "commandId": "c-1",
        "subject": "a.b",
        "receivedAt": "2023-11-14T22:13:20.123Z",
        "bodyBase64": "/wA=",
    }


def test_a_letter_that_would_be_too_large_holds_the_first_part_of_the_body() -> None:
    body = b"\x01" * 400  # six characters each in JSON
    letter = encode_dead_letter(body, subject="a.b", reason="no", bytes_max=400)
    decoded = json.loads(letter)
    assert len(letter) <= 400
    assert decoded["truncated"] is True
    kept = b64decode(decoded["bodyBase64"])
    assert len(kept) > 200
    assert body.startswith(kept)
    assert "body" not in decoded


@pytest.mark.parametrize("at_ms", [-1, 253_402_300_800_000, 2**62, 2**63 - 1])
def test_a_time_that_is_none_is_left_out(at_ms: int) -> None:
    """A publisher of Kafka sets the time of its record. A letter that could not be encoded would never be stored."""
    letter = encode_dead_letter(b"x", subject="a.b", reason="no", received_at_ms=at_ms, bytes_max=1_000)
    assert json.loads(letter) == {"reason": "no", "subject": "a.b", "body": "x"}
