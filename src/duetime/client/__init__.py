"""The Python client: create, read, change and cancel timers.

    with Client() as duetime:
        duetime.create("order-17", delay="30m", callback_url="https://shop.example/hooks", payload={"order": 17})

`AsyncClient` is the client; `Client` has the same methods for code without an event loop.
With a cluster, `direct=True` sends a call about a timer to the instance that owns it.
`verify`, `ok`, `retry` and `again_at` are for the program that receives the callbacks.

Within `retries` and `timeout` the client retries calls that certainly changed nothing (429, 503 `not_applied`, no
connection). If the outcome is unknown, it retries only what is safe to do twice: reads, deletes, updates of a
namespace, and creates with `if_absent`. A create without `if_absent` raises OutcomeUnknown instead: if the first one
was applied and has already fired, a second one would fire the timer twice.
"""

from __future__ import annotations

from duetime.client.asynchronous import AsyncClient
from duetime.client.errors import ConnectionFailed
from duetime.client.models import (
    Broker,
    ClusterStatus,
    Created,
    Flow,
    FlowLimits,
    FlowPage,
    HeldFor,
    Member,
    Missed,
    Namespace,
    NamespaceSettings,
    NewTimer,
    Occurrence,
    Page,
    RetryPolicy,
    Schedule,
    SchedulePreview,
    Shard,
    ShardCounts,
    Timer,
    TimerChanges,
    TimerFilter,
    Unanswered,
    Updated,
)
from duetime.client.synchronous import Client
from duetime.domain.flow_status import FlowState
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

Ending = Outcome  # the old name of Outcome

__all__ = [
    "AsyncClient",
    "Broker",
    "Busy",
    "Callback",
    "Client",
    "ClusterStatus",
    "Conflict",
    "ConnectionFailed",
    "Created",
    "DuetimeError",
    "Ending",
    "Flow",
    "FlowLimits",
    "FlowPage",
    "FlowState",
    "Forbidden",
    "HeldFor",
    "InvalidField",
    "Member",
    "Missed",
    "Namespace",
    "NamespaceSettings",
    "NewTimer",
    "NotFound",
    "Occurrence",
    "Outcome",
    "OutcomeUnknown",
    "Page",
    "Rejected",
    "RetryPolicy",
    "Schedule",
    "SchedulePreview",
    "Shard",
    "ShardCounts",
    "SignatureError",
    "State",
    "Timer",
    "TimerChanges",
    "TimerFilter",
    "TooLarge",
    "Unanswered",
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
