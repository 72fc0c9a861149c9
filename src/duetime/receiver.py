"""For programs that receive callbacks: verify a callback, read it, and answer it.

callback = verify(body, headers, secrets="whsec_…")
…
return ok()        # or retry(), or again_at(a later time)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from duetime import signing
from duetime.clock import SystemClock
from duetime.errors import InvalidField
from duetime.signing import SignatureError

__all__ = ["Callback", "SignatureError", "again_at", "ok", "read_callback", "retry", "verify"]


class Callback(Struct, frozen=True, kw_only=True, rename="camel"):
    """One attempt of a timer. `id` is the same for all attempts of one firing: deduplicate by it."""

    namespace: str
    timer_id: str
    scheduled_at: datetime  # the time that was asked for
    execute_at: datetime  # when this attempt was due: for a retry, later
    fired_at: datetime
    attempt: int
    payload: Any = None
    correlation_id: str | None = None
    id: str = ""
    fence: str | None = None  # increases with every change of owner

    @property
    def late_by(self) -> timedelta:
        """How late this attempt was started."""
        return self.fired_at - self.execute_at


_decode = msgspec.json.Decoder(Callback).decode


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: str | Iterable[str],
    *,
    tolerance: timedelta = timedelta(minutes=5),
) -> Callback:
    """The callback, if it was signed with one of the secrets at most `tolerance` ago. Otherwise raises SignatureError.

    `body` must be the bytes as received: a body that was parsed and encoded again has another signature.
    """
    listed = [secrets] if isinstance(secrets, str) else list(secrets)
    now_s = SystemClock().wall_ms() / 1_000
    signing.verify(body, headers, listed, now_s=now_s, tolerance_s=int(tolerance.total_seconds()))
    return read_callback(body, headers)


def read_callback(body: bytes, headers: Mapping[str, str]) -> Callback:
    """The callback, without a check of its signature: for receivers that trust their network."""
    lower = _lower(headers)
    try:
        callback = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField("body", f"the body is not a callback: {error}") from None
    return msgspec.structs.replace(callback, id=lower.get("webhook-id", ""), fence=lower.get("duetime-fence"))


def ok() -> bytes:
    """The response body for: done."""
    return b'{"ok":true}'


def retry() -> bytes:
    """The response body for: not done, retry by the retry policy."""
    return b'{"ok":false}'


def again_at(at: datetime, *, done: bool = True) -> bytes:
    """The response body that asks for another call at a time. With `done` it is a new occurrence of the timer,
    otherwise a retry of this one, which counts against the limits of the retry policy. At the earliest it is made
    `delivery.rearm_interval_min` (1 s) after the start of this call."""
    if at.tzinfo is None:
        raise InvalidField("at", "at must be an aware datetime, as in datetime.now(UTC)")
    return msgspec.json.encode({"ok": done, "nextExecuteAt": at.astimezone(UTC)})


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
