"""Requests: from the JSON of `wire` to the types of the domain.

A request is checked here completely before anything acts on it, and every error names the wrong field. The payload is
not decoded: it is checked as text and kept byte for byte, because its sender may have signed or hashed it, and because
decoding would change some numbers. Creates are the hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from duetime import wire
from duetime.api.decode_json import WHOLE_BYTES_MAX, Body, check_large_body, decoded, decoded_whole
from duetime.api.decode_schedules import domain_schedule
from duetime.api.fields import (
    checked_duration,
    checked_flow_key,
    checked_headers,
    checked_id,
    checked_instant,
    checked_missed,
    checked_payload,
    checked_retention,
    checked_retry_policy,
    checked_secrets,
    checked_tags,
    checked_url,
)
from duetime.api.long_lists import split_list
from duetime.config import Limits
from duetime.domain.timer import (
    NOT_BY_OLDER_VERSIONS_MS,
    SHARDS_BY_SIZE,
    Namespace,
    NamespaceSpec,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
)
from duetime.errors import InvalidField

# A list of timers up to this size, with at most so many commas, is decoded at once.
WHOLE_LIST_BYTES_MAX = 1024 * 1024
WHOLE_LIST_COMMAS_MAX = 65_536

S = TypeVar("S")
T = TypeVar("T")

_create = msgspec.json.Decoder(wire.CreateTimerJson)
_update = msgspec.json.Decoder(wire.UpdateTimerJson)
_timer_ref = msgspec.json.Decoder(wire.TimerRefJson)
_raw_timers = msgspec.json.Decoder(wire.RawTimersJson)
_list = msgspec.json.Decoder(wire.ListTimersJson)
_namespace_ref = msgspec.json.Decoder(wire.NamespaceRefJson)
_create_namespace = msgspec.json.Decoder(wire.CreateNamespaceJson)
_update_namespace = msgspec.json.Decoder(wire.UpdateNamespaceJson)


def decode_create(body: Body, limits: Limits) -> TimerSpec:
    if len(body) > WHOLE_BYTES_MAX:
        check_large_body(body, limits)
    given = decoded_whole(_create, body)
    namespace = checked_id("namespace", given.namespace)
    timer_id = checked_id("timerId", given.timer_id)
    execute_at_ms = delay_ms = schedule = None
    if given.schedule is not None:
        if given.execute_at is not None or given.delay is not None:
            raise InvalidField("schedule", "only one of schedule, executeAt and delay is allowed")
        schedule = domain_schedule(given.schedule)
    elif given.execute_at is not None:
        if given.delay is not None:
            raise InvalidField("delay", "only one of delay and executeAt is allowed")
        execute_at_ms = checked_instant("executeAt", given.execute_at)
    elif given.delay is not None:
        delay_ms = checked_duration("delay", given.delay)
    else:
        raise InvalidField("executeAt", "executeAt, delay or schedule is required")
    # At most 15 arguments: with more the interpreter makes a dictionary of them first.
    spec = TimerSpec(
        namespace=namespace,
        timer_id=timer_id,
        execute_at_ms=execute_at_ms,
        delay_ms=delay_ms,
        schedule=schedule,
        callback_url=None if given.callback_url is None else checked_url(given.callback_url),
        payload=None if given.payload is UNSET else checked_payload(given.payload, limits),
        retry_policy=None if given.retry_policy is None else checked_retry_policy(given.retry_policy),
        callback_timeout_seconds=given.callback_timeout_seconds,
        correlation_id=None if given.correlation_id is None else checked_id("correlationId", given.correlation_id),
        headers=checked_headers(given.headers) if given.headers else None,
        tags=checked_tags(given.tags) if given.tags else (),
        missed=None if given.missed is None else checked_missed(given.missed),
        flow_key=None if given.flow_key is None else checked_flow_key(given.flow_key),
    )
    if given.if_absent is UNSET and given.if_reached is UNSET:
        return spec
    return msgspec.structs.replace(
        spec, if_absent=given.if_absent is True, ignore_reached=given.if_reached == "ignore", says_existed=True
    )


def decode_update(body: Body, limits: Limits) -> tuple[TimerKey, TimerPatch]:
    if len(body) > WHOLE_BYTES_MAX:
        check_large_body(body, limits)
    given = decoded_whole(_update, body)
    key = TimerKey(checked_id("namespace", given.namespace), checked_id("timerId", given.timer_id))
    if given.execute_at is not UNSET and given.delay is not UNSET:
        raise InvalidField("delay", "only one of delay and executeAt is allowed")
    has_time = given.execute_at is not UNSET or given.delay is not UNSET
    if has_time and given.schedule is not UNSET and given.schedule is not None:
        raise InvalidField("schedule", "only one of schedule, executeAt and delay is allowed")
    delay_ms = UNSET if given.delay is UNSET else checked_duration("delay", given.delay)
    if given.schedule is not UNSET and not has_time:
        delay_ms = NOT_BY_OLDER_VERSIONS_MS
    patch = TimerPatch(
        execute_at_ms=UNSET if given.execute_at is UNSET else checked_instant("executeAt", given.execute_at),
        delay_ms=delay_ms,
        schedule=_if_given(given.schedule, domain_schedule),
        callback_url=_if_given(given.callback_url, checked_url),
        payload=UNSET if given.payload is UNSET else checked_payload(given.payload, limits),
        retry_policy=_if_given(given.retry_policy, checked_retry_policy),
        callback_timeout_seconds=given.callback_timeout_seconds,
        correlation_id=_if_given(given.correlation_id, lambda text: checked_id("correlationId", text)),
        headers=_if_given(given.headers, checked_headers),
        tags=_if_given(given.tags, checked_tags),
        missed=_if_given(given.missed, checked_missed),
        flow_key=_if_given(given.flow_key, checked_flow_key),
    )
    if patch == TimerPatch():
        raise InvalidField(None, "the update has no field to change")
    return key, patch


def _if_given(value: S | UnsetType | None, convert: Callable[[S], T]) -> T | UnsetType | None:
    return value if value is UNSET or value is None else convert(value)


def decode_timer_key(body: Body) -> TimerKey:
    given = decoded(_timer_ref, body)
    return TimerKey(checked_id("namespace", given.namespace), checked_id("timerId", given.timer_id))


def decode_timers(body: bytes, limits: Limits) -> Generator[int, None, list[Body]]:
    """The items of createMany and deleteMany, not decoded yet: a wrong item must not affect the others.

    Returns them; before that it yields the number of bytes that it has handled since the last time, so that the caller
    can let other requests run. The body may have 16 MiB, and a hostile one millions of items.
    """
    count_max = limits.batch_timers_max
    if len(body) <= WHOLE_LIST_BYTES_MAX and body.count(b",") <= WHOLE_LIST_COMMAS_MAX:
        items: list[Body] = list(decoded_whole(_raw_timers, body).timers)
    else:
        items = yield from split_list(body, count_max)
    if len(items) > count_max:
        raise InvalidField("timers", f"timers must have at most {count_max} items: send several requests")
    return items


def decode_filter(body: Body, limits: Limits) -> TimerFilter:
    given = decoded(_list, body)
    if given.limit > limits.page_timers_max:
        raise InvalidField("limit", f"limit must be at most {limits.page_timers_max}")
    for field, text in (("tag", given.tag), ("idPrefix", given.id_prefix), ("correlationId", given.correlation_id)):
        if text:
            checked_id(field, text)
    if given.all_namespaces and not given.correlation_id:
        raise InvalidField("allNamespaces", "allNamespaces needs a correlationId")
    if given.all_namespaces and given.namespace != "default":
        raise InvalidField("allNamespaces", "give namespace or allNamespaces, not both")
    return TimerFilter(
        namespace=None if given.all_namespaces else checked_id("namespace", given.namespace),
        state=given.state,
        due_from_ms=None if given.due_from is None else checked_instant("dueFrom", given.due_from),
        due_until_ms=None if given.due_until is None else checked_instant("dueUntil", given.due_until),
        tag=given.tag,
        id_prefix=given.id_prefix or None,
        correlation_id=given.correlation_id,
        payloads=given.payloads,
        limit=given.limit,
        cursor=given.cursor,
    )


def decode_namespace_name(body: Body) -> str:
    return checked_id("namespace", decoded(_namespace_ref, body).namespace)


def decode_namespace_create(body: Body, limits: Limits) -> NamespaceSpec:
    given = decoded(_create_namespace, body)
    spec = _namespace_spec(given, limits)
    if given.size is UNSET:
        return spec
    if given.num_shards is not UNSET:
        raise InvalidField("size", "give size or numShards, not both")
    return msgspec.structs.replace(spec, num_shards=SHARDS_BY_SIZE[given.size])


def decode_namespace_update(body: Body, limits: Limits) -> NamespaceSpec:
    given = decoded(_update_namespace, body)
    if given.num_shards is not UNSET:
        raise InvalidField("numShards", "numShards never changes")
    if given.size is not UNSET:
        raise InvalidField("size", "size never changes")
    return _namespace_spec(given, limits)


_NAMESPACE_DEFAULTS = Namespace(name="", num_shards=1, created_at_ms=0)


def _namespace_spec(given: wire.CreateNamespaceJson | wire.UpdateNamespaceJson, limits: Limits) -> NamespaceSpec:
    default = _NAMESPACE_DEFAULTS
    size = given.payload_bytes_max
    if size and size > limits.payload_bytes_max:
        raise InvalidField("payloadBytesMax", f"payloadBytesMax must be at most {limits.payload_bytes_max}")
    retry, timeout, secrets = given.retry_policy, given.callback_timeout_seconds, given.signing_secrets
    return NamespaceSpec(
        name=checked_id("namespace", given.namespace),
        num_shards=given.num_shards,
        callback_url=_if_given(given.callback_url, checked_url),
        retry_policy=default.retry_policy
        if retry is None
        else UNSET
        if retry is UNSET
        else checked_retry_policy(retry),
        callback_timeout_seconds=default.callback_timeout_seconds if timeout is None else timeout,
        require_ok=default.require_ok if given.require_ok is None else given.require_ok,
        delivered_retention_ms=checked_retention(
            "deliveredRetention", given.delivered_retention, default.delivered_retention_ms
        ),
        failed_retention_ms=checked_retention("failedRetention", given.failed_retention, default.failed_retention_ms),
        payload_bytes_max=size,
        creates_per_second=given.creates_per_second,
        requests_per_second=given.requests_per_second,
        signing_secrets=() if secrets is None else UNSET if secrets is UNSET else checked_secrets(secrets),
    )


def decode_nothing(body: Body) -> None:
    if body:
        decoded(_nothing, body)


def decode_cluster_query(body: Body) -> wire.ClusterQueryJson:
    return decoded(_cluster_query, body) if body else wire.ClusterQueryJson()


_nothing = msgspec.json.Decoder(wire.EmptyJson)
_cluster_query = msgspec.json.Decoder(wire.ClusterQueryJson)
