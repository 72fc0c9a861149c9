"""Placement: every instance computes the same owners, shares are equal, and few shards move."""

from __future__ import annotations

from collections import Counter

import pytest

from duetime.cluster.placement import owners

MEMBERS = tuple(f"{number:016x}" for number in range(1, 6))
NEWCOMER = "00000000000000ff"


def moves(before: tuple[str, ...], after: tuple[str, ...]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 16, 17, 100, 1_024, 4_096])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_shard_has_an_owner_and_shares_differ_by_at_most_one(num_shards: int, count: int) -> None:
    placed = owners(num_shards, MEMBERS[:count])
    assert len(placed) == num_shards
    shares = Counter(dict.fromkeys(MEMBERS[:count], 0)) + Counter(placed)
    owned = [shares[member] for member in MEMBERS[:count]]
    assert max(owned) - min(owned) <= 1


def test_every_instance_computes_the_same_owners() -> None:
    assert owners(100, MEMBERS) == owners(100, tuple(reversed(MEMBERS)))


def test_without_members_no_shard_has_an_owner() -> None:
    assert owners(16, ()) == ()


@pytest.mark.parametrize("num_shards", [16, 1_024])
def test_a_new_member_gets_its_share_and_few_other_shards_move(num_shards: int) -> None:
    before, after = owners(num_shards, MEMBERS), owners(num_shards, (*MEMBERS, NEWCOMER))
    assert moves(before, after) <= 1.6 * num_shards / 6 + 1


@pytest.mark.parametrize("num_shards", [16, 1_024])
def test_when_a_member_leaves_few_shards_move_except_its_own(num_shards: int) -> None:
    before, after = owners(num_shards, MEMBERS), owners(num_shards, MEMBERS[1:])
    assert moves(before, after) <= 1.6 * num_shards / 5 + 1


def test_after_a_join_and_a_leave_the_owners_are_the_same_as_before() -> None:
    assert owners(1_024, MEMBERS) == owners(1_024, tuple(sorted({*MEMBERS, NEWCOMER} - {NEWCOMER})))
