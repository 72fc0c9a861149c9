"""Every error that Duetime raises, as one tree.

    DuetimeError
    ├── Rejected                  the request is wrong; nothing was changed
    │   ├── InvalidField          400  names the field
    │   ├── TooLarge              413
    │   ├── Unauthenticated       401
    │   ├── Forbidden             403
    │   │   ├── CrossOrigin            sent by the page of another web site
    │   │   └── UnknownHost            without tokens: sent to a name that is not this server's
    │   ├── NotFound              404  timer_not_found, namespace_not_found, path_not_found
    │   ├── MethodNotAllowed      405
    │   ├── Conflict              409  timer_exists, already_reached, namespace_exists, …
    │   └── UnsupportedMediaType  415
    ├── Busy                      429  nothing was changed: busy and namespace_busy (a bounded queue is full), quota_…
    ├── Unserved                  503  nothing was changed, try again
    │   ├── NotOwner                   another instance owns the shard, or it has no owner at the moment
    │   └── NotReady                   starting, stopping or without a lease
    ├── StoreError                the only errors that a Store raises
    │   ├── ShardLost                  the fence failed: nothing was written, another instance owns the shard
    │   ├── MemberDead                 this instance was declared dead: it joins again under a new id
    │   │   └── FailedOver             the database may have lost acknowledged writes: it joins again likewise
    │   ├── StoreUnavailable      503  not applied, safe to retry
    │   │   └── StoreThrottled         not applied, the store is overloaded: retry later
    │   ├── OutcomeUnknown        503  may have been applied: do not retry without reading first
    │   └── SchemaMismatch             this version does not know the store's schema
    ├── UnreadableTimer           500  the timer is stored, but cannot be decoded
    └── SetupError                wrong configuration, or a store that cannot be used; the process does not start

A DuetimeError carries what a problem+json answer needs: `code` (stable, for programs), the message (for people), and
`field` if one field is wrong.

Three errors are not part of this tree, because none of them becomes an answer of the API:

    HttpError                     a call over HTTP got no response
    ├── Unreachable               no connection could be made
    │   └── DeadlineTooShort           within the deadline of the call; there may be one with more time
    └── Shortage                  this machine or process had no file descriptor, port or look-up left for the call
    AddressRefused                the egress policy forbids a callback's address
    SignatureError                a callback that was received is not signed correctly
"""

from __future__ import annotations


class DuetimeError(Exception):
    """Root of the tree. `status` is the HTTP status of the answer, `code` the stable name of the error."""

    status = 500
    code = "internal"
    title = "Internal error"
    retry_after_seconds: int | None = None

    def __init__(self, detail: str = "", *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.field = field
        if code is not None:
            self.code = code


class Rejected(DuetimeError):
    status = 400
    code = "rejected"
    title = "Request rejected"


class InvalidField(Rejected):
    code = "invalid_field"
    title = "Invalid request"

    def __init__(self, field: str | None, detail: str) -> None:
        super().__init__(detail, field=field)


class TooLarge(Rejected):
    status = 413
    code = "too_large"
    title = "Too large"


class Unauthenticated(Rejected):
    status = 401
    code = "unauthenticated"
    title = "A valid bearer token is required"


class Forbidden(Rejected):
    status = 403
    code = "forbidden"
    title = "The token does not allow this"


class CrossOrigin(Forbidden):
    code = "cross_origin"
    title = "Sent by the page of another web site"


class UnknownHost(Forbidden):
    code = "unknown_host"
    title = "Sent to a name that is not this server's"


class NotFound(Rejected):
    status = 404
    code = "not_found"
    title = "Not found"


class MethodNotAllowed(Rejected):
    status = 405
    code = "method_not_allowed"
    title = "Method not allowed"


class Conflict(Rejected):
    status = 409
    code = "conflict"
    title = "Conflict"


class UnsupportedMediaType(Rejected):
    status = 415
    code = "unsupported_media_type"
    title = "Unsupported media type"


class Busy(DuetimeError):
    status = 429
    code = "busy"
    title = "Too many requests; nothing was applied"
    retry_after_seconds = 1


class Unserved(DuetimeError):
    status = 503
    code = "not_applied"
    title = "Cannot be served now; nothing was applied"
    retry_after_seconds = 1


class NotOwner(Unserved):
    title = "The shard of this timer is changing its owner; nothing was applied"


class NotReady(Unserved):
    title = "This instance is not ready; nothing was applied"


class StoreError(DuetimeError):
    status = 503
    code = "store_error"
    title = "The store failed"
    retry_after_seconds = 1


class ShardLost(StoreError):
    code = "not_applied"
    title = "The shard is owned by another instance now; nothing was applied"


class MemberDead(StoreError):
    code = "member_dead"
    title = "This instance was declared dead"


class FailedOver(MemberDead):
    title = "The database has failed over and may have lost acknowledged writes"


class StoreUnavailable(StoreError):
    code = "not_applied"
    title = "The store is unavailable; nothing was applied"


class StoreThrottled(StoreUnavailable):
    title = "The store is overloaded; nothing was applied"


class OutcomeUnknown(StoreError):
    code = "outcome_unknown"
    title = "The write may or may not have been applied"


class SchemaMismatch(StoreError):
    code = "schema_mismatch"
    title = "This version of Duetime does not know the schema of the store"


class BrokerAway(DuetimeError):
    status = 503
    code = "broker_away"
    title = "There is no connection to the message broker; nothing was sent"


class UnreadableTimer(DuetimeError):
    code = "timer_unreadable"
    title = "The stored timer cannot be decoded"


class SetupError(DuetimeError):
    code = "setup"
    title = "Duetime cannot start"


# --- not part of the tree ------------------------------------------------------------------------


class HttpError(Exception):
    """A call over HTTP got no response. `sent` is False only if certainly no byte of the request was sent."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


class Unreachable(HttpError):
    """No connection could be made: the name was not found, nobody accepted the connection, or TLS failed."""


class DeadlineTooShort(Unreachable):
    """No connection was made before the deadline of the call, which was earlier than the limit for connecting. A call
    with more time may succeed, so it says nothing about the target."""


class Shortage(HttpError):
    """The call could not be made because this machine or process is short of something: file descriptors, local ports,
    memory for sockets, look-ups of names. It says nothing about the target."""


class AddressRefused(Exception):
    """The egress policy forbids the address of a callback."""


class SignatureError(Exception):
    """A callback that must not be trusted. The message says why."""
