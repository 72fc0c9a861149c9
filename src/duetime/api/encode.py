"""Answers: from the types of the domain to the JSON of `wire`. The answer to a create is the hot path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from duetime import wire
from duetime.domain.flow_status import FlowStatus
from duetime.domain.instants import format_duration, format_instant
from duetime.domain.schedule import TZDATA_VERSION
from duetime.domain.secrets import redacted_secret
from duetime.domain.status import ClusterStatus, MemberStatus, ShardMap, ShardStatus
from duetime.domain.timer import (
    NO_EXTRAS,
    Created,
    Extras,
    Missed,
    Namespace,
    RetryPolicy,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import DuetimeError
from duetime.service.flows import FlowAnswer, FlowPage, Unanswered
from duetime.wire import TimerJson

S = TypeVar("S", bound=Struct)

_encode = msgspec.json.Encoder().encode


def encode_view(view: TimerView) -> bytes:
    return _encode(wire.TimerAnswer(timer_json(view)))


def encode_created(created: Created, *, says_existed: bool) -> bytes:
    existed = created.existed if says_existed else UNSET
    return _encode(wire.CreatedAnswer(timer_json(created.view), created.replaced, existed))


def encode_updated(updated: Updated) -> bytes:
    return _encode(wire.UpdatedAnswer(timer_json(updated.view), updated.verdict))


def encode_verdict(verdict: Verdict) -> bytes:
    return _encode(wire.DeletedAnswer(verdict))


def encode_created_many(results: Sequence[Created | DuetimeError], specs: Sequence[TimerSpec | DuetimeError]) -> bytes:
    return _encode(wire.CreatedManyAnswer(list(map(_create_result, results, specs))))


def _create_result(result: Created | DuetimeError, spec: TimerSpec | DuetimeError) -> wire.CreateResult:
    if isinstance(result, Created):
        says_existed = isinstance(spec, TimerSpec) and spec.says_existed
        return wire.CreateResult(timer_json(result.view), result.replaced, result.existed if says_existed else UNSET)
    return wire.CreateResult(error=wire.problem_of(result))


def encode_deleted_many(results: Sequence[Verdict | DuetimeError]) -> bytes:
    return _encode(
        wire.DeletedManyAnswer(
            [
                wire.DeleteResult(result)
                if isinstance(result, Verdict)
                else wire.DeleteResult(error=wire.problem_of(result))
                for result in results
            ]
        )
    )


def encode_page(views: Sequence[TimerView], next_cursor: str | None) -> bytes:
    return _encode(wire.TimersAnswer([timer_json(view) for view in views], next_cursor))


def encode_namespace(namespace: Namespace) -> bytes:
    return _encode(wire.NamespaceAnswer(namespace_json(namespace)))


def encode_namespaces(namespaces: Sequence[Namespace]) -> bytes:
    return _encode(wire.NamespacesAnswer([namespace_json(namespace) for namespace in namespaces]))


def timer_json(view: TimerView) -> TimerJson:
    timer = view.timer
    execute_at = format_instant(timer.execute_at_ms)
    scheduled_at = execute_at if timer.scheduled_at_ms == timer.execute_at_ms else format_instant(timer.scheduled_at_ms)
    answer = TimerJson(
        timer.namespace,
        timer.timer_id,
        view.state,
        execute_at,
        scheduled_at,
        format_instant(timer.created_at_ms),
        timer.attempts,
        timer.callback_url,
        UNSET if timer.payload is None else Raw(timer.payload.encode()),
        UNSET if timer.retry_policy is None else _retry_policy_json(timer.retry_policy),
        UNSET if timer.callback_timeout_seconds is None else timer.callback_timeout_seconds,
        UNSET if timer.correlation_id is None else timer.correlation_id,
    )
    if timer.extras != NO_EXTRAS:
        _add_extras(answer, timer.extras)
        if isinstance(timer.extras.later, ScheduleState):
            _add_schedule(answer, timer.extras.later)
    if view.reached is not None:
        answer.outcome = view.reached.outcome
        answer.reached_at = format_instant(view.reached.reached_at_ms)
    return answer


def _add_extras(answer: TimerJson, extras: Extras) -> None:
    if extras.tags:
        answer.tags = list(extras.tags)
    if extras.headers:
        answer.headers = extras.headers
    if extras.missed is not None:
        answer.missed = _missed_json(extras.missed)
    if extras.flow_key is not None:
        answer.flow_key = extras.flow_key
    if extras.first_attempt_at_ms is not None:
        answer.first_attempt_at = format_instant(extras.first_attempt_at_ms)
    if extras.last_attempt_at_ms is not None:
        answer.last_attempt_at = format_instant(extras.last_attempt_at_ms)
    if extras.late_by_ms is not None:
        answer.late_by_ms = extras.late_by_ms
    if extras.last_error is not None:
        answer.last_error = extras.last_error


def _add_schedule(answer: TimerJson, state: ScheduleState) -> None:
    if state.held_ms is not None:
        answer.paused = True
        answer.execute_at = answer.scheduled_at if state.held_ms >= HELD_MS else format_instant(state.held_ms)
    if state.schedule is None:
        return
    answer.schedule = _schedule_json(state.schedule)
    answer.occurrence = state.number
    answer.tzdata = state.tzdata
    if state.local:
        answer.scheduled_at_local = state.local


@lru_cache(maxsize=128)
def _schedule_json(schedule: Schedule) -> wire.ScheduleJson:
    return wire.ScheduleJson(
        timezone=schedule.timezone,
        at=schedule.at,
        repeat=schedule.repeat,
        gap=schedule.gap,
        fold=schedule.fold,
        exclude=list(schedule.exclude) or None,
        until=schedule.until,
        feb29=schedule.feb29,
        catch_up=schedule.catch_up,
    )


@lru_cache(maxsize=1_024)
def _retry_policy_json(policy: RetryPolicy) -> wire.RetryPolicyJson:
    return wire.RetryPolicyJson(
        max_retries=policy.max_retries,
        initial_interval=format_duration(policy.initial_interval_ms),
        backoff_multiplier=policy.backoff_multiplier,
        max_interval=format_duration(policy.max_interval_ms),
        max_duration=format_duration(policy.max_duration_ms),
    )


def _missed_json(missed: Missed) -> wire.MissedJson:
    skip, fail = missed.skip_if_late_by_ms, missed.fail_if_late_by_ms
    return wire.MissedJson(
        skip_if_late_by=None if skip is None else format_duration(skip),
        fail_if_late_by=None if fail is None else format_duration(fail),
    )


def namespace_json(namespace: Namespace) -> wire.NamespaceJson:
    return wire.NamespaceJson(
        namespace=namespace.name,
        num_shards=namespace.num_shards,
        callback_url=UNSET if namespace.callback_url is None else namespace.callback_url,
        retry_policy=_retry_policy_json(namespace.retry_policy),
        callback_timeout_seconds=namespace.callback_timeout_seconds,
        require_ok=namespace.require_ok,
        delivered_retention=format_duration(namespace.delivered_retention_ms),
        failed_retention=format_duration(namespace.failed_retention_ms),
        payload_bytes_max=UNSET if namespace.payload_bytes_max is None else namespace.payload_bytes_max,
        creates_per_second=UNSET if namespace.creates_per_second is None else namespace.creates_per_second,
        requests_per_second=UNSET if namespace.requests_per_second is None else namespace.requests_per_second,
        signing_secrets=[redacted_secret(secret) for secret in namespace.signing_secrets],
        paused=namespace.paused,
        created_at=format_instant(namespace.created_at_ms),
    )


def encode_flow(answer: FlowAnswer) -> bytes:
    return _encode(wire.FlowAnswerJson(_flow_json(answer.flow), _unanswered_json(answer.unanswered)))


def encode_flows(page: FlowPage) -> bytes:
    flows = [_flow_json(flow) for flow in page.flows]
    return _encode(wire.FlowsAnswer(flows, page.next_cursor, _unanswered_json(page.unanswered)))


def _flow_json(flow: FlowStatus) -> wire.FlowJson:
    return wire.FlowJson(
        namespace=flow.namespace,
        flow_key=flow.flow_key,
        origin=flow.origin,
        state=flow.state,
        waiting=flow.waiting,
        in_flight=flow.in_flight,
        until=None if flow.until_ms is None else format_instant(flow.until_ms),
        last_error=flow.last_error,
        rate=flow.rate,
        concurrency=flow.concurrency,
    )


def _unanswered_json(instances: Sequence[Unanswered]) -> list[wire.UnansweredJson]:
    return [_copied(wire.UnansweredJson, instance) for instance in instances]


def encode_preview(instants: list[wire.OccurrenceJson]) -> bytes:
    return _encode(wire.PreviewAnswer(instants=instants, tzdata=TZDATA_VERSION))


def encode_shard_map(found: ShardMap, may_see: Callable[[str], bool]) -> bytes:
    return _encode(
        wire.ClusterMapJson(
            instances=found.addresses,
            instance_ids=found.instance_ids,
            owners=found.owners,
            namespaces={name: count for name, count in found.num_shards.items() if may_see(name)},
        )
    )


def encode_cluster_status(status: ClusterStatus, *, with_held_for: bool) -> bytes:
    """`with_held_for` is False for tokens of some namespaces: the flows may belong to other namespaces."""
    return _encode(
        _copied(
            wire.ClusterStatusJson,
            status,
            members=[_member_json(member, with_held_for) for member in status.members],
            shard_counts=_copied(wire.ShardCountsJson, status.shard_counts),
            unowned_shards=list(status.unowned_shards),
            shards=UNSET if status.shards is None else [_shard_json(shard) for shard in status.shards],
        )
    )


def _member_json(member: MemberStatus, with_held_for: bool) -> wire.MemberJson:
    """The member's row, and in the same object what the member says of itself."""
    reported = member.status
    held_for = reported.held_for if reported is not None and with_held_for else ()
    brokers = reported.brokers if reported is not None else ()
    if not with_held_for:  # reasons name namespaces
        brokers = tuple(msgspec.structs.replace(broker, retry_reason=None, refusal_reason=None) for broker in brokers)
    return _copied(
        wire.MemberJson,
        *((member,) if reported is None else (reported, member)),
        self=member.self_,
        joined_at=format_instant(member.joined_at_ms),
        held_for=[_copied(wire.HeldForJson, flow) for flow in held_for] or UNSET,
        brokers=[_copied(wire.BrokerJson, broker) for broker in brokers] or UNSET,
    )


def _shard_json(shard: ShardStatus) -> wire.ShardJson:
    horizon = UNSET if shard.horizon_ms is None else format_instant(shard.horizon_ms)
    return _copied(wire.ShardJson, shard, horizon=horizon)


def _copied(kind: type[S], *sources: Struct, **others: Any) -> S:
    """A JSON object whose fields have the values of the fields of the same name; later sources win. None: left out.

    So the figures of a status are named in domain/status.py, and nowhere else.
    """
    values: dict[str, Any] = {}
    for source in sources:
        for name in source.__struct_fields__:
            if name in kind.__struct_fields__ and (value := getattr(source, name)) is not None:
                values[name] = value
    return kind(**(values | others))
