"""Payloads: numbers that receivers could not read; limits in bytes. test_wire.py and test_input_limits.py have more."""

from __future__ import annotations

import pytest

from duetime.api.fields import TAG_BYTES_MAX, checked_id, checked_payload, checked_tags, checked_url
from duetime.config import load_config
from duetime.domain.timer import ID_BYTES_MAX
from duetime.errors import InvalidField, TooLarge
from duetime.wire import URL_BYTES_MAX

LIMITS = load_config(environ={}).limits


@pytest.mark.parametrize("number", ["1e309", "-1e0309", "1" * 310, "1" * 200 + "e200", "0.1e400", "1.5E+999"])
def test_a_number_that_no_double_holds_is_found_between_others(number: str) -> None:
    for payload in (f'["1e999",1e100,{number},true]', f'{{"a":{number}}}'):
        with pytest.raises(InvalidField, match="a double cannot hold"):
            checked_payload(payload.encode(), LIMITS)


@pytest.mark.parametrize("payload", ['["1e999"]', "[1e300,1e-999,10e-400]", "1" * 300, '{"1e999":1}', '["e999",1]'])
def test_numbers_that_a_double_holds_and_text_are_taken(payload: str) -> None:
    assert checked_payload(payload.encode(), LIMITS) == payload


# --- limits in bytes -----------------------------------------------------------------------------


def of_bytes(size: int, character: str) -> str:
    """A text of so many bytes in UTF-8, as many of them as possible in this character."""
    each = len(character.encode())
    return character * (size // each) + "a" * (size % each)


CHARACTERS = ["a", "é", "漢", "😀"]


@pytest.mark.parametrize("character", CHARACTERS)
def test_ids_urls_and_tags_are_limited_in_bytes_whatever_the_characters(character: str) -> None:
    fits = of_bytes(ID_BYTES_MAX, character)
    assert checked_id("timerId", fits) == fits
    with pytest.raises(InvalidField, match=f"timerId must have 1 to {ID_BYTES_MAX} bytes"):
        checked_id("timerId", of_bytes(ID_BYTES_MAX + 1, character))
    fits = of_bytes(TAG_BYTES_MAX, character)
    assert checked_tags([fits]) == (fits,)
    with pytest.raises(InvalidField, match="tags must have"):
        checked_tags([of_bytes(TAG_BYTES_MAX + 1, character)])
    fits = of_bytes(URL_BYTES_MAX, character)
    assert checked_url(fits) == fits
    with pytest.raises(InvalidField, match=f"callbackUrl must have 1 to {URL_BYTES_MAX} bytes"):
        checked_url(of_bytes(URL_BYTES_MAX + 1, character))


@pytest.mark.parametrize("character", CHARACTERS)
def test_payloads_are_limited_in_bytes_whatever_the_characters(character: str) -> None:
    fits = f'"{of_bytes(LIMITS.payload_bytes_max - 2, character)}"'
    assert checked_payload(fits.encode(), LIMITS) == fits
    with pytest.raises(TooLarge, match=f"at most {LIMITS.payload_bytes_max} bytes, not {LIMITS.payload_bytes_max + 1}"):
        checked_payload(f'"{of_bytes(LIMITS.payload_bytes_max - 1, character)}"'.encode(), LIMITS)
