"""timer create, get, update, delete, list, watch, fire-now, replay."""

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
from duetime.cli.errors import UsageError
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
    print_table,
    printable,
    shorten,
    styled,
    styled_state,
)
from duetime.client import (
    AsyncClient,
    ConnectionFailed,
    Missed,
    NewTimer,
    State,
    Timer,
    TimerChanges,
    TimerFilter,
    Unserved,
    Verdict,
)

__all__ = ["create", "delete", "fire_now", "get", "list_timers", "replay", "update", "watch"]

POLL_MIN_S, POLL_MAX_S = 0.1, 2.0
OUTAGE_MAX_S, OUTAGE_PAUSE_S = 60.0, 0.5  # for a server that has answered before: it may be restarting


async def create(arguments: Arguments) -> int:
    new = NewTimer(arguments.timer_id, if_absent=arguments.if_absent, **_fields(arguments))
    async with open_client(arguments) as client:
        created = await client.create(**msgspec.structs.asdict(new))
    if arguments.json:
        print_json(created)
    elif created.existed:
        print(f"{_name(created.timer)} already exists ({created.timer.state}); not changed")
    else:
        verb = "replaced" if created.replaced else "created"
        print(f"{verb} {_name(created.timer)}, due {_when(created.timer.execute_at)}")
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
    print(f"updated {_name(updated.timer)}, due {_when(updated.timer.execute_at)}")
    if updated.verdict is Verdict.IN_FLIGHT:
        print("a callback with the old values is in flight")
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
        print(said.get(verdict, str(verdict)))
    return 0


async def fire_now(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.fire_now(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print(f"due now: {_name(timer)}")
    return 0


async def replay(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        timer = await client.replay(arguments.timer_id, namespace=arguments.namespace)
    print_json(timer) if arguments.json else print(f"fires again: {_name(timer)}")
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
                rows.append(_row(timer))
        else:
            limit = sys.maxsize
    if not arguments.json:
        if rows:
            print_table(["id", "state", "due", "ended", "attempts", "late by", "to"], rows)
        else:
            print("no timers")
        if count == limit:
            print(styled(f"the first {count}; there are more (--limit 0 shows all)", "dim"))
    return 0


async def watch(arguments: Arguments) -> int:
    """Polls often when the timer is nearly due, and every POLL_MAX_S when it is not."""
    async with open_client(arguments) as client:
        last: Timer | None = None
        while True:
            timer = await _poll(client, arguments, wait_for_server=last is not None)
            if last is None or _shown_state(timer) != _shown_state(last):
                print_json(timer) if arguments.json else print(_change_line(timer))
                sys.stdout.flush()
            if timer.is_over:
                return 0 if timer.state is State.DELIVERED else 1
            last = timer
            await asyncio.sleep(_poll_pause_s(timer))


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
                print(
                    f"{error.detail}; trying again for {format_duration(OUTAGE_MAX_S * 1_000)}",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(OUTAGE_PAUSE_S)
        else:
            if gone_since is not None:
                print("the server answers again", file=sys.stderr, flush=True)
            return timer


def _poll_pause_s(timer: Timer) -> float:
    """At most POLL_MAX_S, because another client may change or fire the timer."""
    ahead_s = timer.execute_at.timestamp() - now_ms() / 1_000
    return min(max(ahead_s, POLL_MIN_S), POLL_MAX_S)


def _shown_state(timer: Timer) -> tuple[object, ...]:
    return timer.state, timer.execute_at, timer.attempts, timer.created_at


def _change_line(timer: Timer) -> str:
    parts = [local_time(), styled_state(timer.state).ljust(9)]
    if timer.state is State.SCHEDULED:
        parts.append(f"due {_when(timer.execute_at)}")
        if timer.attempts:
            error = printable(timer.last_error or "the receiver asked for another call")
            parts.append(f"after {_attempts(timer)}: {error}")
    else:
        error = printable(timer.last_error or "")
        parts += [text for text in (_attempts(timer), format_lateness(timer.late_by_ms), error) if text]
    return "  ".join(parts)


# --- arguments and output ------------------------------------------------------------------------


def _fields(arguments: Arguments) -> dict[str, Any]:
    """The options of create and update that were given."""
    fields: dict[str, Any] = {
        "at": arguments.at,
        "delay": arguments.delay,
        "callback_url": arguments.to,
        "headers": _headers(arguments.header),
        "tags": arguments.tag,
        "correlation_id": arguments.correlation_id,
        "callback_timeout_seconds": arguments.callback_timeout,
        "retry_policy": retry_policy_from(arguments),
        "missed": _missed(arguments),
        "namespace": arguments.namespace,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if arguments.payload is not None:
        given["payload"] = _payload(arguments.payload)
    return given


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
        "namespace": arguments.namespace,
        "state": arguments.state,
        "due_from": arguments.due_from,
        "due_until": arguments.due_until,
        "tag": arguments.tag,
        "id_prefix": arguments.prefix,
        "correlation_id": arguments.correlation_id,
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
            ("created", _when(timer.created_at)),
            ("over since", _when(timer.reached_at) if timer.reached_at else ""),
            ("attempts", str(timer.attempts or "")),
            ("first attempt", format_lateness(timer.late_by_ms)),
            ("last error", printable(timer.last_error or "")),
            ("to", printable(timer.callback_url)),
            ("payload", "" if timer.payload is None else shorten(msgspec.json.encode(timer.payload).decode(), 100)),
            ("headers", printable(", ".join(f"{name}: {value}" for name, value in (timer.headers or {}).items()))),
            ("retries", format_retries(timer.retry_policy) if timer.retry_policy else ""),
            ("if missed", _if_missed(timer.missed)),
            ("callback timeout", f"{timer.callback_timeout_seconds} s" if timer.callback_timeout_seconds else ""),
            ("tags", printable(", ".join(timer.tags))),
            ("correlation id", printable(timer.correlation_id or "")),
        ]
    )


def _if_missed(missed: Missed | None) -> str:
    if missed is None:
        return ""
    if missed.skip_if_late_by is not None:
        return f"skipped if late by {missed.skip_if_late_by}"
    return f"failed if late by {missed.fail_if_late_by}"


def _row(timer: Timer) -> tuple[str, ...]:
    return (
        shorten(timer.timer_id, 40),
        styled_state(timer.state),
        "" if timer.is_over else format_relative(timer.execute_at),
        f"{timer.reached_at.astimezone():%Y-%m-%d %H:%M:%S}" if timer.reached_at else "",
        str(timer.attempts or ""),
        "" if timer.late_by_ms is None else format_duration(timer.late_by_ms),
        shorten(timer.callback_url, 50),
    )


def _name(timer: Timer) -> str:
    return printable(timer.timer_id if timer.namespace == "default" else f"{timer.namespace}/{timer.timer_id}")


def _when(at: datetime) -> str:
    return f"{format_relative_ms(at.timestamp() * 1_000)} ({at.astimezone():%Y-%m-%d %H:%M:%S%z})"


def _attempts(timer: Timer) -> str:
    return f"{timer.attempts} attempt{'s' * (timer.attempts != 1)}" if timer.attempts else ""
