"""The way to the database under MongoStore: its URL, its clients, what their errors mean, and how transactions run.

A `Line` is a few driver sessions for one kind of work. Work that was begun is never cancelled: a caller who gives up
waiting leaves it to finish, and past its deadline the driver gives up the connection. Reads are causally consistent
with all that this store has read or written: whatever member or router answers, it has seen that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakSet

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.background import CLOSE_SECONDS, BackgroundTasks
from duetime.stores.sessions import CONNECT_SECONDS

try:
    import bson.errors
    import pymongo
    import pymongo.asynchronous.pool
    from bson import Timestamp
    from bson.codec_options import DatetimeConversion
    from pymongo import AsyncMongoClient, ReadPreference, WriteConcern, errors
    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.asynchronous.collection import AsyncCollection
    from pymongo.asynchronous.database import AsyncDatabase
    from pymongo.read_concern import ReadConcern
    from pymongo.uri_parser import parse_uri, split_options
except ImportError:
    raise SetupError("store.url: MongoDB needs its driver: pip install 'duetime[mongodb]'", field="store.url") from None

__all__ = [
    "Address",
    "Client",
    "Line",
    "Moment",
    "Talk",
    "address_of",
    "close",
    "connect",
    "setup_error",
    "store_error",
]

Document: TypeAlias = dict[str, Any]
Client: TypeAlias = "AsyncMongoClient[Document]"
Collection: TypeAlias = "AsyncCollection[Document]"
T = TypeVar("T")

# --- the URL -------------------------------------------------------------------------------------

# Those of the driver that leave alone what Duetime decides itself: pools, deadlines, retries, concerns.
_OPTIONS: Final = (
    "appName", "authMechanism", "authMechanismProperties", "authSource", "compressors", "connectTimeoutMS",
    "directConnection", "heartbeatFrequencyMS", "loadBalanced", "localThresholdMS", "maxIdleTimeMS", "replicaSet",
    "serverMonitoringMode", "serverSelectionTimeoutMS", "srvMaxHosts", "srvServiceName", "ssl", "tls",
    "tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames", "tlsCAFile", "tlsCRLFile", "tlsCertificateKeyFile",
    "tlsCertificateKeyFilePassword", "tlsDisableOCSPEndpointCheck", "tlsInsecure", "zlibCompressionLevel",
)  # fmt: skip
# Hosted databases hand out URLs with some of these; they may say what is done anyway. Retries are never the driver's.
_SAID_ANYWAY: Final[dict[str, tuple[str, ...]]] = {
    "w": ("majority",),
    "journal": ("true",),
    "readPreference": ("primary",),
    "readConcernLevel": ("majority",),
    "retryWrites": ("true", "false"),
    "retryReads": ("true", "false"),
}
_SPELLED: Final = {name.lower(): name for name in (*_OPTIONS, *_SAID_ANYWAY)}
_DATABASE: Final = re.compile(r'[^/\\. "$*<>:|?\0]{1,63}')


class Address(Struct, frozen=True):
    """Where the database is, as the driver wants to hear it, and as a person may read it (no password)."""

    uri: str
    database: str
    label: str
    options: frozenset[str] = frozenset()  # those that were given, in lower case


def address_of(url: str) -> Address:
    """mongodb://user:password@host:port,host:port/database?option=value, or mongodb+srv://…, as the driver knows it."""
    parts = urlsplit(url)
    if parts.fragment:
        raise _wrong("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1 or "@" in parts.path:
        raise _wrong("has an '@' or a '/' in its password: there they are written %40 and %2F")
    database = unquote(parts.path[1:])
    if not database:
        raise _wrong("names no database: mongodb://user:password@host:27017/DATABASE")
    if not _DATABASE.fullmatch(database):
        raise _wrong(f'has the database {database!r}: at most 63 characters, none of / \\ . " $ * < > : | ? or space')
    options = _checked(parts.query)
    if parts.scheme == "mongodb":  # the other scheme is a question to the name service, asked when connecting
        try:
            parse_uri(url)
        except (errors.PyMongoError, ValueError):
            raise _wrong("cannot be read: are the hosts host:port, and @ : / ? # % in the password encoded?") from None
    label = f"{parts.netloc.rpartition('@')[2]}/{database}"
    return Address(url, database, label, frozenset(options))


def _checked(query: str) -> set[str]:
    """The names of the options, each known and with a value that makes sense."""
    if not query:
        return set()
    for name, value in parse_qsl(query, keep_blank_values=True):
        spelled = _SPELLED.get(name.lower())
        if spelled is None:
            raise _wrong(f"has the option {name!r}, which is not known; known are {', '.join(_OPTIONS)}")
        if value.lower() not in _SAID_ANYWAY.get(spelled, (value.lower(),)):
            raise _wrong(f"has {name}={value}: it is always {' or '.join(_SAID_ANYWAY[spelled])} here, so leave it out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the driver's word for an option given twice, or a value it cannot use
            return {name.lower() for name in split_options(query)}
    except (errors.PyMongoError, ValueError, TypeError, OSError, Warning) as error:
        raise _wrong(f"has options that make no sense: {error}") from None


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the MongoDB URL {what}", field="store.url")


def connect(address: Address, connections: int, within_seconds: float = CONNECT_SECONDS) -> Client:
    """A client with its own view of the servers. It connects when it is used."""
    settings: dict[str, Any] = {
        "appname": "duetime",
        "connectTimeoutMS": int(within_seconds * 1_000),
        "serverSelectionTimeoutMS": int(within_seconds * 1_000),
    }
    ours = {name: value for name, value in settings.items() if name.lower() not in address.options}
    if "max_adaptive_retries" in pymongo.common.VALIDATORS:  # a newer driver's way to retry what is refused for load
        ours["max_adaptive_retries"] = 0
    return AsyncMongoClient(
        address.uri,
        maxPoolSize=connections,
        maxConnecting=connections,
        retryWrites=False,
        retryReads=False,
        w="majority",
        journal=True,
        readConcernLevel="majority",
        readPreference="primary",
        datetime_conversion=DatetimeConversion.DATETIME_MS,
        event_listeners=[_Connections()],
        **ours,
    )


async def close(client: Client) -> None:
    """Closes all connections of a client. The driver first ends its sessions on the server: that has a time limit here,
    because a `close` that is cancelled half-way would leave connections open."""
    with contextlib.suppress(errors.PyMongoError), pymongo.timeout(CLOSE_SECONDS):
        await client.close()
    for listener in client.options.event_listeners:
        if isinstance(listener, _Connections):
            listener.abort()


class _Connections(pymongo.monitoring.ServerHeartbeatListener):
    """The open connections of one client. The driver leaves some of them to the garbage collector, such as that of the
    monitor of a server that belongs to another replica set. It is a listener because the driver hands a client's
    listeners to whatever opens its connections; the events themselves do not matter."""

    def __init__(self) -> None:
        self.opened: WeakSet[Any] = WeakSet()

    def abort(self) -> None:
        for connection in list(self.opened):
            connection.conn[0].abort()

    def started(self, event: object) -> None: ...
    def succeeded(self, event: object) -> None: ...
    def failed(self, event: object) -> None: ...


_driver_opens: Any = getattr(pymongo.asynchronous.pool, "_configured_protocol_interface", None)


async def _opens_or_closes(*args: Any, **options: Any) -> Any:
    """Opens a connection as the driver does. If that is cancelled half-way, as it is when a client is closed while its
    monitor connects, the driver leaves the socket to the garbage collector: here it is closed."""
    try:
        connection = await _driver_opens(*args, **options)
        listeners = getattr(args[1] if len(args) > 1 else None, "_event_listeners", None)
        for listener in [] if listeners is None else listeners.event_listeners():
            if isinstance(listener, _Connections):
                listener.opened.add(connection)
        return connection
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            opened = frame.f_locals.get("sock")
            if isinstance(opened, socket.socket):
                opened.close()
        raise


if _driver_opens is not None:
    pymongo.asynchronous.pool._configured_protocol_interface = _opens_or_closes  # type: ignore[attr-defined]


# --- errors --------------------------------------------------------------------------------------
#
# Until a transaction is told to commit, nothing of it is applied, whatever goes wrong; and what became of a commit the
# server says with a label of its own. So these tables are for writes that are no transaction: which errors say that
# the write was refused? All others may have come after it was applied, and before it was known to a majority.

# Server errors by number. tests/unit/stores/test_mongodb_errors.py fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: Final[dict[int, bool]] = {
    # Refused before anything was done: the command, its values, its user; not a primary when it arrived.
    **dict.fromkeys((2, 9, 13, 14, 18, 20, 26, 59, 72, 133, 263, 391, 10058, 10107, 10334, 13435, 13436), False),
    # A duplicate key; a conflict that was not to be waited for; a transaction that the server knows it gave up.
    **dict.fromkeys((112, 251, 11000, 11001, 12582), False),
    # Killed, out of time, or no primary any more while the write or the wait for a majority was under way.
    **dict.fromkeys((43, 50, 64, 91, 134, 189, 262, 11600, 11601, 11602), True),
    # Trouble between servers, of which a router may report.
    **dict.fromkeys((6, 7, 89, 9001), True),
}

# The driver's own errors. Those that are no answer of the server may have come before or after the command did.
REFUSED_BY_THE_DRIVER: Final = (
    errors.ServerSelectionTimeoutError,
    errors.WaitQueueTimeoutError,
    errors.ConfigurationError,
    errors.InvalidOperation,
    errors.InvalidName,
    errors.CollectionInvalid,
    errors.EncryptionError,
    bson.errors.BSONError,
)

_MESSAGES: Final[dict[int, str]] = {
    13: "the database does not allow this user to do that",
    18: "the database refuses the password",
    50: "the database had no time for it",
    64: "a majority of the replica set did not confirm",
    91: "the database is shutting down",
    112: "others write there all the time",
    189: "the primary stepped down",
    10107: "the server is no primary",
    11600: "the database is shutting down",
    11602: "the primary changed",
}


def code_of(error: BaseException) -> int:
    details = getattr(error, "details", None)
    code = getattr(error, "code", None) or (details.get("code") if isinstance(details, Mapping) else None)
    return int(code or 0)


def may_have_committed(error: BaseException) -> bool:
    """Of an error met by a write that is no transaction."""
    if isinstance(error, errors.WriteConcernError):
        return True
    if isinstance(error, errors.OperationFailure | errors.NotPrimaryError):
        return MAY_HAVE_COMMITTED.get(code_of(error), True)
    # A connection that did not come about carried nothing; newer drivers say so with this label.
    return not (isinstance(error, REFUSED_BY_THE_DRIVER) or _labelled(error, "SystemOverloadedError"))


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    detail = f"mongodb: {_MESSAGES.get(code_of(error), type(error).__name__)} ({in_words(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if isinstance(error, errors.OperationFailure) and _labelled(error, "SystemOverloadedError"):
        return StoreThrottled(detail)
    return StoreUnavailable(detail)


def _labelled(error: BaseException, label: str) -> bool:
    return isinstance(error, errors.PyMongoError) and error.has_error_label(label)


def in_words(error: BaseException) -> str:
    """The driver adds the whole answer, or its whole view of the servers."""
    text = str(error) or type(error).__name__
    # The server repeats the command it refuses, with all that is in it.
    return re.split(
        r", full error:|, Timeout: |\n| \(configured timeouts|(?: to execute command)? \{", text, maxsplit=1
    )[0]


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    if re.search("SSL|TLS|CERTIFICATE", str(error)):
        return _unusable(address, f": no TLS connection as the options ask for ({in_words(error)})")
    if explanation := _EXPLANATIONS.get(code_of(error)):
        return _unusable(address, f" {explanation} ({in_words(error)})")
    if isinstance(error, errors.ServerSelectionTimeoutError):
        return StoreUnavailable(f"mongodb: {address.label} cannot be reached ({in_words(error)})")
    if isinstance(error, errors.ConfigurationError) and "lifetime expired" not in str(error):
        return _unusable(address, f": {in_words(error)}")
    return store_error(error, writing=False)  # type: ignore[return-value]


def _unusable(address: Address, why: str) -> SetupError:
    return SetupError(f"store.url: {address.label}{why}", field="store.url")


NO_REPLICA_SET: Final = (
    "is no replica set: transactions are missing; start mongod with --replSet NAME and call rs.initiate() once"
    " (one member is enough)"
)
_EXPLANATIONS: Final[dict[int, str]] = {
    13: "does not allow this user to do what is needed: grant it the role readWrite on that database",
    18: "refuses the user or the password; is authSource the database that knows the user?",
    8000: "refuses the user or the password",  # Atlas
    20: NO_REPLICA_SET,
    263: NO_REPLICA_SET,
    10107: "is a secondary; name the primary, or leave out directConnection",
    13435: "is a secondary; name the primary, or leave out directConnection",
    13436: "is no primary and no secondary: is the replica set initiated?",
}


# --- lines ---------------------------------------------------------------------------------------


class Moment:
    """The newest cluster time that the store has seen. Whoever reads later sees no older one."""

    def __init__(self) -> None:
        self._latest: Timestamp | None = None

    def bring(self, session: AsyncClientSession) -> None:
        if self._latest is not None:
            session.advance_operation_time(self._latest)

    def take(self, session: AsyncClientSession) -> None:
        seen = session.operation_time
        if seen is not None and (self._latest is None or seen > self._latest):
            self._latest = seen


class Talk:
    """A session with the database, for one piece of work at a time."""

    def __init__(self, db: AsyncDatabase[Document], session: AsyncClientSession) -> None:
        self.db = db
        self.session = session
        self.timers: Collection = db["timers"]
        self.members: Collection = db["members"]
        self.namespaces: Collection = db["namespaces"]
        self.at_one_moment: Collection = self.timers.with_options(read_concern=ReadConcern("snapshot"))

    async def tell(self, command: Document) -> Document:
        """A command as it is, without what the driver's bulk interface costs. In a transaction only: elsewhere nobody
        would look at what became of its write concern."""
        answer: Document = await self.db.command(command, session=self.session)
        if answer.get("writeErrors"):
            [error, *_] = answer["writeErrors"]
            raise errors.OperationFailure(error.get("errmsg", "refused"), error.get("code"), error)
        return answer


Work = Callable[[Talk], Awaitable[T]]
_MAJORITY: Final = WriteConcern("majority", j=True)
_SNAPSHOT: Final = ReadConcern("snapshot")
_PAUSE_FIRST_SECONDS = 0.002
_PAUSE_MAX_SECONDS = 0.1
_INTERRUPTED = 11601  # somebody killed the session: who claims a shard does that to the one who had it


class Line:
    """A few sessions for one kind of work; what finds none of them idle waits for its turn."""

    def __init__(
        self, client: Client, database: str, count: int, deadline_seconds: float, moment: Moment | None = None
    ) -> None:
        self._client = client
        self._moment = moment or Moment()
        self._deadline_seconds = deadline_seconds
        self._talks = [Talk(client[database], client.start_session(causal_consistency=True)) for _ in range(count)]
        self._idle = list(self._talks)
        self._turn = asyncio.Semaphore(count)
        self._begun = BackgroundTasks()
        self._closed = False

    @property
    def session_ids(self) -> list[Any]:
        """By which others can end what these sessions have begun."""
        return [talk.session.session_id["id"] for talk in self._talks]

    async def read(self, work: Work[T]) -> T:
        return await self._begun.run_to_end(self._run(lambda talk: self._simply(talk, work, writing=False)))

    async def write(self, work: Work[T]) -> T:
        """Work of one writing command; if there are more, the last of them."""
        return await self._begun.run_to_end(self._run(lambda talk: self._simply(talk, work, writing=True)))

    async def transaction(self, work: Work[T]) -> T:
        """All of the work or nothing. It is done again from the start where another one was faster."""
        return await self._begun.run_to_end(self._run(lambda talk: self._transact(talk, work)))

    async def close(self) -> None:
        """After what is under way, unless that takes too long."""
        self._closed = True
        await self._begun.close()
        for talk in self._talks:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(talk.session.end_session(), CLOSE_SECONDS)

    async def _run(self, act: Work[T]) -> T:
        async with self._turn:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            talk = self._idle.pop()
            try:
                self._moment.bring(talk.session)
                with pymongo.timeout(self._deadline_seconds):
                    return await act(talk)
            finally:
                self._moment.take(talk.session)
                self._idle.append(talk)

    async def _simply(self, talk: Talk, work: Work[T], *, writing: bool) -> T:
        try:
            return await work(talk)
        except StoreError:
            raise
        except Exception as error:
            raise store_error(error, writing=writing) from error

    async def _transact(self, talk: Talk, work: Work[T]) -> T:
        """A session's next transaction ends the one before on the server, should it still be open there."""
        expires_at = _now() + self._deadline_seconds
        pause = _PAUSE_FIRST_SECONDS
        while True:
            try:
                await begin(talk)
                answer = await work(talk)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    await talk.session.abort_transaction()
                if not isinstance(error, (errors.PyMongoError, bson.errors.BSONError)):
                    raise
                if _now() > expires_at or not _may_run_again(error):
                    raise store_error(error, writing=False) from error
            else:
                if await self._commit(talk, expires_at):
                    return answer
            await asyncio.sleep(pause * random.random())  # not to meet the same one again
            pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _commit(self, talk: Talk, expires_at: float) -> bool:
        """False: certainly not committed, and to be run again. An unknown outcome is asked for until the deadline:
        to commit again is to ask. What fails then says nothing of the first time, however certain it sounds."""
        while True:
            try:
                await talk.session.commit_transaction()
                return True
            except errors.PyMongoError as error:
                if _labelled(error, "TransientTransactionError"):
                    if _now() > expires_at:
                        raise store_error(error, writing=False) from error
                    return False
                asked_again = _labelled(error, "UnknownTransactionCommitResult") or code_of(error) == _INTERRUPTED
                if not asked_again or _now() > expires_at:
                    raise OutcomeUnknown(store_error(error, writing=True).detail) from error
            await asyncio.sleep(_PAUSE_MAX_SECONDS * random.random())


async def begin(talk: Talk) -> None:
    """What it reads is of one moment, and what it writes was changed by nobody since, or it conflicts."""
    await talk.session.start_transaction(_SNAPSHOT, _MAJORITY, ReadPreference.PRIMARY)


def _may_run_again(error: BaseException) -> bool:
    return _labelled(error, "TransientTransactionError") or code_of(error) == _INTERRUPTED


def _now() -> float:
    return asyncio.get_running_loop().time()
