"""The way to the cluster under CassandraStore: its URL, and what the driver's errors mean."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable

try:
    import cassandra
except ImportError:
    raise SetupError(
        "store.url: Cassandra needs its driver: pip install 'duetime[cassandra]'", field="store.url"
    ) from None
try:
    from cassandra import ConsistencyLevel, cluster, protocol
except cassandra.DependencyException as error:  # since Python 3.12 it needs libev, which its wheels bring along
    raise SetupError(f"store.url: Cassandra's driver was built without libev: {error}", field="store.url") from None

__all__ = [
    "LEVELS",
    "Address",
    "TooManyDeleted",
    "address_of",
    "in_words",
    "setup_error",
    "store_error",
    "wrong_url",
]

# --- the URL -------------------------------------------------------------------------------------

_OPTIONS: Final = frozenset(
    {"consistency", "datacenter", "replication", "sslcert", "sslkey", "sslmode", "sslpassword", "sslrootcert"}
)
_SSL_MODES: Final = ("disable", "require", "verify-ca", "verify-full")
# What reads and commits wait for, and what the rounds before a commit are agreed on by.
LEVELS: Final = {
    "quorum": (ConsistencyLevel.QUORUM, ConsistencyLevel.SERIAL),
    "local_quorum": (ConsistencyLevel.LOCAL_QUORUM, ConsistencyLevel.LOCAL_SERIAL),
}


class Address(Struct, frozen=True):
    """Where the cluster is. `label` is what a person may read of it: no password."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    label: str
    user: str | None = None
    password: str = ""
    consistency: str = "quorum"
    datacenter: str | None = None
    replication: int | None = None
    sslmode: str = "disable"
    sslrootcert: str | None = None
    sslcert: str | None = None
    sslkey: str | None = None
    sslpassword: str | None = None


