"""What `duetime doctor` reports about Kafka: the topics, and settings that break a promise. It creates nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError
from msgspec import Struct

from duetime.brokers.by_hand import add_topic
from duetime.brokers.diagnosis import BrokerDiagnosis, Concern, NamespaceTimes, check_retention, missing
from duetime.brokers.kafka import KafkaConnection, named
from duetime.brokers.names import TENANT, filled, tenant_of
from duetime.config import Kafka
from duetime.domain.instants import format_duration
from duetime.errors import BrokerAway

__all__ = ["diagnose_kafka"]

_REQUEST_MS: Final = 5_000
_TOPICS_READ_MAX: Final = 200  # of tenants, one each
_TOPICS_NAMED_MAX: Final = 3
_OFFSETS_KEPT_MS: Final = 7 * 24 * 3_600 * 1_000  # the default of Kafka


class _Topic(Struct):
    name: str
    replicas: int
    settings: Mapping[str, str]  # those that this login may read


async def diagnose_kafka(config: Kafka, namespaces: Sequence[NamespaceTimes]) -> BrokerDiagnosis:
    """Errors: BrokerAway, SetupError."""
    connection = KafkaConnection(config)
    await connection.contact()
    admin = AIOKafkaAdminClient(**connection.options(), request_timeout_ms=_REQUEST_MS)
    try:
        await admin.start()
        described = await admin.describe_topics()
        topics = await _topics(admin, config, described)
        brokers = [broker["node_id"] for broker in (await admin.describe_cluster())["brokers"]]
        offsets_ms = await _offsets_kept_ms(admin, brokers)
    except KafkaError as error:
        raise BrokerAway(f"kafka: the topics cannot be read: {named(error)}") from None
    finally:
        await admin.close()
    existing = {topic["topic"] for topic in described if not topic["error_code"]}
    concerns = [
        *_missing(config, topics, len(brokers)),
        *_missing_of_tenants(config, topics, existing, namespaces, len(brokers)),
        *_retention(config, topics, namespaces, offsets_ms),
        *_losses(topics),
    ]
    facts = [f"connected to {', '.join(config.servers)}", *_facts(config, topics), *_kept(config, topics, offsets_ms)]
    return BrokerDiagnosis(facts, concerns)


async def _offsets_kept_ms(admin: AIOKafkaAdminClient, brokers: Sequence[int]) -> int:
    """How long Kafka keeps what the group has committed after its last member has left."""
    try:
        for answer in await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, str(brokers[0]))]):
            for resource in answer.to_object()["resources"]:
                for entry in resource["config_entries"]:
                    if entry["config_names"] == "offsets.retention.minutes":
                        return int(entry["config_value"]) * 60_000
    except (KafkaError, IndexError):
        pass  # this login may not read it
    return _OFFSETS_KEPT_MS


async def _topics(
    admin: AIOKafkaAdminClient, config: Kafka, described: Sequence[Mapping[str, Any]]
) -> dict[str, _Topic]:
    """Those that the configuration names, and those of tenants."""
    found: dict[str, _Topic] = {}
    own = _own(config)
    for topic in sorted(described, key=lambda topic: str(topic["topic"])):
        name, is_command = topic["topic"], _tenant(config, topic["topic"]) is not None
        if not topic["error_code"] and (name in own or (is_command and len(found) < _TOPICS_READ_MAX)):
            found[name] = _Topic(name, min((len(part["replicas"]) for part in topic["partitions"]), default=0), {})
    if not found:  # none would mean all
        return found
    for answer in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in found]):
        for resource in answer.to_object()["resources"]:
            entries: list[dict[str, Any]] = resource["config_entries"]
            found[resource["resource_name"]].settings = {e["config_names"]: e["config_value"] or "" for e in entries}
    return found


def _own(config: Kafka) -> list[str]:
    """The topics whose names do not depend on the tenant."""
    topics = [config.command_topic, *config.allow_topics, config.dead_letter_topic if config.command_topic else ""]
    return list(dict.fromkeys(topic for topic in topics if topic and TENANT not in topic and "*" not in topic))


def _tenant(config: Kafka, topic: str) -> str | None:
    return tenant_of(config.command_topic, topic) if TENANT in config.command_topic else None


def _missing(config: Kafka, topics: Mapping[str, _Topic], brokers: int) -> Iterator[Concern]:
    for name in _own(config):
        if name not in topics:
            by_hand = add_topic(config, name, brokers)
            yield missing(f"the topic {name!r}", by_hand, is_created=config.create_topics)


def _missing_of_tenants(
    config: Kafka,
    topics: Mapping[str, _Topic],
    existing: Collection[str],
    namespaces: Sequence[NamespaceTimes],
    brokers: int,
) -> Iterator[Concern]:
    """Topics of a tenant are never created by the server."""
    tenants = [tenant for topic in topics if (tenant := _tenant(config, topic)) is not None]
    if TENANT in config.command_topic and not tenants:
        yield Concern(
            f"no topic matches kafka.command_topic ({config.command_topic}) yet",
            "no commands are received before there is one, and publishers fail if Kafka creates no topics by itself",
            f"for each tenant: {add_topic(config, filled(config.command_topic, 'TENANT'), brokers)}",
        )
    targets = {tenant: filled(config.target, tenant) for tenant in tenants}
    targets |= {namespace.name: namespace.target for namespace in namespaces if namespace.target}
    wanted: defaultdict[str, list[str]] = defaultdict(list)  # tenants by topic of events
    for tenant, target in targets.items():
        scheme, _, topic = target.partition(":")
        if scheme == "kafka" and topic not in existing and topic not in _own(config):
            wanted[topic].append(tenant)
    if wanted:
        topic, (tenant, *_) = next(iter(wanted.items()))
        more = f", and {len(wanted) - 1} more topics of events" if len(wanted) > 1 else ""
        yield Concern(
            f"the topic {topic!r} for the events of {tenant!r} does not exist{more}",
            "the timers of such a tenant are tried again by their retry policy, and fail when it ends",
            add_topic(config, topic, brokers),
            is_wrong=True,
        )


def _retention(
    config: Kafka, topics: Mapping[str, _Topic], namespaces: Sequence[NamespaceTimes], offsets_ms: int
) -> Iterator[Concern]:
    """A group whose offsets have expired reads all that is left in the topics. If the topics keep commands no longer
    than Kafka keeps the offsets, these are only commands that it has not read."""
    for kept_ms, some in _by_age(config, topics).items():
        if kept_ms is not None and kept_ms <= offsets_ms:
            continue
        tenants = {_tenant(config, topic.name) for topic in some}
        concerned = [space for space in namespaces if None in tenants or space.name in tenants]
        advice = f"set retention.ms to at most {format_duration(offsets_ms)}, for which Kafka keeps the group's offsets"
        yield from check_retention(_names(some), kept_ms, 0, concerned, advice=advice)


def _by_age(config: Kafka, topics: Mapping[str, _Topic]) -> Mapping[int | None, Sequence[_Topic]]:
    """The topics of commands by how long they keep them. None: for ever."""
    by_age: defaultdict[int | None, list[_Topic]] = defaultdict(list)
    for topic in topics.values():
        is_command = topic.name == config.command_topic or _tenant(config, topic.name) is not None
        if is_command and "retention.ms" in topic.settings:
            by_age[_kept_ms(topic)].append(topic)
    return by_age


def _kept(config: Kafka, topics: Mapping[str, _Topic], offsets_ms: int) -> Iterator[str]:
    ages = _by_age(config, topics)
    if ages:
        longest = None if None in ages else max(age for age in ages if age is not None)
        kept = "for ever" if longest is None else f"for {format_duration(longest)}"
        yield f"commands stay {kept}, the offsets of the group for {format_duration(offsets_ms)}"


def _kept_ms(topic: _Topic) -> int | None:
    kept_ms = int(topic.settings["retention.ms"])
    return None if kept_ms < 0 or "delete" not in topic.settings.get("cleanup.policy", "delete") else kept_ms


def _losses(topics: Mapping[str, _Topic]) -> Iterator[Concern]:
    unclean = [topic for topic in topics.values() if topic.settings.get("unclean.leader.election.enable") == "true"]
    if unclean:
        yield Concern(
            f"unclean.leader.election.enable is true for {_names(unclean)}",
            "messages that were acknowledged are lost when a broker that has not got them becomes the leader",
            "set it to false",
            is_wrong=True,
        )
    alone = [
        topic for topic in topics.values() if topic.replicas > 1 and topic.settings.get("min.insync.replicas") == "1"
    ]
    if alone:
        yield Concern(
            f"min.insync.replicas is 1 for {_names(alone)}",
            "a message may be acknowledged when one broker has it, and is lost with that broker",
            "set it to 2, with 3 replicas",
        )


def _facts(config: Kafka, topics: Mapping[str, _Topic]) -> Iterator[str]:
    of_tenants = [topic for topic in topics.values() if _tenant(config, topic.name) is not None]
    if TENANT in config.command_topic:
        more = " or more" if len(of_tenants) >= _TOPICS_READ_MAX else ""
        yield f"commands: {len(of_tenants)}{more} topics of tenants"
    for name in _own(config):
        if name in topics:
            replicas = topics[name].replicas
            yield f"topic {name!r} with {replicas} replica{'s' * (replicas != 1)}"


def _names(topics: Sequence[_Topic]) -> str:
    named = ", ".join(repr(topic.name) for topic in topics[:_TOPICS_NAMED_MAX])
    more = len(topics) - _TOPICS_NAMED_MAX
    return f"the topic{'s' * (len(topics) > 1)} {named}" + (f" and {more} more" if more > 0 else "")
