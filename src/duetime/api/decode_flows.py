"""Requests about flows: from the JSON of `wire` to the types of the domain, as `decode.py`."""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime import wire
from duetime.api.decode_json import Body, decoded
from duetime.api.fields import check_not_url_with_query, checked_id
from duetime.config import Limits
from duetime.domain.flow_status import FlowFilter
from duetime.domain.timer import ID_BYTES_MAX
from duetime.errors import InvalidField

__all__ = ["FlowChange", "decode_flow", "decode_flow_filter", "decode_flow_update"]

# A lower rate could be a mistake: to stop a flow there is the pause.
RATE_MIN, RATE_MAX = 0.001, 100_000.0

_ref = msgspec.json.Decoder(wire.FlowRefJson)
_update = msgspec.json.Decoder(wire.UpdateFlowJson)
_list = msgspec.json.Decoder(wire.ListFlowsJson)
_begins_as_url = re.compile("[A-Za-z][A-Za-z0-9+.-]*:").match


class FlowChange(Struct, frozen=True):
    namespace: str
    flow_key: str
    rate: float | UnsetType | None
    concurrency: int | UnsetType | None


def decode_flow(body: Body) -> tuple[str, str]:
    """Namespace and key of a flow."""
    given = decoded(_ref, body)
    return checked_id("namespace", given.namespace), _flow_key(given.flow_key)


def decode_flow_update(body: Body) -> FlowChange:
    given = decoded(_update, body)
    namespace, flow_key = checked_id("namespace", given.namespace), _flow_key(given.flow_key)
    if given.rate is UNSET and given.concurrency is UNSET:
        raise InvalidField(None, "the update has no limit to change: give rate, concurrency or both")
    rate = given.rate
    if isinstance(rate, float) and not RATE_MIN <= rate <= RATE_MAX:
        raise InvalidField(
            "rate",
            f"rate must be between {RATE_MIN:g} and {RATE_MAX:,.0f} calls per second; for none, pause the flow",
        )
    return FlowChange(namespace, flow_key, rate, given.concurrency)


def decode_flow_filter(body: Body, limits: Limits) -> FlowFilter:
    given = decoded(_list, body) if body else wire.ListFlowsJson()
    if given.limit > limits.page_timers_max:
        raise InvalidField("limit", f"limit must be at most {limits.page_timers_max}")
    namespace = None if given.namespace is None else checked_id("namespace", given.namespace)
    return FlowFilter(namespace, given.state, given.limit, given.cursor)


def _flow_key(text: str) -> str:
    """The key of a timer, which is short, or the URL that stands for it."""
    check_not_url_with_query(text)
    return checked_id("flowKey", text, wire.URL_BYTES_MAX if _begins_as_url(text) else ID_BYTES_MAX)
