"""Commands from Apache Kafka: a consumer of a group, which commits what has been done.

Kafka stores one offset for each partition: everything before it is done. So while a command waits for a retry, the
offset of its partition is not committed, and the commands after it are carried out. After a failure these are received
again, and the service finds that they were carried out. Their number is limited, and so is what waits here for a retry:
Kafka itself delivers nothing again to a consumer that goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.client import CoordinationType
from aiokafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    GroupAuthorizationFailedError,
    IllegalGenerationError,
    KafkaError,
    NoError,
    NotCoordinatorError,
    RebalanceInProgressError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownMemberIdError,
    for_code,
)
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.structs import TopicPartition
from msgspec import Struct
from msgspec.structs import replace

from duetime.brokers.kafka import KafkaConnection, NotPublished, end, is_topic, named
from duetime.brokers.kafka_batches import Unreadable, bound_batches, no_key
from duetime.brokers.names import TENANT, filled, tenant_of
from duetime.config import Kafka
from duetime.domain.timer import CommandPosition
from duetime.errors import BrokerAway, SetupError
from duetime.ingress.offsets import Progress
from duetime.ingress.source import Backlog, Message, Refusal, dead_letter
from duetime.single_flight import retrieved
from duetime.telemetry import log

__all__ = ["KafkaCommands"]

_RECEIVE_SECONDS: Final = 1.0
_RECORDS_MAX: Final = 64  # taken at once of what the driver has fetched: each may have RECORD_BYTES_MAX
_LOOK_SECONDS: Final = 0.01  # after this time no more is taken at once, and the event loop does other work
_FETCH_BYTES_MAX: Final = 8 * 1024 * 1024
_DISTANCE_MAX: Final = 10_000  # of one partition, from the first command that is not done to the last one received
_HOLDS_UP_DELIVERIES: Final = 5  # of a command that is not done, until it may be given up for those after it: some 15 s
_WAITING_MAX: Final = 50_000
_OPEN_SECONDS: Final = 15.0
_COMMIT_SECONDS: Final = 5.0
_COMMIT_PAUSE_SECONDS: Final = 0.1
_REVOKE_SECONDS: Final = 3.0
_PUBLISH_SECONDS: Final = 15.0
_LETTER_PAUSE_SECONDS: Final = 15.0  # after a dead letter that could not be published
_LAG_SECONDS: Final = 5.0
_LAG_PARTITIONS_MAX: Final = 1_000
_LOOKS_WITHOUT_TOPICS: Final = 2  # after the first one the driver may not know the topics yet
_STOP_LOOKS: Final = 5
_STOP_LOOK_SECONDS: Final = 2.0
_REFUSED_SECONDS: Final = 30.0  # after a missing permission it is tried again
_SESSION_SECONDS: Final = 10.0
_HEARTBEAT_SECONDS: Final = 1.0  # within it the members notice that one has joined or left; new ones wait for that
_REQUEST_SECONDS: Final = 15.0  # longer than a session: to join a group can take as long as that
_METADATA_SECONDS: Final = 10.0  # topics of new tenants are found within this time
_TENANT_CHARS: Final = "[A-Za-z0-9_-]{1,128}"
_NOT_A_MEMBER: Final = frozenset({UnknownMemberIdError, IllegalGenerationError})
_OTHER_COORDINATOR: Final = frozenset({CoordinatorNotAvailableError, NotCoordinatorError, RequestTimedOutError})
_LETTER_OVERHEAD: Final = 1_024  # of a dead letter in its batch, with headers


class _Place(Struct, frozen=True, eq=False):
    """Handle of a message."""

    partition: Any
    progress: Progress


class _Rebalance(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, commands: KafkaCommands) -> None:
        self._commands = commands

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Of this driver each rebalance takes all partitions. What it names here can be the assignment before the last
        one."""
        await self._commands._revoke()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Nothing is known of a partition before its first record."""


class KafkaCommands:
    name = "kafka"

    def __init__(self, config: Kafka, connection: KafkaConnection) -> None:
        _check(config)
        bound_batches()
        self._config = config
        self._connection = connection
        self._has_tenants = TENANT in config.command_topic
        self._consumer: Any = None
        self._has_joined = False
        self._fetching: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._progress: dict[Any, Progress] = {}
        self._fetched: deque[Message] = deque()
        self._waiting: list[tuple[float, int, Message]] = []  # for a retry: a heap by time
        self._waiting_bytes = 0
        self._numbers = itertools.count()
        self._to_commit: set[Any] = set()  # partitions in which more is done than is committed
        self._committing = asyncio.Lock()
        self._far: set[Any] = set()  # partitions that are too far ahead of their first command that is not done
        self._held: dict[Any, float] = {}  # partitions that cannot be read until then
        self._paused: set[Any] = set()
        self._refused: tuple[str, float] | None = None  # why this login cannot read, and until when that is believed
        self._reported: set[str] = set()
        self._has_topics: bool | None = None  # of commands, as far as it is known
        self._looks_without_topics = 0

    # --- open and close ---------------------------------------------------------------------------

    async def open(self) -> None:
        await self._connection.open()
        if self._refused is not None:
            text, until = self._refused
            if asyncio.get_running_loop().time() < until:
                raise SetupError(text)
            self._refused = None
        if self._consumer is None:
            self._consumer = await self._new_consumer()

    async def _new_consumer(self) -> Any:
        """It joins the group when commands are received for the first time: until then others have the partitions."""
        consumer = AIOKafkaConsumer(
            **self._connection.options(),
            group_id=self._config.group,
            enable_auto_commit=False,
            key_deserializer=no_key,
            auto_offset_reset="earliest",
            isolation_level="read_committed",  # commands of a transaction that was aborted do not count
            fetch_max_bytes=_FETCH_BYTES_MAX,
            session_timeout_ms=int(_SESSION_SECONDS * 1_000),
            heartbeat_interval_ms=int(_HEARTBEAT_SECONDS * 1_000),
            request_timeout_ms=int(_REQUEST_SECONDS * 1_000),
            metadata_max_age_ms=int(_METADATA_SECONDS * 1_000),
        )
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await consumer.start()
                await consumer._client.coordinator_lookup(CoordinationType.GROUP, self._config.group)
        except BaseException as error:
            self._stop_in_background(consumer)
            if isinstance(error, GroupAuthorizationFailedError):
                raise SetupError(self._group_text()) from None
            if isinstance(error, KafkaError | TimeoutError):
                raise BrokerAway(f"kafka: no commands can be read: {named(error)}") from None
            raise
        return consumer

    def _group_text(self) -> str:
        group = self._config.group
        return f"kafka: this login may not read as the group {group!r}: allow it READ on that group (kafka.group)"

    async def close(self) -> None:
        await self._revoke()
        self._drop_consumer()
        if self._stopping:
            await asyncio.wait(self._stopping)

    def _drop_consumer(self) -> None:
        consumer, self._consumer, self._has_joined = self._consumer, None, False
        if self._fetching is not None:
            self._fetching.add_done_callback(retrieved)
            self._fetching.cancel()
            self._fetching = None
        self._forget()
        if consumer is not None:
            self._stop_in_background(consumer)

    def _stop_in_background(self, consumer: Any) -> None:
        task = asyncio.create_task(_stop(consumer))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    # --- receive ----------------------------------------------------------------------------------

    async def receive(self, limit: int, bytes_max: int) -> Sequence[Message]:
        if not self._connection.is_connected:
            raise BrokerAway(self._connection.away_reason)
        if self._consumer is None:
            raise BrokerAway("kafka: the consumer is not open")
        messages = self._take(limit, bytes_max)
        if not messages:
            await self._fetch(limit)
            messages = self._take(limit, bytes_max)
        return messages

    def _take(self, limit: int, bytes_max: int) -> list[Message]:
        taken: list[Message] = []
        size, now = 0, asyncio.get_running_loop().time()
        while len(taken) < limit and size < bytes_max:
            if self._waiting and self._waiting[0][0] <= now:
                message = heapq.heappop(self._waiting)[2]
                self._waiting_bytes -= len(message.body)
            elif self._fetched:
                message = self._fetched.popleft()
            else:
                break
            if not message.handle.progress.is_revoked:
                taken.append(message)
                size += len(message.body)
        return taken

    async def _fetch(self, limit: int) -> None:
        """Waits for records, but not longer than until the next retry. The driver is not cancelled: it would count
        itself as reading for ever."""
        now, wait = asyncio.get_running_loop().time(), _RECEIVE_SECONDS
        if self._waiting:
            wait = min(wait, max(self._waiting[0][0] - now, 0))
        if self._fetching is None:
            self._join()
            self._pause(now)
            self._fetching = asyncio.create_task(self._fetch_some(self._consumer, min(limit, _RECORDS_MAX)))
        done, _ = await asyncio.wait({self._fetching}, timeout=wait)
        if not done:
            return
        fetching, self._fetching = self._fetching, None
        try:
            fetching.result()
        except TopicAuthorizationFailedError as error:
            self._cannot_read(str(error.args[0]) if error.args else "?")
        except GroupAuthorizationFailedError:
            self._refuse_to_read(self._group_text())
        except Exception as error:  # the driver's errors have no common root
            self._drop_consumer()
            raise BrokerAway(f"kafka: no commands can be read: {named(error)}") from None

    async def _fetch_some(self, consumer: Any, records_max: int) -> None:
        """One record at a time, from the partitions in turn. By itself the driver gives all that it has fetched of a
        partition before it turns to the next one: a megabyte, which can be a gigabyte when it is decompressed."""
        fetched_before, wait_ms, until = consumer._fetcher._records, int(_RECEIVE_SECONDS * 1_000), math.inf
        for _ in range(records_max):
            fetched = await consumer.getmany(timeout_ms=wait_ms, max_records=1)
            # In the same step: after a rebalance these records belong to nobody.
            for partition, records in fetched.items():
                self._keep(partition, records)
                if partition in fetched_before:
                    fetched_before.move_to_end(partition)
            now = asyncio.get_running_loop().time()
            if not fetched or now > until:
                return
            wait_ms, until = 0, min(until, now + _LOOK_SECONDS)

    def _join(self) -> None:
        if self._has_joined:
            return
        self._has_joined = True
        topic = self._config.command_topic
        if self._has_tenants:
            pattern = re.escape(topic).replace(re.escape(TENANT), _TENANT_CHARS)
            self._consumer.subscribe(pattern=rf"{pattern}\Z", listener=_Rebalance(self))
        else:
            self._consumer.subscribe([topic], listener=_Rebalance(self))

    def _keep(self, partition: Any, records: Sequence[Any]) -> None:
        topic = partition.topic
        stream = f"kafka:{topic}/{partition.partition}"
        tenant = tenant_of(self._config.command_topic, topic) if self._has_tenants else None
        progress = self._progress.get(partition)
        if progress is not None and not progress.is_held and records[0].offset < (progress.next_offset or 0):
            # The driver goes back only if the log ends before what was received: the topic was created again, or its
            # last records were lost. These are other records, with numbers that were used before.
            self._forget_log(partition, progress)
            progress = None
        if progress is None:
            progress = self._progress[partition] = Progress()
        place = _Place(partition, progress)
        for record in records:
            body = record.value or b""  # None deletes, in a topic that is compacted: here it is no command
            if isinstance(body, Unreadable) and body.is_held:
                self._hold(partition, progress, body)
                break
            if progress.receive(record.offset):
                position = CommandPosition(stream=stream, sequence=record.offset, at_ms=max(record.timestamp, 0))
                self._fetched.append(Message(topic, tenant, bytes(body), position, 1, place))
        if progress.distance >= _DISTANCE_MAX:
            self._far.add(partition)

    def _hold(self, partition: Any, progress: Progress, reason: bytes) -> None:
        progress.is_held = True
        self._held[partition] = math.inf
        self._report(
            f"kafka: no more commands are read from partition {partition.partition} of {partition.topic!r}: "
            f"{reason.decode()}"
        )

    def _pause(self, now: float) -> None:
        """The partitions from which nothing more is to be read for now."""
        config, consumer = self._config, self._consumer
        for partition in [partition for partition, until in self._held.items() if until <= now]:
            del self._held[partition]
        wanted = self._far | self._held.keys()
        # More than the commands beyond quotas may take (`waiting.py`): they stop nobody else's.
        if len(self._waiting) >= _WAITING_MAX or self._waiting_bytes >= 2 * config.in_flight_bytes_max:
            wanted |= consumer.assignment()
        if wanted == self._paused:
            return
        assigned = consumer.assignment()
        consumer.resume(*(self._paused - wanted) & assigned)
        consumer.pause(*(wanted - self._paused) & assigned)
        self._paused = wanted & assigned

    # --- rebalances -------------------------------------------------------------------------------

    async def _revoke(self) -> None:
        """Other instances may get the partitions: commit what is done, forget the rest."""
        try:
            async with asyncio.timeout(_REVOKE_SECONDS):
                await self._commit()
        except (BrokerAway, TimeoutError):
            pass  # they receive it again
        finally:
            self._forget()

    def _forget(self) -> None:
        for progress in self._progress.values():
            progress.is_revoked = True
        for partitions in (self._progress, self._to_commit, self._far, self._held, self._paused):
            partitions.clear()  # the driver forgets what it has paused too
        self._drop_revoked()

    def _forget_log(self, partition: Any, progress: Progress) -> None:
        progress.is_revoked = True
        del self._progress[partition]
        self._to_commit.discard(partition)
        self._far.discard(partition)
        self._drop_revoked()

    def _drop_revoked(self) -> None:
        self._fetched = deque(message for message in self._fetched if not message.handle.progress.is_revoked)
        self._waiting = [entry for entry in self._waiting if not entry[2].handle.progress.is_revoked]
        self._waiting_bytes = sum(len(entry[2].body) for entry in self._waiting)
        heapq.heapify(self._waiting)

    # --- what becomes of the messages -------------------------------------------------------------

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._finish(message)
        if not self._connection.is_connected:
            raise BrokerAway(self._connection.away_reason)
        await self._commit()

    def _finish(self, message: Message) -> None:
        place = message.handle
        if place.progress.is_revoked:
            return  # another instance receives it
        place.progress.finish(message.position.sequence)
        self._to_commit.add(place.partition)
        if place.progress.distance < _DISTANCE_MAX:
            self._far.discard(place.partition)

    async def _commit(self) -> None:
        """Of all partitions. One request at a time: one that is repeated after a later one would take an offset back.
        Errors: BrokerAway."""
        try:
            async with asyncio.timeout(_COMMIT_SECONDS), self._committing:
                while True:
                    if await self._try_to_commit():
                        return
                    await asyncio.sleep(_COMMIT_PAUSE_SECONDS)
        except GroupAuthorizationFailedError:
            self._report(self._group_text())
            raise BrokerAway(self._group_text()) from None
        except (KafkaError, TimeoutError) as error:
            raise BrokerAway(f"kafka: cannot commit: {named(error)}") from None

    async def _try_to_commit(self) -> bool:
        """False: to be tried again. Not by `consumer.commit`, which refuses what is about to be revoked, repeats an
        offset after a rebalance, when it can be another instance's, and does not say which partitions have failed."""
        consumer = self._consumer
        if consumer is None or not self._to_commit:
            return True
        coordinator = consumer._coordinator
        await coordinator.ensure_coordinator_known()
        # Nothing is awaited from here to the request: these partitions belong to this instance in this generation.
        generation, offsets = coordinator.generation, self._uncommitted()
        if not offsets or generation < 0:  # not a member of the group: without a generation Kafka would not check that
            return True
        topics: dict[str, list[tuple[int, int, str]]] = {}
        for partition, (_, offset) in offsets.items():
            topics.setdefault(partition.topic, []).append((partition.partition, offset, ""))
        request = OffsetCommitRequest(
            self._config.group,
            generation,
            coordinator.member_id,
            OffsetCommitRequest.DEFAULT_RETENTION_TIME,
            list(topics.items()),
        )
        try:
            answer = await coordinator._send_req(request)
        except KafkaError as error:
            if not error.retriable:
                raise
            return False
        errors = {
            TopicPartition(topic, number): for_code(code)
            for topic, numbers in answer.topics
            for number, code in numbers
        }
        for partition, (progress, offset) in offsets.items():
            if errors.get(partition) is NoError:
                progress.committed = offset
        self._uncommitted()
        return self._is_answered(coordinator, generation, errors)

    def _uncommitted(self) -> dict[Any, tuple[Progress, int]]:
        found = {}
        for partition in list(self._to_commit):
            progress = self._progress[partition]
            offset = progress.uncommitted
            if offset is None:
                self._to_commit.discard(partition)
            else:
                found[partition] = (progress, offset)
        return found

    def _is_answered(self, coordinator: Any, generation: int, errors: Mapping[Any, Any]) -> bool:
        """False: the coordinator has to be asked again. What concerns one topic must not stop the others: it stays to
        be committed, with the next commit."""
        found = set(errors.values()) - {NoError}
        if GroupAuthorizationFailedError in found:
            raise GroupAuthorizationFailedError(self._config.group)
        if coordinator.generation == generation:  # else it has joined again meanwhile
            if found & _NOT_A_MEMBER:
                coordinator.reset_generation()
                return True
            if RebalanceInProgressError in found:
                coordinator.request_rejoin()
                return True
        if found & _OTHER_COORDINATOR:
            coordinator.coordinator_dead()
            return False
        if CoordinatorLoadInProgressError in found:
            return False
        for partition, error in errors.items():
            if error is TopicAuthorizationFailedError:
                self._report(
                    f"kafka: this login may not commit offsets of the topic {partition.topic!r}: allow it READ on it"
                )
        return True

    async def retry(self, message: Message, delay_ms: int) -> None:
        if message.handle.progress.is_revoked:
            return  # another instance receives it
        at = asyncio.get_running_loop().time() + delay_ms / 1_000
        again = replace(message, deliveries=message.deliveries + 1)
        heapq.heappush(self._waiting, (at, next(self._numbers), again))
        self._waiting_bytes += len(message.body)

    def holds_others_up(self, message: Message) -> bool:
        """A tenant with topics of its own holds up only itself."""
        is_far = message.handle.partition in self._far and not message.handle.progress.is_revoked
        return is_far and not self._has_tenants and message.deliveries >= _HOLDS_UP_DELIVERIES

    async def refuse(self, message: Message, refusal: Refusal) -> None:
        place = message.handle
        if place.progress.is_revoked:
            return  # another instance receives and refuses it
        # Else only its offset could not be committed: there must be one letter, not one for each try.
        if not place.progress.is_done(message.position.sequence):
            problem = await self._publish_letter(message, refusal)
            if problem is not None:
                await self._put_off(message, problem)
                return
        await self.acknowledge([message])

    async def _publish_letter(self, message: Message, refusal: Refusal) -> str | None:
        """Why it cannot be published. Errors: BrokerAway."""
        topic = filled(self._config.dead_letter_topic, message.tenant or "")
        position = message.position
        try:
            async with asyncio.timeout(_PUBLISH_SECONDS):
                limit = await self._connection.ready(topic)
                letter = dead_letter(message, refusal, max(limit - _LETTER_OVERHEAD, 0))
                headers = {
                    "content-type": b"application/json",
                    "duetime-position": f"{position.stream}/{position.sequence}".encode(),
                }
                await self._connection.publish(topic, letter, headers=headers, bytes_max=limit)
        except (NotPublished, KafkaError, TimeoutError) as error:
            if not self._connection.is_connected:
                raise BrokerAway(self._connection.away_reason) from None
            return f"{topic!r}: {error if isinstance(error, NotPublished) else named(error)}"
        return None

    async def _put_off(self, message: Message, problem: str) -> None:
        """The topic of dead letters has a problem, perhaps only that of this tenant. The command waits, and nothing
        more is read from its partition meanwhile; so the commands of others go on."""
        self._report(f"kafka: a dead letter cannot be published, and its command waits: {problem}")
        partition = message.handle.partition
        until = asyncio.get_running_loop().time() + _LETTER_PAUSE_SECONDS
        self._held[partition] = max(self._held.get(partition, 0), until + _RECEIVE_SECONDS)
        await self.retry(message, int(_LETTER_PAUSE_SECONDS * 1_000))

    async def extend(self, messages: Sequence[Message]) -> None:
        """Nothing to do: a partition belongs to this instance until it is revoked."""

    async def backlog(self) -> Backlog | None:
        consumer = self._consumer
        if consumer is None or not self._has_joined or not self._connection.is_connected:
            return None
        cluster = consumer._client.cluster
        topics = [topic for topic in cluster.topics() if self._is_command_topic(topic)]
        self._report_topics(len(topics))
        if not topics:
            return Backlog(0, remark=self._no_topic_text() if self._has_topics is False else None)
        partitions = [
            TopicPartition(topic, number) for topic in topics for number in cluster.partitions_for_topic(topic) or ()
        ]
        if len(partitions) > _LAG_PARTITIONS_MAX:
            return None
        try:
            async with asyncio.timeout(_LAG_SECONDS):
                ends = await consumer.end_offsets(partitions)
                committed = await consumer._coordinator.fetch_committed_offsets(partitions)
                unknown = [each for each in partitions if each not in committed or committed[each].offset < 0]
                begins = await consumer.beginning_offsets(unknown) if unknown else {}
        except (KafkaError, TimeoutError):
            return None
        waiting: int = sum(
            max(ends[each] - self._reached(each, begins[each] if each in begins else committed[each].offset), 0)
            for each in partitions
        )
        return Backlog(waiting)

    def _no_topic_text(self) -> str:
        return f"no topic matches kafka.command_topic ({self._config.command_topic}) yet"

    def _report_topics(self, count: int) -> None:
        self._looks_without_topics = 0 if count else self._looks_without_topics + 1
        if count:
            if self._has_topics is False:
                log.info("kafka: commands are received from %d topic%s", count, "s" * (count != 1))
            self._has_topics = True
        elif self._looks_without_topics == _LOOKS_WITHOUT_TOPICS:
            log.warning("kafka: %s: no commands are received before there is one", self._no_topic_text())
            self._has_topics = False

    def _reached(self, partition: Any, committed: int) -> int:
        progress = self._progress.get(partition)
        return committed if progress is None else max(progress.next_offset or 0, committed)

    def _is_command_topic(self, topic: str) -> bool:
        if not self._has_tenants:
            return topic == self._config.command_topic
        return tenant_of(self._config.command_topic, topic) is not None

    # --- permissions ------------------------------------------------------------------------------

    def _cannot_read(self, topic: str) -> None:
        text = f"kafka: this login may not read the topic {topic!r}: allow it READ on that topic"
        if not self._has_tenants:
            self._refuse_to_read(text)
        self._report(text)
        self._consumer._subscription._fetch_count = 0  # the driver does not count its errors
        until = asyncio.get_running_loop().time() + _REFUSED_SECONDS
        for partition in self._consumer.assignment():
            if partition.topic == topic:
                self._held.setdefault(partition, until)

    def _refuse_to_read(self, text: str) -> None:
        self._refused = (text, asyncio.get_running_loop().time() + _REFUSED_SECONDS)
        self._drop_consumer()
        raise BrokerAway(text)

    def _report(self, text: str) -> None:
        """Once: it is found again with every record."""
        if len(self._reported) < 1_000 and text not in self._reported:
            self._reported.add(text)
            log.error("%s", text)


