"""The Python client: create, look at, change and cancel timers.

    with Client() as duetime:
        duetime.create("order-17", delay="30m", callback_url="https://shop.example/hooks", payload={"order": 17})

`AsyncClient` does the work; `Client` offers the same methods to code without an event loop.
In front of a cluster, `direct=True` sends what is about a timer to the instance that owns it.
`verify`, `ok`, `retry` and `again_at` are for the side that is called back.

What is repeated by itself, within `retries` and `timeout`: whatever certainly changed nothing (429, 503
`not_applied`, no connection), and, if its fate is unknown, only what does no harm twice: reads, deletes, and
creates with `if_absent`. A plain create of unknown fate raises OutcomeUnknown: made again after it had fired,
the timer would fire twice.
"""

from __future__ import annotations

from duetime.client.asynchronous import AsyncClient
from duetime.client.failures import ConnectionFailed
from duetime.client.shapes import (
    ClusterStatus,
    Created,
    HeldFor,
    Member,
    Missed,
    Namespace,
    NamespaceSettings,
    NewTimer,
    Page,
    RetryPolicy,
    Shard,
    ShardCounts,
    Timer,
    TimerChanges,
    TimerFilter,
    Updated,
)
from duetime.client.synchronous import Client
from duetime.domain.timer import Outcome, State, Verdict
from duetime.errors import (
    Busy,
    Conflict,
    DuetimeError,
    Forbidden,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    Rejected,
    TooLarge,
    Unauthenticated,
    Unserved,
)
from duetime.receiver import Callback, SignatureError, again_at, ok, read_callback, retry, verify

Ending = Outcome  # the name it had first

__all__ = [
    "AsyncClient",
    "Busy",
    "Callback",
    "Client",
    "ClusterStatus",
    "Conflict",
    "ConnectionFailed",
    "Created",
    "DuetimeError",
    "Ending",
    "Forbidden",
    "HeldFor",
    "InvalidField",
    "Member",
    "Missed",
    "Namespace",
    "NamespaceSettings",
    "NewTimer",
    "NotFound",
    "Outcome",
    "OutcomeUnknown",
    "Page",
    "Rejected",
    "RetryPolicy",
    "Shard",
    "ShardCounts",
    "SignatureError",
    "State",
    "Timer",
    "TimerChanges",
    "TimerFilter",
    "TooLarge",
    "Unauthenticated",
    "Unserved",
    "Updated",
    "Verdict",
    "again_at",
    "ok",
    "read_callback",
    "retry",
    "verify",
]
