"""The messages between instances: every field, answer and error is decoded as it was sent."""

from __future__ import annotations

import msgspec
import pytest

from duetime.cluster.forwarding import CommandAnswer, CreateCommand, Forward, UpdateCommand
from duetime.cluster.peer_protocol import (
    CommandBatch,
    Reply,
    ReplyBatch,
    decode_commands,
    decode_replies,
    decode_status,
    encode,
    read_reply,
    reply_of,
)
from duetime.domain.status import BrokerStatus, InstanceStatus
from duetime.domain.timer import Created, State, TimerKey, TimerPatch, TimerSpec, TimerView, Updated, Verdict
from duetime.errors import (
    Busy,
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    StoreUnavailable,
)
from duetime.stores.sessions import RetryAtOnce
from duetime.testing import make_timer


@pytest.mark.parametrize(
    "answer",
    [
        Created(TimerView(make_timer(payload='{"a":1}'), State.SCHEDULED), True, True),
        Updated(TimerView(make_timer(), State.IN_FLIGHT), Verdict.IN_FLIGHT),
        Verdict.ALREADY_REACHED,
        TimerView(make_timer(), State.SCHEDULED),
    ],
)
def test_every_kind_of_answer_is_decoded_as_it_was_sent(answer: CommandAnswer) -> None:
    [reply] = decode_replies(encode(ReplyBatch([reply_of(answer)]))).replies
    assert read_reply(reply) == answer


@pytest.mark.parametrize(
    "error",
    [
        NotFound("There is no timer", field="timerId", code="timer_not_found"),
        InvalidField("delay", "delay is too long"),
        Conflict("exists", code="timer_exists"),
        Busy(),
        OutcomeUnknown("no answer"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_error_is_decoded_as_it_was_sent(error: DuetimeError) -> None:
    [reply] = decode_replies(encode(ReplyBatch([reply_of(error)]))).replies
    with pytest.raises(type(error)) as caught:
        read_reply(reply)
    read = caught.value
    assert (read.detail, read.field, read.code, read.status) == (error.detail, error.field, error.code, error.status)


def test_an_error_of_an_adapter_is_sent_as_the_kind_of_error_that_every_instance_knows() -> None:
    reply = reply_of(RetryAtOnce("a deadlock"))
    assert reply.error == "StoreUnavailable"
    with pytest.raises(StoreUnavailable, match="a deadlock"):
        read_reply(reply)


def test_an_error_of_a_newer_version_is_unknown() -> None:
    with pytest.raises(OutcomeUnknown):
        read_reply(Reply(error="SomethingNew", detail="?"))


SPEC = TimerSpec(namespace="orders", timer_id="order-17", delay_ms=1, flow_key="größe 😀")


def batch_of(*commands: CreateCommand | UpdateCommand) -> CommandBatch:
    return CommandBatch("b", "a", 1, [Forward(str(n), 7, 3, command) for n, command in enumerate(commands)])


def test_the_flow_key_of_a_create_and_of_an_update_arrives() -> None:
    key = TimerKey("orders", "order-17")
    sent = batch_of(
        CreateCommand(SPEC), UpdateCommand(key, TimerPatch(flow_key="x")), UpdateCommand(key, TimerPatch(flow_key=None))
    )
    assert decode_commands(encode(sent)) == sent


def test_a_create_of_a_version_that_has_no_flow_keys_is_of_the_default_flow() -> None:
    sent = msgspec.msgpack.decode(encode(batch_of(CreateCommand(SPEC))))
    del sent["new"][0]["order"]["spec"]["flow_key"]
    assert decode_commands(msgspec.msgpack.encode(sent)).new[0].command == CreateCommand(
        msgspec.structs.replace(SPEC, flow_key=None)
    )


def test_a_status_arrives_with_its_brokers_and_that_of_a_version_without_brokers_has_none() -> None:
    status = InstanceStatus(
        instance_id="i",
        version="1",
        ready=True,
        lease_ms=3_000,
        clock_skew_ms=0,
        shards=1,
        in_memory=0,
        in_flight=0,
        held=0,
        writes_waiting=0,
        brokers=(BrokerStatus(name="nats", connected=True, consuming=True, waiting=70, in_flight=3),),
    )
    assert decode_status(encode(status)) == status
    sent = msgspec.msgpack.decode(encode(status))
    for name in ("unacknowledged", "retrying", "retry_reason", "refused", "refused_ago_ms", "refusal_reason", "remark"):
        del sent["brokers"][0][name]  # as a version that does not know them sends it
    sent["brokers"][0]["of_a_later_version"] = 1
    assert decode_status(msgspec.msgpack.encode(sent)) == status
    del sent["brokers"]
    assert decode_status(msgspec.msgpack.encode(sent)).brokers == ()
