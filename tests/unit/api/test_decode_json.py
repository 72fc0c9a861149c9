"""Large and hostile bodies: refused before they are decoded as a whole."""

from __future__ import annotations

import msgspec
import pytest

from duetime.api import decode
from duetime.api.decode_json import WHOLE_BYTES_MAX
from duetime.config import load_config
from duetime.errors import DuetimeError, InvalidField, TooLarge

LIMITS = load_config(environ={}).limits


@pytest.mark.parametrize(
    "body",
    [
        b'{"timerId":"' + b"\\ud800" * 50_000 + b'"}',
        b'{"timerId":"t","headers":{' + b",".join(b'"%d":""' % i for i in range(50_000)) + b"}}",
        b'{"timerId":"t","tags":[' + b'"",' * 200_000 + b'""]}',
        b'{"timerId":"t"' + b" " * WHOLE_BYTES_MAX + b"}",
    ],
)
def test_what_is_large_without_its_payload_is_refused_before_it_is_decoded(body: bytes) -> None:
    for call in (lambda: decode.decode_timer_key(body), lambda: decode.decode_filter(body, LIMITS)):
        with pytest.raises(TooLarge):
            call()
    with pytest.raises(DuetimeError) as caught:
        decode.decode_create(body, LIMITS)
    assert isinstance(caught.value, TooLarge) or "surrogate" in caught.value.detail


def test_a_large_payload_is_taken_and_one_that_is_too_large_is_named() -> None:
    limits = msgspec.structs.replace(LIMITS, payload_bytes_max=1_000_000)
    payload = b'"' + b"x" * 999_998 + b'"'
    spec = decode.decode_create(b'{"timerId":"t","delay":"1s","payload":' + payload + b"}", limits)
    assert spec.payload == payload.decode()
    for size in (1_000_000, 16_000_000):
        with pytest.raises(TooLarge) as caught:
            decode.decode_create(b'{"timerId":"t","delay":"1s","payload":"' + b"x" * size + b'"}', limits)
        assert caught.value.field == "payload"


def test_the_field_of_half_a_surrogate_pair_is_looked_for_in_small_bodies_only() -> None:
    for size, field in ((100, "payload"), (100_000, None)):
        body = b'{"timerId":"t","delay":"1s","payload":"' + b"x" * size + b'\\ud800"}'
        with pytest.raises(InvalidField, match="half of a surrogate pair") as caught:
            decode.decode_create(body, LIMITS)
        assert caught.value.field == field
