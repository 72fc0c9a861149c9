"""Carries out the commands of a message broker: decodes them, has timers created and deleted by the same path as the
HTTP API, and acknowledges each command after its commit.

Commands of one timer are carried out in the order in which they were received. There are three kinds of errors: a
command that can never succeed becomes a dead letter; one that may succeed later is delivered again; and what stops all
commands (the store or the broker is away) stops the receiving, so that no deliveries are used up meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from msgspec import Struct

from duetime.brokers.connection import bare
from duetime.brokers.envelopes import BadCommand, CancelTimer, ScheduleTimer, decode_command
from duetime.brokers.names import TENANT, filled, is_token
from duetime.domain.timer import Namespace, NamespaceSpec, TimerKey, TimerSpec, Verdict
from duetime.errors import (
    BrokerAway,
    Busy,
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    Rejected,
    SetupError,
    StoreError,
    StoreUnavailable,
    Unserved,
)
from duetime.ingress.refusals import Refusals
from duetime.ingress.retries import Retries
from duetime.ingress.source import CommandSource, Message, Refusal
from duetime.ingress.waiting import Waiting
from duetime.service.service import Service
from duetime.telemetry import Telemetry, log

__all__ = ["Intake", "IntakeSettings"]

# A command whose store or owner is away is tried again here first, after these pauses, then delivered again.
_TRY_AGAIN_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6)
_RETRY_FIRST_MS: Final = 1_000
_RETRY_MAX_MS: Final = 60_000
_BROKER_PAUSE_SECONDS: Final = 1.0
# While commands fail because of the store, one is received this often, to find out whether it is back.
_PROBE_SECONDS: Final = 2.0
_BACKLOG_EVERY_SECONDS: Final = 5.0
_LOOKS_UNACKNOWLEDGED: Final = 3
_REPORT_SECONDS: Final = 1.0
_BUG_LOG_PAUSE_SECONDS: Final = 60.0
# A dead letter that cannot be published, because its stream or topic is missing for example, is tried this often. Then
# the command is handed back: those of one tenant must not take all places.
_DEAD_LETTER_TRIES: Final = 3
_DEAD_LETTER_PAUSE_MS: Final = 30_000
# Bytes of commands that are decoded in one step of the event loop. Dead letters take up to 20 ms a megabyte.
_STEP_BYTES: Final = 256 * 1024
# What was found of a tenant that has no namespace and gets none counts this long: each look reads the store.
_NO_NAMESPACE_SECONDS: Final = 1.0
_NO_NAMESPACE_MAX: Final = 1_000
_RECEIVE_ENDS_SECONDS: Final = 3.0
# At the stop, commands have this long to end. What has not ended is delivered again, to another instance.
_DRAIN_SECONDS: Final = 5.0

_Command = ScheduleTimer | CancelTimer


class IntakeSettings(Struct, frozen=True, kw_only=True):
    target: str  # of timers whose namespace has no default target; {tenant} is the namespace
    create_tenants: bool
    tenants_max: int
    in_flight_max: int
    in_flight_bytes_max: int
    extend_seconds: float | None  # how often the broker has to be told that a command is still being worked on


class _Later(Exception):
    """The command may succeed later."""

    def __init__(self, reason: str, after_ms: int = 0, *, is_quota: bool = False, is_of_store: bool = False) -> None:
        super().__init__(reason)
        self.after_ms = after_ms
        self.is_quota = is_quota
        self.is_of_store = is_of_store


class _Received(Struct, eq=False):
    message: Message
    command: _Command | None  # None: it cannot be decoded
    since: float


class Intake:
    def __init__(
        self,
        source: CommandSource,
        settings: IntakeSettings,
        service: Service,
        telemetry: Telemetry,
    ) -> None:
        self.name = source.name
        self.waiting: int | None = None  # commands in the stream, for all instances. None: not known
        self.remark: str | None = None  # on the stream, for operators
        self.refusals = Refusals(source.name)
        self._retries = Retries(source.name)
        self._unacknowledged: deque[int | None] = deque(maxlen=_LOOKS_UNACKNOWLEDGED)
        self._source = source
        self._settings = settings
        self._service = service
        self._telemetry = telemetry
        self._open: dict[int, _Received] = {}  # what is neither acknowledged nor handed back, by id of the message
        self._bytes = 0
        self._queues: dict[TimerKey, deque[_Received]] = {}  # a key is here while a task works on its commands
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[_Received] = []
        self._has_done = asyncio.Event()
        self._has_room = asyncio.Event()
        self._failures = 0  # of the store, without a success since
        self._probe_ended = asyncio.Event()  # a command has ended, other than by an error of the store
        self._away: str | None = "not opened yet"  # why nothing is received: the broker
        self._stopping = False
        self._background: list[asyncio.Task[None]] = []
        self._creating = asyncio.Lock()
        self._no_namespace: dict[str, tuple[float, InvalidField]] = {}  # by tenant: until when, and why
        self._waiting = Waiting(settings.in_flight_bytes_max)
        self._bug_log_at: dict[type[Exception], float] = {}  # when one of this type is logged again, at the earliest
        telemetry.commands_received.add(self.name, 0)
        telemetry.commands_repeated.add(self.name, 0)
        for result in ("scheduled", "cancelled", "ignored", "refused", "retried"):
            telemetry.commands.add(result, 0)

    # --- status -----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def retrying(self) -> int:
        """Commands that this instance has handed back, and that are delivered again later."""
        return self._retries.count(asyncio.get_running_loop().time())

    @property
    def retry_reason(self) -> str | None:
        """The last reason for which one was handed back. None: none waits."""
        return self._retries.reason(asyncio.get_running_loop().time())

    @property
    def refused_ago_ms(self) -> int | None:
        return self.refusals.age_ms(asyncio.get_running_loop().time())

    @property
    def unacknowledged(self) -> int | None:
        """Commands that all instances have received and not acknowledged. They change all the time; those that wait are
        what was never acknowledged within the last few looks. None: not known."""
        looks = [count for count in self._unacknowledged if count is not None]
        return min(looks) if looks and len(looks) == len(self._unacknowledged) else None

    def not_consuming(self) -> str | None:
        """Why no commands are received; None if they are."""
        if self._stopping:
            return "stopping"
        if self._away is not None:
            return self._away
        if self._failures:
            return "the store is away"
        return self._service.readiness()

    # --- start and stop ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Before the engine starts: what can never work fails the start with a SetupError."""
        try:
            await self._source.open()
        except BrokerAway as error:
            self._away = bare(self.name, error.detail)
        else:
            self._away = None

    def start(self) -> None:
        """After the engine has started."""
        works: list[Callable[[], Awaitable[None]]] = [
            self._receive,
            self._acknowledge,
            self._watch_backlog,
            self._report,
        ]
        if self._settings.extend_seconds is not None:
            works.append(self._extend)
        self._background = [asyncio.ensure_future(self._supervised(work)) for work in works]

    async def stop(self) -> None:
        """Receive nothing more, end what is being worked on, hand back the rest."""
        self._stopping = True
        self._has_room.set()
        if self._background:
            await asyncio.wait(self._background[:1], timeout=_RECEIVE_ENDS_SECONDS)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_DRAIN_SECONDS)
        unfinished = [*self._tasks, *self._background]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
        done, self._done = self._done, []
        with contextlib.suppress(BrokerAway, TimeoutError):
            async with asyncio.timeout(_RECEIVE_ENDS_SECONDS):
                if done:
                    await self._source.acknowledge([item.message for item in done])
                self._close(done)
                for item in list(self._open.values()):
                    await self._source.retry(item.message, 0)
                    self._close([item])
        self.refusals.report(asyncio.get_running_loop().time(), is_end=True)
        await self._source.close()

    async def _supervised(self, work: Callable[[], Awaitable[None]]) -> None:
        """An unexpected error does not end the work; of each type one is logged in a minute."""
        while not self._stopping:
            try:
                await work()
            except Exception as error:
                self._log_bug(error)
                await asyncio.sleep(_BROKER_PAUSE_SECONDS)

    def _log_bug(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._bug_log_at.get(type(error), 0.0):
            self._bug_log_at[type(error)] = now + _BUG_LOG_PAUSE_SECONDS
            log.error("%s: unexpected error while commands are received", self.name, exc_info=error)

    # --- receive ----------------------------------------------------------------------------------

    async def _receive(self) -> None:
        settings, source = self._settings, self._source
        while not self._stopping:
            if self._away is not None and not await self._open_again():
                await asyncio.sleep(_BROKER_PAUSE_SECONDS)
                continue
            limit = settings.in_flight_max - len(self._open)
            room = settings.in_flight_bytes_max - self._bytes
            if limit <= 0 or room <= 0:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            if self._service.readiness() is not None:
                await asyncio.sleep(_BROKER_PAUSE_SECONDS)
                continue
            if self._failures and not await self._has_recovered():
                limit = 1
            try:
                messages = await source.receive(limit, room)
            except BrokerAway as error:
                self._away = bare(self.name, error.detail)
                log.warning("%s: no commands are received: %s", self.name, self._away)
                continue
            size = 0
            for message in messages:
                self._take(message)
                size += len(message.body)
                if size >= _STEP_BYTES:
                    size = 0
                    await asyncio.sleep(0)

    async def _has_recovered(self) -> bool:
        """Waits for the end of a probe. One that the store was not asked for says nothing of it, but the next one must
        not wait: those of one tenant would hold up the commands of all others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._probe_ended.wait()
        self._probe_ended.clear()
        return not self._failures

    async def _open_again(self) -> bool:
        try:
            await self._source.open()
        except BrokerAway as error:
            self._away = bare(self.name, error.detail)
            return False
        except SetupError as error:
            reason = bare(self.name, error.detail)
            if reason != self._away:
                log.error("%s: no commands are received: %s", self.name, reason)
            self._away = reason
            return False
        self._away = None
        log.info("%s: commands are received", self.name)
        return True

    def _take(self, message: Message) -> None:
        self._telemetry.commands_received.add(self.name)
        if message.deliveries > 1:
            self._telemetry.commands_repeated.add(self.name)
        try:
            command = decode_command(message.body, message.tenant)
        except BadCommand as error:
            refusal = Refusal(error.reason, error.field, error.command_id)
            self._spawn(self._refuse(self._opened(message, None), refusal))
            return
        item = self._opened(message, command)
        key = TimerKey(command.tenant, command.timer_id)
        queue = self._queues.get(key)
        if queue is not None:
            queue.append(item)
            return
        self._queues[key] = deque((item,))
        self._spawn(self._work(key))

    def _opened(self, message: Message, command: _Command | None) -> _Received:
        item = _Received(message, command, asyncio.get_running_loop().time())
        self._open[id(message)] = item
        self._bytes += len(message.body)
        return item

    def _close(self, items: list[_Received]) -> None:
        for item in items:
            if self._open.pop(id(item.message), None) is not None:
                self._bytes -= len(item.message.body)
        self._has_room.set()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- carry out --------------------------------------------------------------------------------

    async def _work(self, key: TimerKey) -> None:
        """The commands of one timer, one after the other."""
        queue = self._queues[key]
        try:
            while queue:
                await self._carry_out(queue, _next(queue))
        finally:
            del self._queues[key]

    async def _carry_out(self, queue: deque[_Received], items: list[_Received]) -> None:
        """The last one of `items` counts; the ones before it are ScheduleTimer commands that it replaces."""
        *replaced, last = items
        try:
            result = await self._try(last)
        except _Later as later:
            await self._retry(items, later)
            return
        except Rejected as error:
            queue.extendleft(reversed(replaced))
            await self._refuse(last, _refusal(last, error.detail, error.field))
            return
        except Exception as error:  # a bug must not stop the commands of other timers
            self._log_bug(error)
            await self._retry(items, _Later(f"internal error: {type(error).__name__}", _RETRY_MAX_MS))
            return
        self._failures = 0
        self._probe_ended.set()
        self._telemetry.commands.add(result)
        if replaced:
            self._telemetry.commands.add("ignored", len(replaced))
        self._done += items
        self._has_done.set()

    async def _try(self, item: _Received) -> str:
        """The result, as the metric names it. Errors: _Later, Rejected."""
        for pause in (*_TRY_AGAIN_SECONDS, None):
            try:
                match item.command:
                    case ScheduleTimer() as command:
                        return await self._schedule(command, item.message)
                    case CancelTimer() as command:
                        return await self._cancel(command, item.message)
            except (StoreError, Unserved, Busy) as error:
                if isinstance(error, StoreError):
                    self._failures += 1
                elif isinstance(error, Busy) and error.code != Busy.code:  # only this namespace: others go on
                    is_quota = error.code.startswith("quota_")
                    raise _Later(error.detail, 1_000 * (error.retry_after_seconds or 1), is_quota=is_quota) from None
                if pause is None or self._stopping:
                    raise _Later(error.detail, is_of_store=isinstance(error, StoreError)) from None
                await asyncio.sleep(pause)
            except Rejected:
                raise
            except DuetimeError as error:  # the stored timer cannot be decoded, for example
                raise _Later(error.detail, _RETRY_MAX_MS) from None
        raise AssertionError

    async def _schedule(self, command: ScheduleTimer, message: Message) -> str:
        namespace = await self._namespace(command.tenant)
        url = None if namespace.callback_url else self._target(command.tenant)
        spec = TimerSpec(
            namespace=command.tenant,
            timer_id=command.timer_id,
            execute_at_ms=command.due_at_ms,
            callback_url=url,
            correlation_id=command.correlation_id,
            ignore_reached=True,
            command=message.position,
        )
        try:
            created = await self._service.create(spec)
        except NotFound as error:  # the namespace was deleted meanwhile: the next try finds that
            raise Unserved(error.detail) from None
        except InvalidField as error:
            if error.field == "callbackUrl" and self._is_target_allowed(url or namespace.callback_url, namespace.name):
                # Only the owner of the shard refuses it: an instance with another configuration.
                raise _Later(error.detail) from None
            if error.field == "callbackUrl":  # which no command has
                whose = f"of namespace {namespace.name!r}" if url is None else f"of {self.name}.target"
                reason = error.detail.removeprefix("callbackUrl ")
                target = url or namespace.callback_url
                raise InvalidField(None, f"the default target {target!r} {whose} {reason}") from None
            raise
        return "ignored" if created.existed else "scheduled"

    async def _cancel(self, command: CancelTimer, message: Message) -> str:
        await self._namespace(command.tenant)  # created if it is new: the ScheduleTimer may arrive after this
        try:
            verdict = await self._service.delete(TimerKey(command.tenant, command.timer_id), message.position)
        except NotFound as error:  # the namespace was deleted meanwhile: the next try finds that
            raise Unserved(error.detail) from None
        except Conflict as error:
            if error.code != "later_command":
                raise
            return "ignored"
        return "ignored" if verdict is Verdict.ALREADY_REACHED else "cancelled"

    # --- namespaces of tenants --------------------------------------------------------------------

    async def _namespace(self, tenant: str) -> Namespace:
        """The namespace of the tenant. It is created if there was never one and the configuration allows it."""
        namespaces = self._service.namespaces
        until, problem = self._no_namespace.get(tenant, (0.0, None))
        if problem is not None and asyncio.get_running_loop().time() < until and not namespaces.is_known(tenant):
            raise InvalidField(problem.field, problem.detail)
        try:
            return await namespaces.get(tenant)
        except NotFound:
            pass
        try:
            self._target_of_new(tenant)  # before the wait for those that are being created
            async with self._creating:
                with contextlib.suppress(NotFound):
                    return await namespaces.get(tenant)
                spec = NamespaceSpec(name=tenant, callback_url=self._target_of_new(tenant))
                try:
                    made = await namespaces.create(spec)
                except Conflict:
                    return await namespaces.get(tenant)  # another instance made it at the same time
                except OutcomeUnknown as error:  # of the namespace: the timer was certainly not created
                    raise StoreUnavailable(error.detail) from error
        except InvalidField as error:
            if len(self._no_namespace) >= _NO_NAMESPACE_MAX:
                self._no_namespace.clear()
            self._no_namespace[tenant] = asyncio.get_running_loop().time() + _NO_NAMESPACE_SECONDS, error
            raise
        log.info("%s: created the namespace %r for a new tenant", self.name, tenant)
        return made

    def _target_of_new(self, tenant: str) -> str:
        """InvalidField: no namespace is created for it. The namespaces have just been read."""
        settings = self._settings
        if self._service.namespaces.was_deleted(tenant):
            # With the defaults, its timers would go to another target, without its quotas and secrets.
            raise InvalidField("tenantId", f"the namespace {tenant!r} was deleted: create it again")
        if not settings.create_tenants:
            raise InvalidField("tenantId", f"there is no namespace {tenant!r}, and {self.name}.create_tenants is false")
        if self._service.namespaces.count() >= settings.tenants_max:
            raise InvalidField(
                "tenantId",
                f"there is no namespace {tenant!r}, and no more are created: "
                f"{self.name}.tenants_max is {settings.tenants_max}",
            )
        return self._target(tenant)

    def _target(self, tenant: str) -> str:
        if TENANT in self._settings.target and not is_token(tenant):
            raise InvalidField(
                "tenantId", f"tenantId {tenant!r} cannot be a part of the target: only A-Z, a-z, 0-9, _ and - can"
            )
        return filled(self._settings.target, tenant)

    def _is_target_allowed(self, url: str | None, namespace: str) -> bool:
        if url is None:
            return False
        try:
            self._service.check_target(url, namespace)
        except InvalidField:
            return False
        return True

    # --- what becomes of the messages -------------------------------------------------------------

    async def _acknowledge(self) -> None:
        """Acknowledges, in one call, all commands that were carried out since the last acknowledgement."""
        while True:
            await self._has_done.wait()
            self._has_done.clear()
            done, self._done = self._done, []
            try:
                await self._source.acknowledge([item.message for item in done])
            except BaseException as error:
                self._done = done + self._done
                self._has_done.set()
                if not isinstance(error, BrokerAway):
                    raise
                # Until it is back. If another instance has received them meanwhile, it finds them carried out.
                await asyncio.sleep(_BROKER_PAUSE_SECONDS)
            else:
                self._close(done)

    async def _retry(self, items: list[_Received], later: _Later) -> None:
        for item in items:
            deliveries = max(item.message.deliveries, 1)
            backoff_ms = min(_RETRY_FIRST_MS << min(deliveries - 1, 10), _RETRY_MAX_MS)
            # Random: if all commands beyond a quota came back at the same time, most would be beyond it again.
            delay_ms = later.after_ms + int(backoff_ms * random.uniform(0.5, 1.0))
            if self._stopping:
                delay_ms = 0  # another instance can carry it out at once
            if later.is_quota and not self._may_wait(item, delay_ms):
                await self._refuse(item, _refusal(item, f"{later}; too many commands of this tenant wait already"))
                continue
            if later.is_quota and self._source.holds_others_up(item.message):
                await self._refuse(item, _refusal(item, f"{later}; the commands after it cannot wait any longer"))
                continue
            if not later.is_of_store:
                self._probe_ended.set()
            self._telemetry.commands.add("retried")
            log.debug("%s: a command of %r is retried: %s", self.name, item.message.subject, later)
            await self._until_back(partial(self._source.retry, item.message, delay_ms))
            self._close([item])
            if not self._stopping:
                tenant = item.command.tenant if later.is_quota and item.command is not None else None
                self._count_retry(tenant, str(later), delay_ms)

    def _count_retry(self, tenant: str | None, reason: str, delay_ms: int) -> None:
        self._retries.add(tenant, reason, delay_ms / 1_000, asyncio.get_running_loop().time())

    def _may_wait(self, item: _Received, delay_ms: int) -> bool:
        assert item.command is not None
        now, size = asyncio.get_running_loop().time(), len(item.message.body)
        return self._waiting.add(item.command.tenant, size, now, delay_ms / 1_000)

    async def _refuse(self, item: _Received, refusal: Refusal) -> None:
        self._probe_ended.set()
        for _ in range(_DEAD_LETTER_TRIES):
            if await self._is_done(partial(self._source.refuse, item.message, refusal)):
                self._telemetry.commands.add("refused")
                message, now = item.message, asyncio.get_running_loop().time()
                self.refusals.add(message.tenant, message.subject, refusal.reason, now)
                break
            await asyncio.sleep(_BROKER_PAUSE_SECONDS)
        else:
            self._telemetry.commands.add("retried")
            await self._until_back(partial(self._source.retry, item.message, _DEAD_LETTER_PAUSE_MS))
            self._count_retry(None, f"its dead letter cannot be stored: {refusal.reason}", _DEAD_LETTER_PAUSE_MS)
        self._close([item])

    async def _until_back(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call until the broker is back. Without it, the message would take room here for ever."""
        while True:
            if await self._is_done(call):
                return
            await asyncio.sleep(_BROKER_PAUSE_SECONDS)

    async def _is_done(self, call: Callable[[], Awaitable[None]]) -> bool:
        try:
            await call()
        except BrokerAway:
            return False
        except Exception as error:
            self._log_bug(error)
            return False
        return True

    async def _extend(self) -> None:
        every = self._settings.extend_seconds
        assert every is not None
        while True:
            await asyncio.sleep(every)
            before = asyncio.get_running_loop().time() - every / 2
            old = [item.message for item in self._open.values() if item.since < before]
            if old:
                with contextlib.suppress(BrokerAway):
                    await self._source.extend(old)

    async def _watch_backlog(self) -> None:
        while True:
            found = None
            with contextlib.suppress(BrokerAway):
                found = await self._source.backlog()
            self.waiting = None if found is None else found.waiting
            self.remark = None if found is None else found.remark
            self._unacknowledged.append(None if found is None else found.unacknowledged)
            await asyncio.sleep(_BACKLOG_EVERY_SECONDS)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            now = asyncio.get_running_loop().time()
            self._retries.report(now)
            self.refusals.report(now)


def _refusal(item: _Received, reason: str, field: str | None = None) -> Refusal:
    return Refusal(reason, field, None if item.command is None else item.command.command_id)


def _next(queue: deque[_Received]) -> list[_Received]:
    """The next command of a timer. If several ScheduleTimer commands follow each other, all of them: only the last one
    has to be carried out, so that many commands for one timer take no more time than one."""
    items = [queue.popleft()]
    while queue and isinstance(items[-1].command, ScheduleTimer) and isinstance(queue[0].command, ScheduleTimer):
        items.append(queue.popleft())
    return items
