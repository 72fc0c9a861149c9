"""The format of signing secrets, and how an update names stored ones."""

from __future__ import annotations

from base64 import b64encode

import pytest

from duetime.domain.secrets import (
    SECRETS_MAX,
    check_secret,
    check_secrets,
    is_redacted_secret,
    kept_secrets,
    redacted_secret,
)


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        ("", "must start with"),
        ("plain", "must start with"),
        ("WHSEC_" + "A" * 32, "must start with"),
        ("whsec_", "not 0"),
        ("whsec_" + b64encode(bytes(23)).decode(), "not 23"),
        ("whsec_" + b64encode(bytes(65)).decode(), "not 65"),
        ("whsec_!!!!", "must be base64 after"),
        ("whsec_é", "must be base64 after"),
        ("whsec_" + "A" * 33, "must be base64 after"),
    ],
)
def test_a_bad_secret_is_refused_without_showing_it(secret: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        check_secret(secret)
    assert secret.removeprefix("whsec_") not in str(caught.value) or len(secret) <= 6


@pytest.mark.parametrize("size", [24, 64])
def test_the_bounds_of_a_secret_are_good(size: int) -> None:
    assert check_secret("whsec_" + b64encode(bytes(size)).decode()) == bytes(size)


def test_the_secrets_of_a_request_are_few_and_each_is_a_secret_or_redacted() -> None:
    secret = "whsec_" + b64encode(bytes(24)).decode()
    check_secrets([secret] * SECRETS_MAX)
    check_secrets([redacted_secret(secret), "whsec_...abcd"])
    with pytest.raises(ValueError, match="must be at most 5"):
        check_secrets([secret] * (SECRETS_MAX + 1))
    with pytest.raises(ValueError, match="must start with"):
        check_secrets([redacted_secret(secret), "plain"])


def test_a_redacted_secret_stands_for_the_stored_one() -> None:
    stored = ("whsec_aaaa1111", "whsec_bbbb2222")
    shown = redacted_secret(stored[0])
    assert is_redacted_secret(shown)
    assert "aaaa" not in shown
    assert kept_secrets((shown, "whsec_new"), stored) == ("whsec_aaaa1111", "whsec_new")


def test_a_redacted_secret_that_stands_for_none_or_two_is_refused() -> None:
    with pytest.raises(ValueError, match="matches 0"):
        kept_secrets(("whsec_…9999",), ("whsec_aaaa1111",))
    with pytest.raises(ValueError, match="matches 2"):
        kept_secrets(("whsec_…1111",), ("whsec_aaaa1111", "whsec_bbbb1111"))


def test_a_secret_given_twice_is_kept_once() -> None:
    stored = ("whsec_aaaa1111",)
    assert kept_secrets(("whsec_new", "whsec_new"), stored) == ("whsec_new",)
    assert kept_secrets((redacted_secret(stored[0]), stored[0]), stored) == stored