def _check(config: Kafka) -> None:
    commands, letters = config.command_topic, config.dead_letter_topic
    if not is_topic(filled(commands, "a")) or (TENANT in commands and TENANT not in commands.split(".")):
        raise SetupError(
            f"configuration: kafka.command_topic: {commands!r} is not the name of a topic in which {{tenant}}, "
            "if it is there, stands alone between dots"
        )
    if TENANT in letters and TENANT not in commands:
        raise SetupError(
            "configuration: kafka.dead_letter_topic: without {tenant}, for kafka.command_topic is without it too"
        )
    letter = filled(letters, "a")
    if not is_topic(letter):
        raise SetupError(f"configuration: kafka.dead_letter_topic: {letters!r} is not the name of a topic")
    if letter == commands or (TENANT in commands and tenant_of(commands, letter) is not None):
        raise SetupError("configuration: kafka.dead_letter_topic: must not be a topic that kafka.command_topic reads")


async def _stop(consumer: Any) -> None:
    """In bounded time, and completely: a consumer that stays in the group would keep partitions and read nothing."""
    asking = consumer._client._sync_task
    stop = asyncio.ensure_future(consumer.stop())
    stop.add_done_callback(retrieved)
    for _ in range(_STOP_LOOKS):
        done, _ = await asyncio.wait({stop}, timeout=_STOP_LOOK_SECONDS)
        if done:
            break
        # What waits for an answer of the brokers fails then, and the driver goes on with its stop.
        for connection in list(consumer._client._conns.values()):
            connection.close()
    stop.cancel()
    await asyncio.wait({stop})
    await end(asking)
