"""Standard Webhooks signatures, against vectors that another program computed."""

from __future__ import annotations

from base64 import b64encode

import pytest

from duetime.signing import SignatureError, check_secret, new_secret, sign, verify

ONE = "whsec_" + b64encode(b"duetime-test-vector-secret-00001").decode()
TWO = "whsec_" + b64encode(b"duetime-test-vector-secret-00002").decode()
BODY = b'{"namespace":"orders","timerId":"order-17"}'
AT_S = 1_700_000_000
# printf '%s.%s.%s' msg_1 1700000000 "$BODY" | openssl dgst -sha256 -mac HMAC -macopt key:$KEY -binary | base64
BY_ONE = "v1,/U5HS9h25hVpEjrZRTM0Dr4flqY3AW5Fa1YE8pTsEeM="
BY_TWO = "v1,CQRLVk0UQEL+Jjz+NY4Odkv6xrHVxllkjHfhXsRvgVM="


def headers(signature: str = BY_ONE, *, delivery_id: str = "msg_1", timestamp: str = str(AT_S)) -> dict[str, str]:
    return {"Webhook-Id": delivery_id, "webhook-timestamp": timestamp, "WEBHOOK-SIGNATURE": signature}


def test_signatures_are_those_of_the_specification() -> None:
    keys = (check_secret(ONE), check_secret(TWO))
    assert sign("msg_1", AT_S, BODY, keys[:1]) == BY_ONE
    assert sign("msg_1", AT_S, BODY, keys) == f"{BY_ONE} {BY_TWO}"


def test_the_example_of_the_specification_is_signed_as_it_says() -> None:
    key = check_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signature = sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body, (key,))
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_good_signature_answers_the_id_to_deduplicate_by() -> None:
    assert verify(BODY, headers(), [ONE], now_s=AT_S) == "msg_1"


@pytest.mark.parametrize("secrets", [[ONE], [TWO], [TWO, ONE], [new_secret(), TWO]])
def test_while_secrets_are_rotated_either_verifies(secrets: list[str]) -> None:
    assert verify(BODY, headers(f"{BY_ONE} v1a,ed25519 {BY_TWO}"), secrets, now_s=AT_S) == "msg_1"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (headers("v1,AAAA"), "matches"),
        (headers(BY_TWO), "matches"),
        (headers(BY_ONE[:-1]), "matches"),
        (headers(BY_ONE.removeprefix("v1,")), "no v1"),
        (headers(BY_ONE.replace("v1,", "v2,")), "no v1"),
        (headers("v1,é"), "matches"),
        (headers(delivery_id="msg_2"), "matches"),
        (headers(timestamp="1700000001"), "matches"),
        (headers(timestamp="01700000000"), "matches"),
        (headers(timestamp="yesterday"), "must be a number"),
        (headers(timestamp="-1"), "must be a number"),
        (headers(timestamp="9" * 5000), "must be a number"),
        (headers(timestamp="9" * 13), "must be a number"),
        (headers(timestamp="9" * 12), "in the future"),
        (headers(timestamp="１７００００００００"), "must be a number"),
        (headers(""), "webhook-signature is missing"),
        ({}, "webhook-id is missing"),
    ],
)
def test_a_bad_signature_is_refused_with_a_reason(given: dict[str, str], problem: str) -> None:
    with pytest.raises(SignatureError, match=problem):
        verify(BODY, given, [ONE], now_s=AT_S)


def test_without_secrets_nothing_can_be_verified_and_that_is_a_mistake_of_the_receiver() -> None:
    with pytest.raises(ValueError, match="no secrets"):
        verify(BODY, headers(), [], now_s=AT_S)


def test_another_body_is_refused() -> None:
    with pytest.raises(SignatureError):
        verify(BODY + b" ", headers(), [ONE], now_s=AT_S)


@pytest.mark.parametrize(("off_s", "good"), [(300, True), (-300, True), (301, False), (-301, False)])
def test_a_callback_may_be_five_minutes_old_or_early(off_s: int, good: bool) -> None:
    if good:
        verify(BODY, headers(), [ONE], now_s=AT_S + off_s)
    else:
        with pytest.raises(SignatureError, match="old" if off_s > 0 else "in the future"):
            verify(BODY, headers(), [ONE], now_s=AT_S + off_s)


def test_new_secrets_differ_and_are_good() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(check_secret(new_secret())) == 32
