"""The commands with which an operator creates what `serve` must not create: streams, the consumer, topics. They are the
same in the errors of `serve`, in the status and in the doctor, and create what `serve` would. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from duetime.config import Kafka, Nats

__all__ = [
    "COMMAND_WEIGHT",
    "PARTITIONS",
    "add_consumer",
    "add_stream",
    "add_topic",
    "edit_consumer_pending",
    "pending_least",
    "pending_wanted",
]

COMMAND_WEIGHT: Final = 3_000  # of a command that waits for its quota, in addition to its bytes
PARTITIONS: Final = 12  # of topics that are created
_REPLICAS: Final = 3
_PENDING_MIN: Final = 100_000


def add_stream(name: str, subjects: Sequence[str], *, deletes_acknowledged: bool = False) -> str:
    retention = " --retention work" if deletes_acknowledged else ""
    return f"nats stream add {name} --subjects '{','.join(subjects)}' --storage file{retention} --defaults"


def add_consumer(config: Nats, subject: str) -> str:
    return (
        f"nats consumer add {config.stream} {config.consumer} --pull --filter '{subject}' --ack explicit "
        f"--wait {config.ack_wait.ms / 1_000:g}s --max-deliver=-1 --deliver all --replay instant "
        f"--max-pending {pending_wanted(config)} --defaults"
    )


def edit_consumer_pending(config: Nats) -> str:
    return f"nats consumer edit {config.stream} {config.consumer} --max-pending {pending_wanted(config)}"


def pending_wanted(config: Nats) -> int:
    """max_ack_pending of the consumer: commands of all instances that are not acknowledged, or wait for a retry."""
    return max(_PENDING_MIN, 100 * config.in_flight_max)


def pending_least(config: Nats) -> int:
    """With fewer, the commands of one tenant beyond its quota keep those of all others from being delivered: it may
    have half of the room of an instance wait (`ingress/waiting.py`)."""
    return config.in_flight_max + config.in_flight_bytes_max // (2 * COMMAND_WEIGHT)


def add_topic(config: Kafka, name: str, brokers: int = _REPLICAS) -> str:
    return (
        f"kafka-topics.sh --bootstrap-server {config.servers[0]} --create --topic {shlex.quote(name)} "
        f"--partitions {PARTITIONS} --replication-factor {max(min(_REPLICAS, brokers), 1)}"
    )
