"""Connections to a Cassandra cluster.

A `Client` executes statements, each with a deadline, over a `Connection` that it replaces when it is broken.

The driver (ADR 13) runs in its own threads and passes results to the event loop. It does not retry: a write that was
sent and not answered has an unknown outcome. Many requests share one network connection. Every two seconds the driver
checks each network connection, and replaces broken ones. That is not enough. It was seen to take six seconds, while a
lease lasts three. After a network that failed and came back, the driver was also seen to keep a pool that was shut down
and never to create another one. So a client that finds no reachable node gets a new `Connection`, and the client of the
heartbeat gets one after the first answer that does not come in time.
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
from cassandra import ConsistencyLevel, cluster, policies
from cassandra.auth import PlainTextAuthProvider
from cassandra.connection import ConnectionException, DefaultEndPoint
from cassandra.query import BatchStatement, BatchType, tuple_factory

from duetime.errors import OutcomeUnknown, StoreUnavailable
from duetime.stores.cassandra.address import Address, wrong_url
from duetime.stores.cassandra.errors import error_text, store_error
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.telemetry import log

__all__ = ["Client", "Connection", "Row", "Statement", "connect"]

Row = tuple[Any, ...]

Statement = tuple[Any, Sequence[Any]]
"""A prepared statement, and its values."""

RECONNECT_EVERY_SECONDS = 0.25
# The level of reads and commits, and the level of the Paxos rounds before a commit.
_LEVELS: Final = {
    "quorum": (ConsistencyLevel.QUORUM, ConsistencyLevel.SERIAL),
    "local_quorum": (ConsistencyLevel.LOCAL_QUORUM, ConsistencyLevel.LOCAL_SERIAL),
}
_SETTINGS: Final = ("commitlog_sync", "max_mutation_size", "paxos_variant")


class Client:
    """Executes statements over a connection of its own. Rows are tuples.

    `reconnect_on_timeout`: replace the connection after the first timeout, and do not wait until the driver notices.
    """

    def __init__(
        self, address: Address, connection: Connection, deadline_seconds: float, *, reconnect_on_timeout: bool = False
    ) -> None:
        self._address = address
        self._connection = connection
        self._deadline_seconds = deadline_seconds
        self._connect_seconds = min(CONNECT_SECONDS, deadline_seconds)
        self._reconnect_on_timeout = reconnect_on_timeout
        self._reconnecting: asyncio.Task[None] | None = None
        self._reconnected_at = 0.0

    async def read(self, statement: Any, *values: Any) -> list[Row]:
        """All rows, of all pages."""
        return await self._execute(statement, values, writing=False)

    async def write(self, statement: Any, *values: Any) -> bool:
        """Execute one conditional statement. Was it applied?"""
        return _applied(await self._execute(statement, values, writing=True))

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        """The first statement is conditional, and all are of one partition: all are applied, or none is."""
        batch = BatchStatement(BatchType.UNLOGGED)
        for statement, values in statements:
            batch.add(statement, values)
        return _applied(await self._execute(batch, None, writing=True))

    async def close(self) -> None:
        if self._reconnecting is not None:
            await asyncio.wait({self._reconnecting})
        await self._connection.close()

    async def _execute(self, statement: Any, values: Sequence[Any] | None, *, writing: bool) -> list[Row]:
        if self._reconnecting is not None:
            await asyncio.wait({self._reconnecting}, timeout=self._connect_seconds)
            if self._reconnecting is not None:
                raise StoreUnavailable(f"cassandra: no connection within {self._connect_seconds:g} s")
        try:
            return await self._rows(statement, values)
        except Exception as error:
            if isinstance(error, cluster.NoHostAvailable) or (
                self._reconnect_on_timeout and isinstance(error, _BROKEN)
            ):
                self._reconnect()
            if isinstance(error, cassandra.OperationTimedOut):
                detail = f"cassandra: no answer within {self._deadline_seconds:g} s"
                raise (OutcomeUnknown(detail) if writing else StoreUnavailable(detail)) from error
            raise store_error(error, writing=writing) from error

    async def _rows(self, statement: Any, values: Sequence[Any] | None) -> list[Row]:
        response = self._connection.session.execute_async(statement, values, timeout=self._deadline_seconds)
        rows: list[Row] = list(await _result_of(response) or ())
        while response.has_more_pages:
            rows += await _result_of(response, next_page=True) or ()
        return rows

    def _reconnect(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._reconnecting is None and now - self._reconnected_at >= RECONNECT_EVERY_SECONDS:
            self._reconnected_at = now
            self._reconnecting = asyncio.ensure_future(self._replace_connection(self._connection))

    async def _replace_connection(self, old: Connection) -> None:
        try:
            connection = await connect(
                self._address, without_metadata=old.without_metadata, within_seconds=self._connect_seconds
            )
        except Exception as error:  # the old connection may work again; the next failure tries again
            log.debug("%s: cannot connect again: %s", self._address.label, error_text(error))
        else:
            connection.adopt(old.prepared)
            self._connection = connection
            await old.close()
        finally:
            self._reconnecting = None


_BROKEN: Final = (cassandra.OperationTimedOut, ConnectionException)


def _result_of(response: Any, *, next_page: bool = False) -> Awaitable[Any]:
    """A future of this loop for a result that arrives in a thread of the driver. Its caller may be cancelled by
    then."""
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def arrived(rows: Any) -> None:
        if not answer.done():
            answer.set_result(rows)

    def failed(error: BaseException) -> None:
        if not answer.done():
            answer.set_exception(error)

    def notify(what: Any, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(what, value)

    if next_page:
        response.clear_callbacks()
        response.start_fetching_next_page()
    response.add_callbacks(lambda rows: notify(arrived, rows), lambda error: notify(failed, error))
    return answer


def _applied(rows: list[Row]) -> bool:
    return bool(rows[0][0])


class Connection:
    """One open session of the driver. `prepare` and `execute` are for the setup, `Client` is for everything else."""

    def __init__(self, open_cluster: Any, session: Any, without_metadata: bool) -> None:
        self._cluster = open_cluster
        self.session = session
        self.without_metadata = without_metadata
        self.prepared: list[Any] = []

    async def prepare(self, texts: dict[str, str]) -> dict[str, Any]:
        def prepare_all() -> dict[str, Any]:
            return {name: self.session.prepare(text) for name, text in texts.items()}

        prepared = await asyncio.to_thread(prepare_all)
        self.adopt(list(prepared.values()))
        return prepared

    def adopt(self, prepared: Sequence[Any]) -> None:
        """Use statements that another connection has prepared. The driver prepares them on servers that do not know
        them."""
        for statement in prepared:
            self._cluster.add_prepared(statement.query_id, statement)
        self.prepared += prepared

    async def execute(self, text: str, *values: Any, level: int | None = None) -> list[Row]:
        """For the few statements of the setup: runs in a thread, raises the errors of the driver, and waits until all
        nodes have the same schema."""

        def run() -> list[Row]:
            statement = cluster.SimpleStatement(text, consistency_level=level)
            response = self.session.execute_async(statement, values or None, timeout=60.0)
            rows = list(response.result())
            if not response.is_schema_agreed:
                self._cluster.control_connection.wait_for_schema_agreement(wait_time=30.0)
            return rows

        return await asyncio.to_thread(run)

    def nodes(self) -> dict[str, int]:
        """The number of nodes of each datacenter."""
        positions = [host.datacenter for host in self._cluster.metadata.all_hosts()]
        return {position: positions.count(position) for position in positions}

    async def settings(self) -> dict[str, dict[str, str]]:
        """The settings in `_SETTINGS` of every node that answers. Empty for a node if this user may not read them."""
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
        """Continues in its thread even if the waiting task is cancelled."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.shut_down))

    def shut_down(self) -> None:
        self._cluster.shutdown()


