"""What the errors of the Cassandra driver mean: whether a write was applied, and what to do while opening.

A conditional write is proposed, accepted by a majority, and then committed. A write that is refused before the proposal
was not applied; these errors are listed in `NOT_APPLIED`. After all other errors the outcome is unknown: a timeout or
the failure of a replica may come after some replicas have accepted the proposal. Then the next Paxos round on the same
partition may complete it or not.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.cassandra.address import Address

try:
    import cassandra
except ImportError:
    raise SetupError(
        "store.url: Cassandra needs its driver: pip install 'duetime[cassandra]'", field="store.url"
    ) from None
try:
    from cassandra import ConsistencyLevel, cluster, protocol
except cassandra.DependencyException as error:  # since Python 3.12 the driver needs libev, which its wheels include
    raise SetupError(f"store.url: Cassandra's driver was built without libev: {error}", field="store.url") from None

__all__ = ["NOT_APPLIED", "TooManyTombstones", "error_text", "is_unknown_table", "setup_error", "store_error"]

NOT_APPLIED: Final[tuple[type[BaseException], ...]] = (
    cassandra.Unavailable,  # too few live replicas: the round did not begin (but see _is_from_before)
    cassandra.RequestValidationException,  # types, permissions, sizes
    protocol.RequestValidationException,  # syntax, statements that are not prepared
    cassandra.AuthenticationFailed,
    cluster.NoHostAvailable,  # nothing was sent: the driver does not retry (FallthroughRetryPolicy)
    protocol.IsBootstrappingErrorMessage,
)
# Texts of an overloaded coordinator that rejects a request before it starts. With another text, the coordinator may be
# unable to store hints for a write that was already accepted.
_REJECTED_BEFORE_START: Final = ("Request breached", "Query timed out before it could start", "Request has spent over")


_TOMBSTONES: Final = 1  # error code of a replica that gave up a read


class TooManyTombstones(StoreUnavailable):
    """A read met more tombstones than the server allows in one read. A narrower range has fewer."""


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    detail = f"cassandra: {error_text(error)}"
    if isinstance(error, protocol.OverloadedErrorMessage):
        if not writing or str(error.message).startswith(_REJECTED_BEFORE_START):
            return StoreThrottled(detail)
        return OutcomeUnknown(detail)
    if writing and not (isinstance(error, NOT_APPLIED) and _is_before_proposal(error)):
        return OutcomeUnknown(detail)
    if isinstance(error, cassandra.ReadFailure) and _TOMBSTONES in (error.error_code_map or {}).values():
        return TooManyTombstones(detail)
    return StoreUnavailable(detail)


def _is_before_proposal(error: BaseException) -> bool:
    """Was it raised before the proposal? Paxos v1 checks the live replicas once more before the commit, when a majority
    has accepted the proposal already."""
    is_late = isinstance(error, cassandra.Unavailable) and error.consistency not in _SERIAL
    return not is_late


_SERIAL: Final = (ConsistencyLevel.SERIAL, ConsistencyLevel.LOCAL_SERIAL)


def is_unknown_table(error: BaseException) -> bool:
    """The statement names a keyspace or a table that the node does not have, or not yet."""
    return isinstance(error, cassandra.InvalidRequest) and bool(
        re.search(r"unconfigured table|(table|[Kk]eyspace) .*(does not|doesn't) exist", str(error))
    )


def error_text(error: BaseException) -> str:
    if causes := _causes(error):
        return "; ".join(dict.fromkeys(error_text(cause) for cause in causes))
    if isinstance(error, cassandra.OperationTimedOut):
        return "no answer in time"
    if isinstance(error, cluster.NoHostAvailable):
        return "no node can be reached"
    message = (str(error) or type(error).__name__).partition("\n")[0]
    return re.sub(r"^errors=(.*), last_host=.*$", r"\1", message)  # an error passed on from another connection


def _causes(error: BaseException) -> list[BaseException]:
    """The error of each host that was tried, if the driver has them."""
    errors = getattr(error, "errors", None) if isinstance(error, cluster.NoHostAvailable) else None
    return list(errors.values()) if isinstance(errors, dict) else []


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """The error for a failure while opening, with what to do about it. An unreachable server is not a SetupError: it
    may come back."""
    for cause in [error, *_causes(error)]:
        message = str(cause)
        for kind, words, text in _EXPLANATIONS:
            if isinstance(cause, kind) and re.search(words, message):
                return SetupError(f"store.url: {address.label} {text} ({error_text(cause)})", field="store.url")
    if isinstance(error, cluster.NoHostAvailable | cassandra.UnresolvableContactPoints | OSError):
        return StoreUnavailable(f"cassandra: {address.label} cannot be reached ({error_text(error)})")
    detail = store_error(error, writing=False).detail
    return StoreUnavailable(f"{detail} at {address.label}")


_EXPLANATIONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (cassandra.AuthenticationFailed, "requires authentication", "needs a user and a password: user:password@host"),
    (cassandra.AuthenticationFailed, "", "refuses the user or the password"),
    (cassandra.Unauthorized, "", "does not give this user the needed permissions; `duetime serve` creates its tables"
     " itself: GRANT CREATE ON ALL KEYSPACES (or create the keyspace by hand), then GRANT CREATE, ALTER, SELECT, MODIFY"
     " ON KEYSPACE … TO …"),
    (ssl.SSLError, "", "does not accept a TLS connection as set by sslmode"),
    (OSError, "(?i)ssl|certificate|hostname mismatch", "does not accept a TLS connection as set by sslmode"),
    (protocol.ErrorMessage, "(?i)protocol version|beta version", "is too old: Cassandra 4.0 or later is needed"),
    (Exception, "(?i)unsupported protocol|ProtocolVersionUnsupported", "is too old: Cassandra 4.0 or later is needed"),
    (cassandra.ConfigurationException, "(?i)replication|datacenter", "cannot create the keyspace with these settings;"
     " set ?replication= and ?datacenter= to values that the cluster has"),
)  # fmt: skip
