"""Lines to a Cassandra cluster: over each one asks, tells, and waits so long and no longer.

The driver (ADR 13) runs in threads of its own and tells the event loop. It repeats nothing by itself: a write that was
sent and not answered is unknown, and stays so. Many requests share a connection; the driver asks each connection every
two seconds whether it still lives, and replaces those that do not. That is not to be relied on alone. It was seen to
take six seconds, where a lease lasts three; and, after a link that came and went, to hold on to a pool that was shut
down and never to make another. So a line that finds nobody to ask gets a new way to the cluster, and so does the
heartbeat's at the first answer that fails to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Final

import cassandra
from cassandra import cluster, policies
from cassandra.auth import PlainTextAuthProvider
from cassandra.connection import ConnectionException, DefaultEndPoint
from cassandra.query import BatchStatement, BatchType, tuple_factory

from duetime.errors import OutcomeUnknown, StoreUnavailable
from duetime.stores.cassandra.address import LEVELS, Address, in_words, store_error, wrong_url
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.telemetry import log

__all__ = ["Line", "Link", "Statement", "connect"]

Row = tuple[Any, ...]

Statement = tuple[Any, Sequence[Any]]
"""A prepared one, and its values."""

RENEW_EVERY_SECONDS = 0.25
_SETTINGS: Final = ("commitlog_sync", "max_mutation_size", "paxos_variant")


class Line:
    """Has a link of its own, and renews it. Rows are tuples. `impatient`: does not wait for the driver to notice."""

    def __init__(self, address: Address, link: Link, deadline_seconds: float, *, impatient: bool = False) -> None:
        self._address = address
        self._link = link
        self._deadline_seconds = deadline_seconds
        self._connect_seconds = min(CONNECT_SECONDS, deadline_seconds)
        self._impatient = impatient
        self._renewal: asyncio.Task[None] | None = None
        self._renewed_at = 0.0

    async def read(self, statement: Any, *values: Any) -> list[Row]:
        """All rows, however many pages."""
        return await self._ask(statement, values, writing=False)

    async def write(self, statement: Any, *values: Any) -> bool:
        """One conditional statement: was it applied?"""
        return _applied(await self._ask(statement, values, writing=True))

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        """The first is conditional, all are of one partition: they happen together, or none does."""
        batch = BatchStatement(BatchType.UNLOGGED)
        for statement, values in statements:
            batch.add(statement, values)
        return _applied(await self._ask(batch, None, writing=True))

    async def close(self) -> None:
        if self._renewal is not None:
            await asyncio.wait({self._renewal})
        await self._link.close()

    async def _ask(self, statement: Any, values: Sequence[Any] | None, *, writing: bool) -> list[Row]:
        if self._renewal is not None:
            await asyncio.wait({self._renewal}, timeout=self._connect_seconds)
            if self._renewal is not None:
                raise StoreUnavailable(f"cassandra: no connection within {self._connect_seconds:g} s")
        try:
            return await self._rows(statement, values)
        except Exception as error:
            if isinstance(error, cluster.NoHostAvailable) or (self._impatient and isinstance(error, _BROKEN)):
                self._renew()
            if isinstance(error, cassandra.OperationTimedOut):
                detail = f"cassandra: no answer within {self._deadline_seconds:g} s"
                raise (OutcomeUnknown(detail) if writing else StoreUnavailable(detail)) from error
            raise store_error(error, writing=writing) from error

    async def _rows(self, statement: Any, values: Sequence[Any] | None) -> list[Row]:
        response = self._link.session.execute_async(statement, values, timeout=self._deadline_seconds)
        rows: list[Row] = list(await _answer(response) or ())
        while response.has_more_pages:
            rows += await _answer(response, next_page=True) or ()
        return rows

    def _renew(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._renewal is None and now - self._renewed_at >= RENEW_EVERY_SECONDS:
            self._renewed_at = now
            self._renewal = asyncio.ensure_future(self._connect_anew(self._link))

    async def _connect_anew(self, old: Link) -> None:
        try:
            link = await connect(self._address, briefly=old.briefly, within_seconds=self._connect_seconds)
        except Exception as error:  # the old one may come back by itself, and the next failure brings us here again
            log.debug("%s: no new way yet: %s", self._address.label, in_words(error))
        else:
            link.adopt(old.prepared)
            self._link = link
            await old.close()
        finally:
            self._renewal = None


_BROKEN: Final = (cassandra.OperationTimedOut, ConnectionException)


def _answer(response: Any, *, next_page: bool = False) -> Awaitable[Any]:
    """A future of this loop for what arrives in a thread of the driver. Nobody may be waiting any more by then."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def arrived(rows: Any) -> None:
        if not answer.done():
            answer.set_result(rows)

    def failed(error: BaseException) -> None:
        if not answer.done():
            answer.set_exception(error)

    def tell(what: Any, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(what, value)

    if next_page:
        response.clear_callbacks()
        response.start_fetching_next_page()
    response.add_callbacks(lambda rows: tell(arrived, rows), lambda error: tell(failed, error))
    return answer


def _applied(rows: list[Row]) -> bool:
    return bool(rows[0][0])


class Link:
    """An open way to the cluster; `prepare` and `execute` are for its setup, lines for all else."""

    def __init__(self, open_cluster: Any, session: Any, briefly: bool) -> None:
        self._cluster = open_cluster
        self.session = session
        self.briefly = briefly
        self.prepared: list[Any] = []

    async def prepare(self, texts: dict[str, str]) -> dict[str, Any]:
        def prepare_all() -> dict[str, Any]:
            return {name: self.session.prepare(text) for name, text in texts.items()}

        said = await asyncio.to_thread(prepare_all)
        self.adopt(list(said.values()))
        return said

    def adopt(self, prepared: Sequence[Any]) -> None:
        """Statements that another link has prepared: a server that does not know them is told, without a word here."""
        for statement in prepared:
            self._cluster.add_prepared(statement.query_id, statement)
        self.prepared += prepared

    async def execute(self, text: str, *values: Any, level: int | None = None) -> list[Row]:
        """For the few statements of a setup: in a thread, raising the driver's own errors. Waits for the schema."""

        def run() -> list[Row]:
            statement = cluster.SimpleStatement(text, consistency_level=level)
            response = self.session.execute_async(statement, values or None, timeout=60.0)
            rows = list(response.result())
            if not response.is_schema_agreed:
                self._cluster.control_connection.wait_for_schema_agreement(wait_time=30.0)
            return rows

        return await asyncio.to_thread(run)

    def nodes(self) -> dict[str, int]:
        """How many nodes each datacenter has."""
        places = [host.datacenter for host in self._cluster.metadata.all_hosts()]
        return {place: places.count(place) for place in places}

    async def settings(self) -> dict[str, dict[str, str]]:
        """Of every node that answers: those of its settings that matter here. Nothing where this user may not look."""
        text = f"SELECT name, value FROM system_views.settings WHERE name IN {_SETTINGS}"  # noqa: S608

        def run() -> dict[str, dict[str, str]]:
            found = {}
            for host in self._cluster.metadata.all_hosts():
                with contextlib.suppress(cassandra.DriverException, cluster.NoHostAvailable):
                    rows = self.session.execute_async(text, host=host, timeout=CONNECT_SECONDS).result()
                    found[str(host.address)] = {name: value for name, value in rows if value is not None}
            return found

        return await asyncio.to_thread(run)

    async def close(self) -> None:
        """Runs to its end in its thread, even if the task that waits for it is cancelled."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.shut_down))

    def shut_down(self) -> None:
        self._cluster.shutdown()


async def connect(address: Address, *, briefly: bool = False, within_seconds: float = CONNECT_SECONDS) -> Link:
    """`briefly`: without learning which node holds what."""
    handover = _Handover()

    def work() -> Link:
        link = _connect(address, briefly, within_seconds)
        handover.offer(link)
        return link

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        handover.refuse()
        raise


class _Handover:
    """Passes a link from the thread that made it to a caller that may be cancelled at any time. A link that the
    caller does not take is closed, in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused = False
        self._link: Link | None = None

    def offer(self, link: Link) -> None:
        """Called in the thread that made the link."""
        with self._lock:
            self._link = link
            refused = self._refused
        if refused:
            link.shut_down()

    def refuse(self) -> None:
        with self._lock:
            self._refused = True
            link = self._link
        if link is not None:
            asyncio.get_running_loop().run_in_executor(None, link.shut_down)


class _Connection(cluster.DefaultConnection):  # type: ignore[misc]
    """The driver's own. It sends and receives by four kilobytes, and each is a call of the system."""

    in_buffer_size = 256 * 1024
    out_buffer_size = 256 * 1024


def _connect(address: Address, briefly: bool, within_seconds: float) -> Link:
    level, serial_level = LEVELS[address.consistency]
    # Never a node of another datacenter, not even for one statement: what is local there is agreed on by others.
    near = policies.DCAwareRoundRobinPolicy(local_dc=address.datacenter or "")
    # Not shuffled: rounds on a shard that begin at one and the same node meet each other less.
    by_shard = policies.TokenAwarePolicy(near, shuffle_replicas=False)
    profile = cluster.ExecutionProfile(
        load_balancing_policy=near if briefly else by_shard,
        retry_policy=policies.FallthroughRetryPolicy(),
        consistency_level=level,
        serial_consistency_level=serial_level,
        request_timeout=None,
        row_factory=tuple_factory,
        speculative_execution_policy=policies.NoSpeculativeExecutionPolicy(),
    )
    opened = cluster.Cluster(
        contact_points=[DefaultEndPoint(host, port) for host, port in address.hosts],
        port=address.hosts[0][1],
        protocol_version=5,  # known since Cassandra 4.0
        auth_provider=PlainTextAuthProvider(address.user, address.password) if address.user else None,
        ssl_context=_tls(address),
        compression=False,
        execution_profiles={cluster.EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=policies.ConstantReconnectionPolicy(0.5, max_attempts=None),
        connect_timeout=within_seconds,
        control_connection_timeout=within_seconds,
        idle_heartbeat_interval=2.0,
        idle_heartbeat_timeout=2.0,
        schema_metadata_enabled=not briefly,
        token_metadata_enabled=not briefly,
        sockopts=_socket_options(),
        connection_class=_Connection,
        application_name="duetime",
        monitor_reporting_enabled=False,
    )
    try:
        return Link(opened, opened.connect(), briefly)
    except BaseException:
        places = {host.datacenter for host in opened.metadata.all_hosts() if host.datacenter is not None}
        opened.shutdown()
        if places and address.datacenter is not None and address.datacenter not in places:
            known = ", ".join(sorted(places))
            raise wrong_url(f"has datacenter={address.datacenter}, which is not there; there are {known}") from None
        raise


def _socket_options() -> list[tuple[int, int, int]]:
    """Notice an end that is gone; and never wait with the rest of a message, as by default: that costs 40 ms each."""
    wanted = (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
    known = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in wanted if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *known]


def _tls(address: Address) -> ssl.SSLContext | None:
    if address.sslmode == "disable":
        return None
    try:
        context = ssl.create_default_context(cafile=address.sslrootcert)
        context.check_hostname = address.sslmode == "verify-full"
        if address.sslmode == "require":
            context.verify_mode = ssl.CERT_NONE
        if address.sslcert is not None:
            context.load_cert_chain(address.sslcert, address.sslkey, address.sslpassword or (lambda: ""))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise wrong_url(f"names certificates or keys that cannot be used: {in_words(error)}") from None
    return context