async def connect(
    address: Address, *, without_metadata: bool = False, within_seconds: float = CONNECT_SECONDS
) -> Connection:
    """`without_metadata`: do not read which node has which data."""
    pending = _PendingConnection()

    def work() -> Connection:
        connection = _connect(address, without_metadata, within_seconds)
        pending.connected(connection)
        return connection

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        pending.abandon()
        raise


class _PendingConnection:
    """Passes a connection from the thread that opened it to a caller that may be cancelled at any time. If the caller
    was cancelled, the connection is closed in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._connection: Connection | None = None

    def connected(self, connection: Connection) -> None:
        """Called in the thread that opened the connection."""
        with self._lock:
            self._connection = connection
            abandoned = self._abandoned
        if abandoned:
            connection.shut_down()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            connection = self._connection
        if connection is not None:
            asyncio.get_running_loop().run_in_executor(None, connection.shut_down)


class _DriverConnection(cluster.DefaultConnection):  # type: ignore[misc]
    """Larger buffers: the driver sends and receives by four kilobytes, and each piece is a system call."""

    in_buffer_size = 256 * 1024
    out_buffer_size = 256 * 1024


def _connect(address: Address, without_metadata: bool, within_seconds: float) -> Connection:
    level, serial_level = _LEVELS[address.consistency]
    # Never a node of another datacenter, not even for one statement: LOCAL levels would mean the other datacenter
    # there.
    near = policies.DCAwareRoundRobinPolicy(local_dc=address.datacenter or "")
    # Not shuffled: Paxos rounds on a shard conflict less if they start at the same node.
    by_shard = policies.TokenAwarePolicy(near, shuffle_replicas=False)
    profile = cluster.ExecutionProfile(
        load_balancing_policy=near if without_metadata else by_shard,
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
        protocol_version=5,  # since Cassandra 4.0
        auth_provider=PlainTextAuthProvider(address.user, address.password) if address.user else None,
        ssl_context=_tls(address),
        compression=False,
        execution_profiles={cluster.EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=policies.ConstantReconnectionPolicy(0.5, max_attempts=None),
        connect_timeout=within_seconds,
        control_connection_timeout=within_seconds,
        idle_heartbeat_interval=2.0,
        idle_heartbeat_timeout=2.0,
        schema_metadata_enabled=not without_metadata,
        token_metadata_enabled=not without_metadata,
        sockopts=_socket_options(),
        connection_class=_DriverConnection,
        application_name="duetime",
        monitor_reporting_enabled=False,
    )
    try:
        return Connection(opened, opened.connect(), without_metadata)
    except BaseException:
        positions = {host.datacenter for host in opened.metadata.all_hosts() if host.datacenter is not None}
        opened.shutdown()
        if positions and address.datacenter is not None and address.datacenter not in positions:
            known = ", ".join(sorted(positions))
            raise wrong_url(
                f"has datacenter={address.datacenter}, which does not exist; the cluster has {known}"
            ) from None
        raise


def _socket_options() -> list[tuple[int, int, int]]:
    """Detect a peer that is gone; and send the rest of a message at once: waiting, the default, costs 40 ms each."""
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
        raise wrong_url(f"names certificates or keys that cannot be read: {error_text(error)}") from None
    return context
