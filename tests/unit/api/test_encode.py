"""Answers of the API: every figure of a status is shown, to those who may see it."""

from __future__ import annotations

import msgspec
import pytest
from recording_service import World, headers_of, token

from duetime import wire
from duetime.domain.status import (
    BrokerStatus,
    ClusterStatus,
    HeldFor,
    InstanceStatus,
    MemberStatus,
    ShardCounts,
    ShardStatus,
)


async def test_the_map_has_the_namespaces_the_token_is_for_and_healthz_names_the_instance() -> None:
    world = World(token("all"), token("shop", namespaces=("orders",), verbs=("read",)), token("w", verbs=("write",)))
    _, answer = await world.ask("cluster/map", {}, bearer="all")
    assert answer == {
        "instances": ["127.0.0.1:1", "127.0.0.1:2"],
        "instanceIds": ["i", "j"],
        "owners": [0, 1, None],
        "namespaces": {"default": 3, "orders": 2},
    }
    _, answer = await world.ask("cluster/map", {}, bearer="shop")
    assert answer["namespaces"] == {"orders": 2}
    assert (await world.ask("cluster/map", {}, bearer="w"))[0].status == 403
    response, _ = await world.ask("/healthz", method="GET")
    assert headers_of(response)["duetime-instance"] == "i"


async def test_the_status_shows_each_member_and_lists_shards_if_asked_to(world: World) -> None:
    _, status = await world.ask("cluster/status")
    mine, other = status["members"]
    assert (mine["self"], mine["ready"], mine["reason"], mine["clockSkewMs"]) == (True, False, "starting", -3)
    assert mine["joinedAt"] == "1970-01-01T00:00:00.000Z"
    assert mine["heldFor"] == [
        {"destination": "https://a.test", "held": 4, "inFlight": 2, "failures": 0, "breakerOpen": False}
    ]
    assert mine["brokers"] == [
        {
            "name": "kafka",
            "connected": False,
            "awayReason": "connection refused",
            "inFlight": 0,
            "retrying": 0,
            "refused": 0,
        },
        {
            "name": "nats",
            "connected": True,
            "consuming": True,
            "waiting": 70,
            "inFlight": 3,
            "retrying": 2,
            "retryReason": "quota of a",
            "refused": 1,
            "refusalReason": "b is not JSON",
        },
    ]
    assert other.keys() == {"instanceId", "address", "alive", "self", "shards", "joinedAt", "unreachable"}
    assert status["shardCounts"] == {"total": 2, "owned": 1, "free": 1, "ofDead": 0}
    assert status["unownedShards"] == [1]
    assert "shards" not in status
    _, detailed = await world.ask("cluster/status", {"shards": True})
    assert [shard.get("ownerId") for shard in detailed["shards"]] == ["i", None]
    assert world.service.asked == [False, True]


async def test_destinations_are_named_only_to_those_who_may_see_every_namespace() -> None:
    world = World(token("all"), token("some", namespaces=("orders",)))
    for name, shown in (("all", True), ("some", False)):
        _, status = await world.ask("cluster/status", bearer=name)
        mine = status["members"][0]
        assert ("heldFor" in mine) is shown
        nats = mine["brokers"][1]
        assert [key in nats for key in ("retryReason", "refusalReason")] == [shown, shown], "they name namespaces"
        assert (nats["retrying"], nats["refused"]) == (2, 1)
        assert status["held"] == 4


@pytest.mark.parametrize(
    ("status", "shape", "encoded_otherwise"),
    [
        (ClusterStatus, wire.ClusterStatusJson, set()),
        (MemberStatus, wire.MemberJson, {"self_", "joined_at_ms", "status"}),
        (InstanceStatus, wire.MemberJson, set()),
        (ShardStatus, wire.ShardJson, {"horizon_ms"}),
        (ShardCounts, wire.ShardCountsJson, set()),
        (HeldFor, wire.HeldForJson, set()),
        (BrokerStatus, wire.BrokerJson, set()),
    ],
)
def test_every_field_of_a_status_is_in_the_answer(
    status: type[msgspec.Struct], shape: type[msgspec.Struct], encoded_otherwise: set[str]
) -> None:
    assert set(status.__struct_fields__) - set(shape.__struct_fields__) == encoded_otherwise
