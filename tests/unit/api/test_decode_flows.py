"""Requests about flows: what they become, and what is refused with the name of the wrong field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from duetime.api.decode_flows import FlowChange, decode_flow, decode_flow_filter, decode_flow_update
from duetime.config import load_config
from duetime.domain.flow_status import FlowFilter, FlowState
from duetime.errors import InvalidField

LIMITS = load_config(environ={}).limits
URL = "https://shop.example/hooks/expire"


def encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def test_an_update_says_which_limits_change_and_which_are_cleared() -> None:
    assert decode_flow_update(encoded({"flowKey": "shop", "rate": 5})) == FlowChange("default", "shop", 5.0, UNSET)
    given = {"namespace": "orders", "flowKey": "shop", "rate": None, "concurrency": 2}
    assert decode_flow_update(encoded(given)) == FlowChange("orders", "shop", None, 2)


@pytest.mark.parametrize("rate", [0.001, 1, 2.5, 100_000])
def test_rates_from_the_least_to_the_greatest_are_allowed(rate: float) -> None:
    assert decode_flow_update(encoded({"flowKey": "shop", "rate": rate})).rate == rate


@pytest.mark.parametrize("concurrency", [1, 10_000])
def test_the_least_and_the_greatest_concurrency_are_allowed(concurrency: int) -> None:
    assert decode_flow_update(encoded({"flowKey": "shop", "concurrency": concurrency})).concurrency == concurrency


@pytest.mark.parametrize("key", ["a", "k" * 255, "é" * 127, URL, "http://h/" + "x" * 2_039, "a?b", "nats:orders.x"])
def test_a_flow_key_is_that_of_a_timer_or_a_url(key: str) -> None:
    assert decode_flow(encoded({"flowKey": key})) == ("default", key)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": -1}, "rate"),
        ({"rate": 0.0009}, "rate"),
        ({"rate": 100_000.1}, "rate"),
        ({"rate": "5"}, "rate"),
        ({"rate": True}, "rate"),
        ({"rate": 10**30}, "rate"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 10_001}, "concurrency"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"paused": True}, "paused"),
        ({}, None),
        ({"flowKey": ""}, "flowKey"),
        ({"flowKey": "k" * 256}, "flowKey"),
        ({"flowKey": "é" * 128}, "flowKey"),
        ({"flowKey": "a\0b"}, "flowKey"),
        ({"flowKey": "\ud800"}, "flowKey"),
        ({"flowKey": None}, "flowKey"),
        ({"flowKey": URL + "?order=17"}, "flowKey"),
        ({"flowKey": "HTTP://h/?"}, "flowKey"),
        ({"flowKey": "http://h/" + "x" * 2_040}, "flowKey"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": None}, "namespace"),
    ],
)
def test_a_wrong_update_names_the_field(fields: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InvalidField) as refused:
        decode_flow_update(encoded({"flowKey": "shop"} | fields))
    assert refused.value.field == field


@pytest.mark.parametrize("rate", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_a_rate_that_is_not_a_finite_number_is_refused(rate: bytes) -> None:
    with pytest.raises(InvalidField):
        decode_flow_update(b'{"flowKey":"shop","rate":%s}' % rate)


def test_a_url_with_a_query_is_refused_with_the_key_that_is_meant() -> None:
    with pytest.raises(InvalidField, match=f"the flow of this URL is '{URL}'"):
        decode_flow(encoded({"flowKey": f"{URL}?order=17"}))


def test_a_filter_may_be_left_out_and_has_states_of_flows() -> None:
    assert decode_flow_filter(b"", LIMITS) == decode_flow_filter(b"{}", LIMITS) == FlowFilter()
    given = {"namespace": "orders", "state": "halfOpen", "limit": 7, "cursor": "x"}
    assert decode_flow_filter(encoded(given), LIMITS) == FlowFilter("orders", FlowState.HALF_OPEN, 7, "x")
    with pytest.raises(InvalidField, match="state must be one of closed, halfOpen, open, paused, not 'failed'"):
        decode_flow_filter(encoded({"state": "failed"}), LIMITS)
    for limit in (0, 1_001):
        with pytest.raises(InvalidField) as refused:
            decode_flow_filter(encoded({"limit": limit}), LIMITS)
        assert refused.value.field == "limit"
