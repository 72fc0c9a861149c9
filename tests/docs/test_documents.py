"""What the other tests of this folder rely on: a check of many mentions reports every failure."""

from __future__ import annotations

import pytest
from documents import check_each


def test_every_failure_is_listed() -> None:
    def check(number: int) -> None:
        assert number % 2, "even"

    check_each([1, 3], check)
    with pytest.raises(AssertionError, match="2 of 3 fail:\n2: even\n4: even"):
        check_each([2, 3, 4], check)


def test_an_unexpected_error_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="1 of 1 fail:\n0: division by zero"):
        check_each([0], lambda number: print(1 / number))


def test_nothing_to_check_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="nothing to check"):
        check_each([], print)
