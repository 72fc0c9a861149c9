"""The calls about many timers: createMany, deleteMany and list, with every filter and over pages."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from contract import FAR, URL, Asker, ended, exists
from real_server import RealReceiver, wall_ms

from duetime.domain.instants import format_instant
from duetime.http.messages import Response

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEVER_AGAIN = {"maxRetries": 0}


# --- many at once --------------------------------------------------------------------------------


async def test_create_many_answers_each_item_in_order_the_good_and_the_bad(api: Asker, namespace: str) -> None:
    def item(timer_id: str, **more: Any) -> dict[str, Any]:
        return {"namespace": namespace, "timerId": timer_id, "executeAt": FAR, "callbackUrl": URL, **more}

    await api.ok("timers/create", **item("old"))
    items: list[Any] = [
        item("good", payload={"n": 1}),
        item("unknown field", colour=1),
        item("bad time", executeAt="2027-01-01"),
        item("private", callbackUrl="http://10.0.0.1/"),
        {**item("nowhere"), "namespace": "nowhere"},
        {**item("nowhere, if absent"), "namespace": "nowhere", "ifAbsent": True},
        item("old"),
        item("old", ifAbsent=True, payload=2),
        item("fresh", ifAbsent=True),
        {"timerId": "in the default", "executeAt": FAR, "callbackUrl": URL},
        item("twice", payload=1),
        item("twice", payload=2),
    ]
    answer = await api.ok("timers/createMany", timers=items[:1] + items[6:7] + items[8:9])
    plain = {"timer", "replaced"}
    assert [result.keys() for result in answer["results"]] == [plain, plain, plain | {"existed"}]
    status, answer = await api.ask("timers/createMany", {"timers": [*items, 17, None]})
    assert status == 200
    assert answer.keys() == {"results"}
    errors = {
        1: (400, "invalid_field", "colour"),
        2: (400, "invalid_field", "executeAt"),
        3: (400, "invalid_field", "callbackUrl"),
        4: (404, "namespace_not_found", "namespace"),
        5: (404, "namespace_not_found", "namespace"),
        7: (409, "timer_exists", "timerId"),
        12: (400, "invalid_field", None),
        13: (400, "invalid_field", None),
    }
    results = answer["results"]
    assert len(results) == 14
    for number, result in enumerate(results):
        if number in errors:
            assert result.keys() == {"error"}
            problem = result["error"]
            assert problem.keys() - {"field"} == {"type", "title", "status", "detail", "code"}
            assert (problem["status"], problem["code"], problem.get("field")) == errors[number]
        else:
            assert result.keys() - {"existed"} == {"timer", "replaced"}
            assert result.get("existed", False) is (number == 8)  # "fresh", which the first request made
            assert result["timer"]["timerId"] == items[number]["timerId"]
    replaced = {results[n]["timer"]["timerId"]: results[n]["replaced"] for n in (0, 6, 8, 9)}
    assert replaced == {"good": True, "old": True, "fresh": False, "in the default": False}
    assert (results[10]["replaced"], results[11]["replaced"]) == (False, True)
    assert (await api.timer(namespace=namespace, timerId="twice"))["payload"] == 2
    for absent in ("unknown field", "bad time", "private"):
        assert not await exists(api, namespace=namespace, timerId=absent)


async def test_delete_many_answers_each_item_in_order(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    receiver.may_answer.clear()
    due = {"namespace": namespace, "delay": "0s", "callbackUrl": receiver.url}
    await api.ok("timers/create", timerId="flying", **due)
    await receiver.received(1)
    await api.ok("timers/create", namespace=namespace, timerId="waiting", executeAt=FAR, callbackUrl=URL)
    keys: list[Any] = [
        {"namespace": namespace, "timerId": "waiting"},
        {"namespace": namespace, "timerId": "flying"},
        {"namespace": namespace, "timerId": "nobody"},
        {"namespace": "nowhere", "timerId": "a"},
        {"namespace": namespace, "timerId": "waiting"},
        {"namespace": namespace, "timerId": ""},
        {"namespace": namespace, "timerId": "a", "colour": 1},
    ]
    status, answer = await api.ask("timers/deleteMany", {"timers": keys})
    assert status == 200
    assert answer.keys() == {"results"}
    short = [r.get("verdict") or (r["error"]["code"], r["error"].get("field")) for r in answer["results"]]
    assert short == [
        "cancelled",
        "inFlight",
        ("timer_not_found", "timerId"),
        ("namespace_not_found", "namespace"),
        "alreadyReached",
        ("invalid_field", "timerId"),
        ("invalid_field", "colour"),
    ]
    assert all(len(result) == 1 for result in answer["results"])


async def test_a_batch_may_be_empty_and_has_at_most_a_thousand_items(api: Asker, namespace: str) -> None:
    assert await api.ok("timers/createMany", timers=[]) == {"results": []}
    assert await api.ok("timers/deleteMany", timers=[]) == {"results": []}
    items = [{"namespace": namespace, "timerId": f"t{n}", "executeAt": FAR, "callbackUrl": URL} for n in range(1_001)]
    assert await api.refused("timers/createMany", timers=items) == (400, "invalid_field", "timers")
    assert not await exists(api, namespace=namespace, timerId="t0")
    keys = [{"namespace": namespace, "timerId": item["timerId"]} for item in items]
    assert await api.refused("timers/deleteMany", timers=keys) == (400, "invalid_field", "timers")
    assert await api.refused("timers/createMany") == (400, "invalid_field", "timers")
    assert len((await api.ok("timers/createMany", timers=items[:1_000]))["results"]) == 1_000
    answer = await api.ok("timers/deleteMany", timers=keys[:1_000])
    assert answer == {"results": [{"verdict": "cancelled"}] * 1_000}


# --- list ----------------------------------------------------------------------------------------


async def pages(api: Asker, **filter: Any) -> list[list[dict[str, Any]]]:
    """Every page of a list, by its cursors."""
    found: list[list[dict[str, Any]]] = []
    cursor: str | None = None
    while True:
        page = await api.ok("timers/list", **filter, cursor=cursor)
        assert page.keys() == {"timers", "nextCursor"}
        found.append(page["timers"])
        cursor = page["nextCursor"]
        if cursor is None:
            return found
        assert len(found) < 1_000


async def listed(api: Asker, **filter: Any) -> list[str]:
    return [timer["timerId"] for page in await pages(api, **filter) for timer in page]


async def test_a_list_is_in_due_order_and_filters_by_every_condition(api: Asker, namespace: str) -> None:
    items: list[dict[str, Any]] = [
        {"timerId": "b-2", "executeAt": "2127-01-02T00:00:00Z", "tags": ["red"], "correlationId": "c1"},
        {"timerId": "a-1", "executeAt": "2127-01-01T00:00:00Z", "tags": ["red", "blue"], "correlationId": "c2"},
        {"timerId": "a-3", "executeAt": "2127-01-03T00:00:00Z", "correlationId": "c1"},
        {"timerId": "a%4", "executeAt": "2127-01-04T00:00:00Z", "tags": ["blue"]},
    ]
    await api.ok("timers/createMany", timers=[{"namespace": namespace, "callbackUrl": URL, **item} for item in items])
    scheduled = {"namespace": namespace, "state": "scheduled"}
    page = await api.ok("timers/list", **scheduled)
    assert page["nextCursor"] is None
    assert [timer["timerId"] for timer in page["timers"]] == ["a-1", "b-2", "a-3", "a%4"]
    assert page["timers"][0] == await api.timer(namespace=namespace, timerId="a-1")
    conditions: list[tuple[dict[str, Any], list[str]]] = [
        ({"dueFrom": "2127-01-02T00:00:00Z"}, ["b-2", "a-3", "a%4"]),
        ({"dueUntil": "2127-01-03T00:00:00Z"}, ["a-1", "b-2"]),
        ({"dueFrom": "2127-01-02T00:00:00Z", "dueUntil": "2127-01-04T00:00:00Z"}, ["b-2", "a-3"]),
        ({"tag": "red"}, ["a-1", "b-2"]),
        ({"tag": "re"}, []),
        ({"idPrefix": "a-"}, ["a-1", "a-3"]),
        ({"idPrefix": "a%"}, ["a%4"]),
        ({"idPrefix": "A"}, []),
        ({"correlationId": "c1"}, ["b-2", "a-3"]),
        ({"correlationId": "c1", "idPrefix": "a"}, ["a-3"]),
        ({"correlationId": "c1", "tag": "red", "dueFrom": "2127-01-02T00:00:00+00:00"}, ["b-2"]),
    ]
    for condition, expected in conditions:
        assert await listed(api, **scheduled, **condition) == expected, condition
        assert await listed(api, **scheduled, **condition, limit=1) == expected, condition
    assert await listed(api, namespace="default", state="scheduled", tag="red") == []


async def test_paging_shows_every_timer_once_also_those_of_one_instant(api: Asker, namespace: str) -> None:
    items = [{"namespace": namespace, "timerId": f"t{n}", "executeAt": FAR, "callbackUrl": URL} for n in range(57)]
    await api.ok("timers/createMany", timers=items)
    found = await pages(api, namespace=namespace, state="scheduled", limit=10)
    assert all(len(page) <= 10 for page in found)
    assert sorted(timer["timerId"] for page in found for timer in page) == sorted(f"t{n}" for n in range(57))


async def test_every_state_can_be_listed_and_without_one_all_are(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    due = {"namespace": namespace, "delay": "0s", "callbackUrl": receiver.url}
    await api.ok("timers/create", timerId="delivered", **due)
    await ended(api, namespace=namespace, timerId="delivered")
    receiver.answers.append(Response(500))
    await api.ok("timers/create", timerId="failed", **due, retryPolicy=NEVER_AGAIN)
    await ended(api, namespace=namespace, timerId="failed")
    past = format_instant(wall_ms() - 60_000)
    await api.ok(
        "timers/create",
        namespace=namespace,
        timerId="skipped",
        executeAt=past,
        callbackUrl=URL,
        missed={"skipIfLateBy": "1s"},
    )
    await ended(api, namespace=namespace, timerId="skipped")
    await api.ok("timers/create", namespace=namespace, timerId="cancelled", executeAt=FAR, callbackUrl=URL)
    await api.ok("timers/delete", namespace=namespace, timerId="cancelled")
    await api.ok("timers/create", namespace=namespace, timerId="scheduled", executeAt=FAR, callbackUrl=URL)
    receiver.may_answer.clear()
    await api.ok("timers/create", timerId="inFlight", **due)
    await receiver.received(3)

    for state in ("delivered", "failed", "skipped", "cancelled", "inFlight"):
        timers = [timer for page in await pages(api, namespace=namespace, state=state) for timer in page]
        assert [timer["timerId"] for timer in timers] == [state]
        assert timers == [await api.timer(namespace=namespace, timerId=state)]
    scheduled = await listed(api, namespace=namespace, state="scheduled")
    assert "scheduled" in scheduled
    everything = await listed(api, namespace=namespace, limit=2)
    assert everything[:2] == ["inFlight", "scheduled"]  # the waiting ones first, in due order
    assert sorted(everything[2:]) == ["cancelled", "delivered", "failed", "skipped"]


async def test_listing_the_scheduled_ones_does_not_show_what_is_in_flight(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    receiver.may_answer.clear()
    await api.ok("timers/create", namespace=namespace, timerId="a", delay="0s", callbackUrl=receiver.url)
    await receiver.received(1)
    for state, expected in (("inFlight", ["a"]), ("scheduled", [])):
        page = await api.ok("timers/list", namespace=namespace, state=state)
        assert [timer["timerId"] for timer in page["timers"]] == expected, state


@pytest.mark.parametrize(
    ("filter", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"limit": "10"}, "limit"),
        ({"state": "done"}, "state"),
        ({"dueFrom": "yesterday"}, "dueFrom"),
        ({"dueUntil": "2027-01-01"}, "dueUntil"),
        ({"cursor": "next"}, "cursor"),
        ({"cursor": "ü"}, "cursor"),
        ({"cursor": ""}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,1,2]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,1e3,2,3]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,99999999999999999999,0,0]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[7,1,2,3]").decode()}, "cursor"),
        ({"idPrefix": "x" * 256}, "idPrefix"),
        ({"tag": "a\0"}, "tag"),
    ],
)
async def test_a_list_that_cannot_be_names_the_field(api: Asker, filter: dict[str, Any], field: str) -> None:
    assert await api.refused("timers/list", **filter) == (400, "invalid_field", field)