def address_of(url: str) -> Address:
    """cassandra://user:password@host1,host2:9042/keyspace?option=value."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise wrong_url(f"cannot be read: {error}") from None
    for name in options:
        if name not in _OPTIONS:
            raise wrong_url(f"has the option {name!r}, which is not known; known are {', '.join(sorted(_OPTIONS))}")
    if parts.fragment:
        raise wrong_url("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise wrong_url("has an '@' in its password: there it is written %40")
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    keyspace = unquote(parts.path.strip("/"))
    if not re.fullmatch(r"[A-Za-z]\w{0,47}", keyspace, re.ASCII):
        raise wrong_url(
            "names no keyspace (1 to 48 letters, digits and underscores): cassandra://user:password@host:9042/KEYSPACE"
        )
    given_tls = bool(options.keys() & {"sslrootcert", "sslcert", "sslkey", "sslpassword"})
    _check(options, "sslmode", _SSL_MODES)
    _check(options, "consistency", tuple(LEVELS))
    if options.get("consistency") == "local_quorum" and not options.get("datacenter"):
        raise wrong_url("has consistency=local_quorum, but does not say of which datacenter: &datacenter=NAME")
    return Address(
        hosts=_hosts(places),
        keyspace=keyspace,
        label=f"{places}/{keyspace}",
        user=unquote(user) or None,
        password=unquote(password),
        consistency=options.get("consistency", "quorum"),
        datacenter=options.get("datacenter") or None,
        replication=_replication(options.get("replication")),
        sslmode=options.get("sslmode", "verify-full" if given_tls else "disable"),
        sslrootcert=options.get("sslrootcert"),
        sslcert=options.get("sslcert"),
        sslkey=options.get("sslkey"),
        sslpassword=options.get("sslpassword"),
    )


def wrong_url(what: str) -> SetupError:
    return SetupError(f"store.url: the Cassandra URL {what}", field="store.url")


def _check(options: dict[str, str], name: str, known: Sequence[str]) -> None:
    if options.get(name, known[0]) not in known:
        raise wrong_url(f"has {name}={options[name]}; known are {', '.join(known)}")


def _replication(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d?", text):
        raise wrong_url(f"has replication={text}: it is how many copies of everything there are, such as 3")
    return int(text)


def _hosts(places: str) -> tuple[tuple[str, int], ...]:
    found = re.findall(r"(?:^|,)(\[[0-9A-Fa-f:.]+\]|[^\[\],:]+)(?::(\d{1,5}))?(?=,|$)", places)
    if ",".join(host + (f":{port}" if port else "") for host, port in found) != places or not found:
        raise wrong_url("names no host: cassandra://user:password@host1,host2:9042/keyspace")
    last = found[-1][1] or "9042"  # a port after the last host is the port of all that have none
    return tuple((host.strip("[]"), int(port or last)) for host, port in found)


# --- errors --------------------------------------------------------------------------------------
#
# A conditional write is proposed, accepted by a majority, and then committed. Whatever is refused before the proposal
# was not applied, and is listed here. All else is unknown: a timeout or a failure of a replica may come after the
# proposal was accepted by some, and then the next round on the same partition completes it, or does not.

NOT_APPLIED: Final[tuple[type[BaseException], ...]] = (
    cassandra.Unavailable,  # fewer replicas alive than the round needs: it never began (but see _is_from_before)
    cassandra.RequestValidationException,  # types, rights, sizes
    protocol.RequestValidationException,  # syntax, statements that are not prepared
    cassandra.AuthenticationFailed,
    cluster.NoHostAvailable,  # nobody was asked: the driver repeats nothing (FallthroughRetryPolicy)
    protocol.IsBootstrappingErrorMessage,
)
# An overloaded coordinator says so before it begins, in these words; in others, it may be one that cannot store hints
# for what was accepted already.
_TURNED_AWAY: Final = ("Request breached", "Query timed out before it could start", "Request has spent over")


_TOMBSTONES: Final = 1  # what a replica says of a read that it gave up


class TooManyDeleted(StoreUnavailable):
    """A read met more deleted rows than the server is willing to pass over at once. A narrower one meets fewer."""


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    detail = f"cassandra: {in_words(error)}"
    if isinstance(error, protocol.OverloadedErrorMessage):
        if not writing or str(error.message).startswith(_TURNED_AWAY):
            return StoreThrottled(detail)
        return OutcomeUnknown(detail)
    if writing and not (isinstance(error, NOT_APPLIED) and _is_from_before(error)):
        return OutcomeUnknown(detail)
    if isinstance(error, cassandra.ReadFailure) and _TOMBSTONES in (error.error_code_map or {}).values():
        return TooManyDeleted(detail)
    return StoreUnavailable(detail)


def _is_from_before(error: BaseException) -> bool:
    """The older Paxos looks for replicas once more, to commit what a majority has accepted by then."""
    is_late = isinstance(error, cassandra.Unavailable) and error.consistency not in _SERIAL
    return not is_late


_SERIAL: Final = (ConsistencyLevel.SERIAL, ConsistencyLevel.LOCAL_SERIAL)


def in_words(error: BaseException) -> str:
    if causes := _causes(error):
        return "; ".join(dict.fromkeys(in_words(cause) for cause in causes))
    if isinstance(error, cassandra.OperationTimedOut):
        return "no answer in time"
    if isinstance(error, cluster.NoHostAvailable):
        return "no node can be reached"
    said = (str(error) or type(error).__name__).partition("\n")[0]
    return re.sub(r"^errors=(.*), last_host=.*$", r"\1", said)  # as an error of another connection is passed on


def _causes(error: BaseException) -> list[BaseException]:
    """Of each host that was tried; the driver does not always know."""
    errors = getattr(error, "errors", None) if isinstance(error, cluster.NoHostAvailable) else None
    return list(errors.values()) if isinstance(errors, dict) else []


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    for cause in [error, *_causes(error)]:
        said = str(cause)
        for kind, words, text in _EXPLANATIONS:
            if isinstance(cause, kind) and re.search(words, said):
                return SetupError(f"store.url: {address.label} {text} ({in_words(cause)})", field="store.url")
    if isinstance(error, cluster.NoHostAvailable | cassandra.UnresolvableContactPoints | OSError):
        return StoreUnavailable(f"cassandra: {address.label} cannot be reached ({in_words(error)})")
    detail = store_error(error, writing=False).detail
    return StoreUnavailable(f"{detail} at {address.label}")


_EXPLANATIONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (cassandra.AuthenticationFailed, "requires authentication", "wants a user and a password: user:password@host"),
    (cassandra.AuthenticationFailed, "", "refuses the user or the password"),
    (cassandra.Unauthorized, "", "does not allow this user to do what is needed; `duetime serve` makes its tables"
     " itself: GRANT CREATE ON ALL KEYSPACES (or make the keyspace by hand), then GRANT CREATE, ALTER, SELECT, MODIFY"
     " ON KEYSPACE … TO …"),
    (ssl.SSLError, "", "and this side agree on no TLS as sslmode asks for"),
    (OSError, "(?i)ssl|certificate|hostname mismatch", "and this side agree on no TLS as sslmode asks for"),
    (protocol.ErrorMessage, "(?i)protocol version|beta version", "is too old: Cassandra 4.0 or later is needed"),
    (Exception, "(?i)unsupported protocol|ProtocolVersionUnsupported", "is too old: Cassandra 4.0 or later is needed"),
    (cassandra.ConfigurationException, "(?i)replication|datacenter", "cannot make the keyspace like that;"
     " name ?replication= and ?datacenter= as the cluster knows them"),
)  # fmt: skip
