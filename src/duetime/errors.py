"""Every error Duetime raises, as one tree.

    DuetimeError
    ├── Rejected                  the request is at fault; nothing was changed
    │   ├── InvalidField          400  names the field
    │   ├── TooLarge              413
    │   ├── Unauthenticated       401
    │   ├── Forbidden             403
    │   ├── NotFound              404  timer_not_found, namespace_not_found
    │   └── Conflict              409  if_absent, namespace_exists, …
    ├── Busy                      429  a bounded queue is full; nothing was changed
    ├── Unserved                  503  nothing was changed, try again
    │   ├── NotOwner                   the shard lives elsewhere, or is on the move
    │   └── NotReady                   starting, stopping or without a lease
    ├── StoreError                what a Store may raise, and nothing else
    │   ├── ShardLost                  the fence failed: nothing was written, the shard is another's
    │   ├── MemberDead                 this instance was declared dead: join again under a new id
    │   │   └── FailedOver             the database may have lost what it acknowledged: likewise
    │   ├── StoreUnavailable      503  not applied, safe to retry
    │   │   └── StoreThrottled         not applied, back off
    │   ├── OutcomeUnknown        503  may have been applied: never guess, never blindly retry
    │   └── SchemaMismatch             the tables are not those this version knows
    ├── UnreadableTimer           500  the timer is stored, but cannot be decoded
    └── SetupError                wrong configuration, or a store that cannot be used; the process does not start

An error carries what a problem+json answer needs: `code` (stable, for programs), the message (for
people), and `field` where one field is at fault.
"""

from __future__ import annotations


class DuetimeError(Exception):
    """Root of the tree. `status` is the HTTP status it becomes, `code` its stable name."""

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


class NotFound(Rejected):
    status = 404
    code = "not_found"
    title = "Not found"


class Conflict(Rejected):
    status = 409
    code = "conflict"
    title = "Conflict"


class Busy(DuetimeError):
    status = 429
    code = "busy"
    title = "Too many writes are waiting; nothing was applied"
    retry_after_seconds = 1


class Unserved(DuetimeError):
    status = 503
    code = "not_applied"
    title = "Cannot be served now; nothing was applied"
    retry_after_seconds = 1


class NotOwner(Unserved):
    title = "The shard of this timer is moving to another instance; nothing was applied"


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
    title = "The database has failed over, and may have lost what it acknowledged"


class StoreUnavailable(StoreError):
    code = "not_applied"
    title = "The store is unavailable; nothing was applied"


class StoreThrottled(StoreUnavailable):
    title = "The store asks to slow down; nothing was applied"


class OutcomeUnknown(StoreError):
    code = "outcome_unknown"
    title = "The write may or may not have been applied"


class SchemaMismatch(StoreError):
    code = "schema_mismatch"
    title = "The store's schema is not the one this version knows"


class UnreadableTimer(DuetimeError):
    code = "timer_unreadable"
    title = "The stored timer cannot be decoded"


class SetupError(DuetimeError):
    code = "setup"
    title = "Duetime cannot start like this"
