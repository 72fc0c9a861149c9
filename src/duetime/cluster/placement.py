"""Which member should own which shard. A pure function: every instance computes the same result from the same members.

Rendezvous hashing: every pair of a member and a shard has a weight, and shards are given out by descending weight, so
that a change of members moves few shards. Every member gets an equal share: with the 16 shards of a small service plain
rendezvous hashing would give one of three members eight and another three (ADR 10).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from struct import Struct as Packing

__all__ = ["owners"]

_weights = Packing(">16I")  # one hash gives the weights of so many shards


@lru_cache(4)  # called again and again with the same members
def owners(num_shards: int, members: tuple[str, ...]) -> tuple[str, ...]:
    """The owner of each shard, by its id. The numbers of shards of two members differ by at most one."""
    if not members:
        return ()
    pairs = [
        (weight, shard_id, member)
        for member in members
        for first in range(0, num_shards, 16)
        for shard_id, weight in enumerate(_weights_of(member, first), first)
    ]
    pairs.sort(reverse=True)
    share, extra = divmod(num_shards, len(members))
    owned = dict.fromkeys(members, 0)
    placed: list[str | None] = [None] * num_shards
    for _, shard_id, member in pairs:
        if shard_id >= num_shards or placed[shard_id] is not None or owned[member] > share:
            continue
        if owned[member] == share:
            if extra == 0:
                continue
            extra -= 1
        owned[member] += 1
        placed[shard_id] = member
    return tuple(member for member in placed if member is not None)


def _weights_of(member: str, first: int) -> tuple[int, ...]:
    return _weights.unpack(blake2b(f"{member} {first}".encode(), digest_size=_weights.size).digest())
