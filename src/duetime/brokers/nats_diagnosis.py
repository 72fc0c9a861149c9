"""What `duetime doctor` reports about NATS: the streams and the consumer, and settings that break a promise.

It creates nothing. `sync_interval` of the server, which decides whether an acknowledged message survives a power
failure, cannot be read by a client: docs/operating/nats.md says how to set it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from duetime.brokers.by_hand import (
    add_consumer,
    add_stream,
    edit_consumer_pending,
    pending_least,
    pending_wanted,
)
from duetime.brokers.diagnosis import (
    BrokerDiagnosis,
    Concern,
    NamespaceTimes,
    check_duplicate_window,
    check_retention,
    missing,
)
from duetime.brokers.nats import DEAD_LETTERS, EVENTS, NatsConnection, check_consumer, stream_with, subject_of
from duetime.brokers.nats_session import ApiError, NatsSession
from duetime.config import Nats
from duetime.domain.instants import format_duration
from duetime.errors import SetupError

__all__ = ["diagnose_nats"]

_MS_IN_NS: Final = 1_000_000


async def diagnose_nats(config: Nats, dead_after_ms: int, namespaces: Sequence[NamespaceTimes]) -> BrokerDiagnosis:
    """Errors: BrokerAway, SetupError."""
    session = await NatsConnection(config).connect()
    facts: list[str] = [f"connected to {config.url}"]
    concerns: list[Concern] = []
    try:
        await session.api("INFO")  # before all else: is JetStream there for this login?
        if config.command_subject:
            await _commands(session, config, namespaces, facts, concerns)
        await _events(session, config, dead_after_ms, namespaces, facts, concerns)
    finally:
        await session.close()
    return BrokerDiagnosis(facts, concerns)


async def _commands(
    session: NatsSession,
    config: Nats,
    namespaces: Sequence[NamespaceTimes],
    facts: list[str],
    concerns: list[Concern],
) -> None:
    where, subject = f"the stream {config.stream!r}", subject_of(config.command_subject)
    stream = await stream_with(session, subject)
    if stream is None:
        by_hand = add_stream(config.stream, [subject], deletes_acknowledged=True)
        concerns.append(missing(f"{where} for commands ({subject})", by_hand, is_created=config.create_streams))
        return
    if stream["name"] != config.stream:
        concerns.append(_cannot_start(f"commands ({subject}) are stored by {stream['name']!r}, not by {where}"))
        return
    facts.append(f"commands: {_facts(stream)}")
    concerns += _in_memory(stream)
    if stream.get("retention") == "limits":  # with the others, commands are deleted when they are acknowledged
        kept_ms = stream.get("max_age", 0) // _MS_IN_NS or None
        concerns += check_retention(where, kept_ms, config.ack_wait.ms, namespaces)
    consumer = await _found(session, f"CONSUMER.INFO.{config.stream}.{config.consumer}")
    if consumer is None:
        by_hand = add_consumer(config, subject)
        what = f"the consumer {config.consumer!r} of {where}"
        concerns.append(missing(what, by_hand, is_created=config.create_streams))
        return
    try:
        check_consumer(consumer["config"], config, subject)
    except SetupError as error:
        concerns.append(_cannot_start(error.detail))
    concerns += _pending(consumer["config"], config, where)
    waiting, unacknowledged = consumer.get("num_pending", 0), consumer.get("num_ack_pending", 0)
    facts.append(f"consumer {config.consumer!r}: {waiting} commands waiting, {unacknowledged} not acknowledged")


async def _events(
    session: NatsSession,
    config: Nats,
    dead_after_ms: int,
    namespaces: Sequence[NamespaceTimes],
    facts: list[str],
    concerns: list[Concern],
) -> None:
    """The streams in which events and dead letters are stored."""
    wanted = [(subject_of(pattern), "events") for pattern in config.allow_subjects]
    if config.command_subject:
        wanted.append((subject_of(config.dead_letter_subject), "dead letters"))
    shown: set[str] = set()
    unstored: defaultdict[str, list[str]] = defaultdict(list)
    for subject, what in wanted:
        stream = await stream_with(session, subject)
        if stream is None:
            unstored[what].append(subject)
            continue
        name = stream["name"]
        if name in shown:
            continue
        shown.add(name)
        facts.append(f"{what}: {_facts(stream)}")
        concerns += _in_memory(stream)
        if what == "events":
            window_ms = stream.get("duplicate_window", 0) // _MS_IN_NS
            facts[-1] += f", drops repeated events within {format_duration(window_ms)}"
            concerns += check_duplicate_window(f"the stream {name!r}", window_ms, dead_after_ms, namespaces)
    for what, subjects in unstored.items():
        by_hand = add_stream(EVENTS if what == "events" else DEAD_LETTERS, subjects)
        named = f"a stream for {what} ({', '.join(subjects)})"
        concerns.append(missing(named, by_hand, is_created=config.create_streams))


async def _found(session: NatsSession, operation: str) -> dict[str, Any] | None:
    try:
        return await session.api(operation)
    except ApiError as error:
        if error.code == 404:
            return None
        raise SetupError(f"nats: {operation}: {error.description}") from None


def _pending(consumer: dict[str, Any], config: Nats, where: str) -> Iterator[Concern]:
    pending_max = consumer.get("max_ack_pending", -1)
    if 0 < pending_max < pending_wanted(config):
        yield Concern(
            f"the consumer {config.consumer!r} of {where} delivers at most {pending_max} commands that are not "
            "acknowledged, those that wait for their quota included (max_ack_pending)",
            "the commands of one tenant beyond its quota keep those of all others from being delivered"
            if pending_max < pending_least(config)
            else "if tenants are far beyond their quotas, the commands of others are delivered late",
            edit_consumer_pending(config),
            is_wrong=pending_max < pending_least(config),
        )


def _cannot_start(problem: str) -> Concern:
    advice = "correct it there, or the setting in [nats]"
    return Concern(problem, "`duetime serve` cannot start, or receives no commands", advice, is_wrong=True)


def _facts(stream: dict[str, Any]) -> str:
    replicas = stream.get("num_replicas", 1)
    return f"stream {stream['name']!r} with {replicas} replica{'s' * (replicas != 1)}"


def _in_memory(stream: dict[str, Any]) -> Iterator[Concern]:
    if stream.get("storage") == "memory":
        yield Concern(
            f"the stream {stream['name']!r} is in memory",
            "messages that were acknowledged are lost when the server restarts",
            "create it again with file storage",
            is_wrong=True,
        )
