"""Payloads: numbers that receivers could not read. test_wire.py and test_input_limits.py have the other fields."""

from __future__ import annotations

import pytest

from duetime.api.fields import checked_payload
from duetime.config import load_config
from duetime.errors import InvalidField

LIMITS = load_config(environ={}).limits


@pytest.mark.parametrize("number", ["1e309", "-1e0309", "1" * 310, "1" * 200 + "e200", "0.1e400", "1.5E+999"])
def test_a_number_that_no_double_holds_is_found_between_others(number: str) -> None:
    for payload in (f'["1e999",1e100,{number},true]', f'{{"a":{number}}}'):
        with pytest.raises(InvalidField, match="a double cannot hold"):
            checked_payload(payload.encode(), LIMITS)


@pytest.mark.parametrize("payload", ['["1e999"]', "[1e300,1e-999,10e-400]", "1" * 300, '{"1e999":1}', '["e999",1]'])
def test_numbers_that_a_double_holds_and_text_are_taken(payload: str) -> None:
    assert checked_payload(payload.encode(), LIMITS) == payload
