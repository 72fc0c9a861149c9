"""timer create, get, update, delete, list, watch, fire-now, replay, pause, resume."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace as Arguments
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from duetime.cli.client_options import open_client, retry_policy_from
from duetime.cli.errors import StoppedWaiting, UsageError
from duetime.cli.output import (
    format_duration,
    format_lateness,
    format_relative,
    format_relative_ms,
    format_retries,
    local_time,
    now_ms,
    print_fields,
    print_json,
    print_line,
    print_table,
    shorten,
    styled,
    styled_state,
)
from duetime.client import (
    AsyncClient,
    ConnectionFailed,
    Missed,
    NewTimer,
    Schedule,
    State,
    Timer,
    TimerChanges,
    TimerFilter,
    Unserved,
    Verdict,
)

__all__ = ["create", "delete", "fire_now", "get", "list_timers", "pause", "replay", "resume", "update", "watch"]

POLL_MIN_S, POLL_MAX_S = 0.1, 2.0
REQUEST_TIMEOUT_S = 15.0  # of each request of `watch`
OUTAGE_MAX_S, OUTAGE_PAUSE_S = 60.0, 0.5  # for a server that has answered before: it may be restarting


async def create(arguments: Arguments) -> int:
    if arguments.at is None and arguments.delay is None and arguments.timezone is None:
        raise UsageError("one of --in, --at and --timezone is required")
    new = NewTimer(
        arguments.timer_id, if_absent=arguments.if_absent, if_reached=arguments.if_reached, **_fields(arguments)
    )
    async with open_client(arguments) as client:
        created = await client.create(**msgspec.structs.asdict(new))
    if arguments.json:
        print_json(created)
    elif created.existed:
        print_line(f"{_name(created.timer)} already exists ({created.timer.state}); not changed")
    else:
        verb = "replaced" if created.replaced else "created"
        print_line(f"{verb} {_name(created.timer)}, due {_when(created.timer.execute_at)}")
    return 0


async def get(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.get(arguments.timer_id, namespace=arguments.namespace)
    _show(arguments, timer)
    return 0


async def update(arguments: Arguments) -> int:
    changes: TimerChanges = _fields(arguments)  # type: ignore[assignment]
    if not changes.keys() - {"namespace"}:
        raise UsageError("nothing to change: give at least one option, such as --in or --payload")
    async with open_client(arguments) as client:
        updated = await client.update(arguments.timer_id, **changes)
    if arguments.json:
        print_json(updated)
        return 0
    print_line(f"updated {_name(updated.timer)}, due {_when(updated.timer.execute_at)}")
    if updated.verdict is Verdict.IN_FLIGHT:
        print_line("a callback with the old values is in flight")
    return 0


async def delete(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        verdict = await client.delete(arguments.timer_id, namespace=arguments.namespace)
    if arguments.json:
        print_json({"verdict": verdict})
    else:
        said = {
            Verdict.CANCELLED: "cancelled: it will not fire",
            Verdict.IN_FLIGHT: "in flight: a callback is in flight, no other will follow",
            Verdict.ALREADY_REACHED: "already over: nothing to cancel",
        }
        print_line(said.get(verdict, str(verdict)))
    return 0


async def fire_now(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.fire_now(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print_line(f"due now: {_name(timer)}")
    return 0


async def replay(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.replay(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print_line(f"fires again: {_name(timer)}")
    return 0


async def pause(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.pause(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print_line(f"paused: {_name(timer)}")
    return 0


async def resume(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.resume(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print_line(f"resumed: {_name(timer)}, due {_when(timer.execute_at)}")
    return 0


async def list_timers(arguments: Arguments) -> int:
    limit = arguments.limit or sys.maxsize
    rows: list[tuple[str, ...]] = []
    count = 0
    async with (
        open_client(arguments) as client,
        aclosing(client.list(page_size=min(limit + 1, 500), **_filter(arguments))) as timers,
    ):
        async for timer in timers:
            if count == limit:
                break
            count += 1
            if arguments.json:
                print_json(timer)
            else:
                rows.append(_row(timer, is_in_one=not arguments.all_namespaces))
        else:
            limit = sys.maxsize
    if not arguments.json:
        if rows:
            print_table(["id", "state", "due", "ended", "attempts", "late by", "to"], rows)
        else:
            print_line("no timers")
        if count == limit:
            print_line(styled(f"the first {count}; there are more (--limit 0 shows all)", "dim"))
    return 0


async def watch(arguments: Arguments) -> int:
    """Polls often when the timer is nearly due, and every POLL_MAX_S when it is not.

    `--timeout` limits the whole command. Without it only each request is limited.
    """
    limit_s: float | None = arguments.timeout
    deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
    arguments.timeout = min(limit_s or REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S)
    async with open_client(arguments) as client:
        timer = await _poll(client, arguments, wait_for_server=False)
        _show_change(arguments, timer)
        try:
            async with asyncio.timeout_at(deadline):
                while not timer.is_over:
                    await asyncio.sleep(_poll_pause_s(timer))
                    last, timer = timer, await _poll(client, arguments, wait_for_server=True)
                    if _shown_state(timer) != _shown_state(last):
                        _show_change(arguments, timer)
        except TimeoutError:
            due = f", due {_when(timer.execute_at)}" if timer.state is State.SCHEDULED else ""
            raise StoppedWaiting(f"stopped after {limit_s:g} s: {_name(timer)} is {timer.state}{due}") from None
    return 0 if timer.state is State.DELIVERED else 1


def _show_change(arguments: Arguments, timer: Timer) -> None:
    print_json(timer, flush=True) if arguments.json else print_line(*_change_parts(timer))


async def _poll(client: AsyncClient, arguments: Arguments, *, wait_for_server: bool) -> Timer:
    """The timer as it is now. `wait_for_server`: retry for OUTAGE_MAX_S if the server is away, and print that once."""
    clock = asyncio.get_running_loop().time
    gone_since: float | None = None
    while True:
        try:
            timer = await client.get(arguments.timer_id, namespace=arguments.namespace)
        except (ConnectionFailed, Unserved) as error:
            if not wait_for_server or (gone_since is not None and clock() - gone_since > OUTAGE_MAX_S):
                raise
            if gone_since is None:
                gone_since = clock()
                pause = format_duration(OUTAGE_MAX_S * 1_000)
                print_line(f"{error.detail}; trying again for {pause}", file=sys.stderr)
            await asyncio.sleep(OUTAGE_PAUSE_S)
        else:
            if gone_since is not None:
                print_line("the server answers again", file=sys.stderr)
            return timer


def _poll_pause_s(timer: Timer) -> float:
    """At most POLL_MAX_S, because another client may change or fire the timer."""
    ahead_s = timer.execute_at.timestamp() - now_ms() / 1_000
    return min(max(ahead_s, POLL_MIN_S), POLL_MAX_S)


def _shown_state(timer: Timer) -> tuple[object, ...]:
    return timer.state, timer.execute_at, timer.attempts, timer.created_at


def _change_parts(timer: Timer) -> list[str]:
    parts = [local_time(), styled_state(timer.state, 9)]
    if timer.state is State.SCHEDULED:
        parts.append(f"due {_when(timer.execute_at)}")
        if timer.attempts:
            error = timer.last_error or "the receiver asked for another call"
            parts.append(f"after {_attempts(timer)}: {error}")
    else:
        parts += [_attempts(timer), format_lateness(timer.late_by_ms), timer.last_error or ""]
    return [part for part in parts if part]


# --- arguments and output ------------------------------------------------------------------------


def _fields(arguments: Arguments) -> dict[str, Any]:
    """The options of create and update that were given."""
    schedule = _schedule(arguments)
    fields: dict[str, Any] = {
        "at": None if schedule is not None else arguments.at,
        "schedule": schedule,
        "delay": arguments.delay,
        "callback_url": arguments.to,
        "headers": _headers(arguments.header),
        "tags": arguments.tag,
        "correlation_id": arguments.correlation_id,
        "callback_timeout_seconds": arguments.callback_timeout,
        "retry_policy": retry_policy_from(arguments),
        "missed": _missed(arguments),
        "flow_key": arguments.flow_key,
        "namespace": arguments.namespace,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if arguments.payload is not None:
        given["payload"] = _payload(arguments.payload)
    if getattr(arguments, "no_schedule", False):
        if schedule is not None:
            raise UsageError("--no-schedule and --timezone exclude each other")
        given["schedule"] = None
    return given


def _schedule(arguments: Arguments) -> Schedule | None:
    rest = {
        "repeat": arguments.repeat,
        "gap": arguments.gap,
        "fold": arguments.fold,
        "exclude": arguments.exclude or None,
        "until": arguments.until,
        "feb29": arguments.feb29,
        "catch_up": arguments.catch_up,
    }
    given = [name for name, value in rest.items() if value is not None]
    if arguments.timezone is None:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} needs --timezone")
        return None
    if arguments.delay is not None:
        raise UsageError("--in and --timezone exclude each other")
    return Schedule(timezone=arguments.timezone, at=arguments.at, **rest)


def _payload(text: str) -> Any:
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--payload {text}: {getattr(error, 'strerror', 'is not UTF-8')}") from None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"--payload is not JSON: {error}; text needs double quotes: '\"like this\"'") from None


def _headers(given: list[str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    headers: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon:
            raise UsageError(f"--header {text}: must be NAME:VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _missed(arguments: Arguments) -> Missed | None:
    if arguments.skip_if_late_by is None and arguments.fail_if_late_by is None:
        return None
    return Missed(skip_if_late_by=arguments.skip_if_late_by, fail_if_late_by=arguments.fail_if_late_by)


def _filter(arguments: Arguments) -> TimerFilter:
    given = {
        "namespace": None if arguments.all_namespaces else arguments.namespace,
        "all_namespaces": arguments.all_namespaces or None,
        "state": arguments.state,
        "due_from": arguments.due_from,
        "due_until": arguments.due_until,
        "tag": arguments.tag,
        "id_prefix": arguments.prefix,
        "correlation_id": arguments.correlation_id,
        "payloads": None if arguments.json else False,  # a table does not show them
    }
    return {name: value for name, value in given.items() if value is not None}  # type: ignore[return-value]


def _show(arguments: Arguments, timer: Timer) -> None:
    if arguments.json:
        print_json(timer)
        return
    print_fields(
        [
            ("timer", styled(_name(timer), "bold")),
            ("state", styled_state(timer.state)),
            ("was due" if timer.is_over else "due", _when(timer.execute_at)),
            ("scheduled for", _when(timer.scheduled_at) if timer.scheduled_at != timer.execute_at else ""),
            ("local time", timer.scheduled_at_local or ""),
            ("schedule", _schedule_text(timer.schedule)),
            ("occurrence", "" if timer.occurrence is None else str(timer.occurrence)),
            ("paused", "until it is resumed" if timer.paused else ""),
            ("created", _when(timer.created_at)),
            ("over since", _when(timer.reached_at) if timer.reached_at else ""),
            ("attempts", str(timer.attempts or "")),
            ("first attempt", format_lateness(timer.late_by_ms)),
            ("last error", timer.last_error or ""),
            ("to", timer.callback_url),
            ("flow", timer.flow_key or ""),
            ("payload", "" if timer.payload is None else shorten(msgspec.json.encode(timer.payload).decode(), 100)),
            ("headers", ", ".join(f"{name}: {value}" for name, value in (timer.headers or {}).items())),
            ("retries", format_retries(timer.retry_policy) if timer.retry_policy else ""),
            ("if missed", _if_missed(timer.missed)),
            ("callback timeout", f"{timer.callback_timeout_seconds} s" if timer.callback_timeout_seconds else ""),
            ("tags", ", ".join(timer.tags)),
            ("correlation id", timer.correlation_id or ""),
        ]
    )


def _schedule_text(schedule: Schedule | None) -> str:
    if schedule is None:
        return ""
    parts = [schedule.repeat or "once"]
    parts += [f"{word} {at}" for word, at in (("from", schedule.at), ("until", schedule.until)) if at]
    return " ".join([*parts, f"in {schedule.timezone}"])


def _if_missed(missed: Missed | None) -> str:
    if missed is None:
        return ""
    if missed.skip_if_late_by is not None:
        return f"skipped if late by {missed.skip_if_late_by}"
    return f"failed if late by {missed.fail_if_late_by}"


def _row(timer: Timer, *, is_in_one: bool) -> tuple[str, ...]:
    return (
        shorten(timer.timer_id if is_in_one else _name(timer), 40),
        styled_state(timer.state),
        "" if timer.is_over else format_relative(timer.execute_at),
        f"{timer.reached_at.astimezone():%Y-%m-%d %H:%M:%S}" if timer.reached_at else "",
        str(timer.attempts or ""),
        "" if timer.late_by_ms is None else format_duration(timer.late_by_ms),
        shorten(timer.callback_url, 50),
    )


def _name(timer: Timer) -> str:
    return timer.timer_id if timer.namespace == "default" else f"{timer.namespace}/{timer.timer_id}"


def _when(at: datetime) -> str:
    return f"{format_relative_ms(at.timestamp() * 1_000)} ({at.astimezone():%Y-%m-%d %H:%M:%S%z})"


def _attempts(timer: Timer) -> str:
    return f"{timer.attempts} attempt{'s' * (timer.attempts != 1)}" if timer.attempts else ""
