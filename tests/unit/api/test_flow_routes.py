"""Requests about flows: who may send them, and what is answered."""

from __future__ import annotations

from typing import Any

import pytest
from recording_service import World, token

from duetime.domain.flow_status import FlowFilter, FlowState

CHANGES_OF_OPERATORS = [
    ("flows/update", {"namespace": "orders", "flowKey": "shop", "rate": 5}),
    ("flows/pause", {"namespace": "orders", "flowKey": "shop"}),
    ("flows/resume", {"namespace": "orders", "flowKey": "shop"}),
    ("namespaces/pause", {"namespace": "orders"}),
    ("namespaces/resume", {"namespace": "orders"}),
]


@pytest.mark.parametrize(("path", "body"), CHANGES_OF_OPERATORS)
async def test_a_tenant_cannot_change_what_the_operator_has_set(path: str, body: dict[str, Any]) -> None:
    world = World(
        token("tenant", namespaces=("orders",), verbs=("read", "write")),
        token("other", namespaces=("bank",)),
        token("operator", verbs=("admin",)),
        token("of orders", namespaces=("orders",), verbs=("admin",)),
    )
    for refused in ("tenant", "other"):
        response, problem = await world.ask(path, body, bearer=refused)
        assert (response.status, problem["code"]) == (403, "forbidden")
    assert world.service.asked == []
    for allowed in ("operator", "of orders"):
        assert (await world.ask(path, body, bearer=allowed))[0].status == 200


async def test_a_tenant_sees_the_flows_of_its_namespaces_only() -> None:
    world = World(token("tenant", namespaces=("orders",), verbs=("read",)), token("w", verbs=("write",)), token("all"))
    await world.ask("flows/list", bearer="tenant")
    await world.ask("flows/list", {"namespace": "orders", "state": "open"}, bearer="tenant")
    await world.ask("flows/list", bearer="all")
    lists = [asked for asked in world.service.asked if isinstance(asked[0], FlowFilter)]
    assert lists == [
        (FlowFilter(), ("orders",)),
        (FlowFilter("orders", FlowState.OPEN), ("orders",)),
        (FlowFilter(), None),
    ]
    assert (await world.ask("flows/list", {"namespace": "bank"}, bearer="tenant"))[0].status == 403
    assert (await world.ask("flows/get", {"namespace": "bank", "flowKey": "a"}, bearer="tenant"))[0].status == 403
    assert (await world.ask("flows/get", {"namespace": "orders", "flowKey": "a"}, bearer="tenant"))[0].status == 200
    assert (await world.ask("flows/list", bearer="w"))[0].status == 403


async def test_a_flow_is_answered_with_every_field_and_the_instances_that_did_not_answer(world: World) -> None:
    _, answer = await world.ask("flows/get", {"namespace": "orders", "flowKey": "shop"})
    assert answer == {
        "flow": {
            "namespace": "orders",
            "flowKey": "shop",
            "origin": "https://shop.example",
            "state": "open",
            "waiting": 4,
            "inFlight": 1,
            "until": "1970-01-01T00:00:01.000Z",
            "lastError": None,
            "rate": None,
            "concurrency": None,
        },
        "unanswered": [{"instanceId": "j", "address": "127.0.0.1:2", "reason": "no answer in time"}],
    }
    _, answer = await world.ask("flows/list")
    assert answer["nextCursor"] == "next"
    assert "unanswered" not in answer


async def test_reads_of_a_flow_count_for_the_quota_of_its_namespace(world: World) -> None:
    world.service.quotas.refused.add("orders")
    assert (await world.ask("flows/get", {"namespace": "orders", "flowKey": "shop"}))[0].status == 429
    assert (await world.ask("flows/list", {"namespace": "orders"}))[0].status == 429


@pytest.mark.parametrize("bearer", ["chief", "root"])
@pytest.mark.parametrize(("path", "body"), CHANGES_OF_OPERATORS)
async def test_a_flow_is_changed_also_if_its_namespace_has_used_up_its_quota(
    guarded: World, path: str, body: dict[str, Any], bearer: str
) -> None:
    guarded.service.quotas.refused.add("orders")
    assert (await guarded.ask(path, body, bearer=bearer))[0].status == 200
