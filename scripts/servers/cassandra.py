"""Apache Cassandra 5.0 (jars of Maven, on Java 17): one node, set so that it keeps its word.

Its first start on a machine rehearses: the classes that it loaded are kept, which saves later starts a third of their
time (measured: 3.4 s of CPU, not 4.9).
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .install import maven_artifact, once
from .java import java_17, java_version
from .server import Server, ServerError, can_bind, free_port

__all__ = ["Cassandra"]

_VERSION = "5.0.9"

_SETTINGS = {
    "cluster_name": "duetime",
    "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
    "endpoint_snitch": "SimpleSnitch",
    "num_tokens": "1",
    "auto_bootstrap": "false",  # a fresh node joins at once and streams nothing
    "listen_address": "127.0.0.1",
    "rpc_address": "127.0.0.1",
    # A write is acknowledged when it is on disk. By the default, "periodic", a kill -9 loses acknowledged writes.
    "commitlog_sync": "batch",
    "commitlog_segment_size": "16MiB",  # the largest mutation is half of it
    "commitlog_total_space": "256MiB",
    "disk_failure_policy": "die",
    "commit_failure_policy": "die",
    "paxos_variant": "v2",  # by the default, v1, conditional writes that meet each other are five times slower
    "storage_compatibility_mode": "NONE",  # no older node will ever join
    "memtable": "{configurations: {trie: {class_name: TrieMemtable}, default: {inherits: trie}}}",
    "sstable": "{selected_format: bti}",
    # A small machine, which others use as well: little memory, few threads, much patience.
    "memtable_heap_space": "128MiB",
    "memtable_offheap_space": "128MiB",
    "concurrent_reads": "16",
    "concurrent_writes": "32",
    "concurrent_counter_writes": "4",
    "concurrent_compactors": "1",
    "key_cache_size": "8MiB",
    "counter_cache_size": "0MiB",
    "file_cache_size": "32MiB",
    "networking_cache_size": "32MiB",
    "prepared_statements_cache_size": "8MiB",
    "auto_snapshot": "false",
    "hinted_handoff_enabled": "false",
    "dynamic_snitch": "false",
    "read_request_timeout": "10s",
    "range_request_timeout": "20s",
    "write_request_timeout": "10s",
    "cas_contention_timeout": "5s",
    "truncate_request_timeout": "60s",
    "request_timeout": "20s",
    "slow_query_log_timeout": "2s",
}

_SEEDS = "org.apache.cassandra.locator.SimpleSeedProvider"

_LOGGING = """\
<configuration scan="false">
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%date{ISO8601} %-5level [%thread] %F:%L %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="out"/></root>
</configuration>
"""

# What Cassandra needs of Java's inner parts: those that its own start script opens for Java 17.
_EXPORTS = """
    java.base/jdk.internal.misc java.base/java.lang.ref java.management.rmi/com.sun.jmx.remote.internal.rmi
    java.rmi/sun.rmi.registry java.rmi/sun.rmi.server java.sql/java.sql jdk.unsupported/sun.misc
    jdk.compiler/com.sun.tools.javac.file jdk.attach/sun.tools.attach
"""
_OPENS = """
    java.base/java.io java.base/java.lang java.base/java.lang.module java.base/java.lang.reflect java.base/java.util
    java.base/jdk.internal.loader java.base/jdk.internal.math java.base/jdk.internal.module java.base/jdk.internal.ref
    java.base/jdk.internal.reflect java.base/jdk.internal.util.jar java.base/sun.nio.ch
    jdk.compiler/com.sun.tools.javac jdk.management/com.sun.management.internal
"""
_JAVA_OPTIONS = [
    *(f"--add-exports={name}=ALL-UNNAMED" for name in _EXPORTS.split()),
    *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS.split()),
    "-Djdk.attach.allowAttachSelf=true",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dsun.nio.PageAlignDirectMemory=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dchronicle.announcer.disable=true",
    "-Dcassandra-foreground=yes",
    # There is no other node to wait for, neither at the start nor at the end.
    "-Dcassandra.ring_delay_ms=0",
    "-Dcassandra.skip_wait_for_gossip_to_settle=0",
    "-Dcassandra.shutdown_announce_in_ms=0",
    "-Dcassandra.superuser_setup_delay_ms=0",
    "-XX:+PerfDisableSharedMem",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:+UseSerialGC",
    "-Xss512k",
    "-Xms128m",
    "-Xmx768m",
    "-XX:TieredStopAtLevel=1",  # the better compiler pays off only after many minutes
]


class Cassandra(Server):
    """Nobody needs a password, and what is acknowledged is on disk.

    `settings` are settings of cassandra.yaml, with maps and lists in braces and brackets. `java_options` win over ours:
    `-Xmx2g`; `-XX:TieredStopAtLevel=4` for a run of hours. With `authenticator: PasswordAuthenticator`, the user is
    `cassandra` and so is the password; for TLS, `client_encryption_options` have to be `optional`, since we ask in
    plain text. There is no JMX, hence no nodetool, unless `-Dcassandra.jmx.local.port=…` is given.
    """

    name = "cassandra"
    ready_seconds = 240
    stop_seconds = 60
    passing_troubles = ("in use by another process",)  # the port between nodes: the next start takes another one

    def __init__(self, *, java_options: Sequence[str] = (), **options: Any):
        super().__init__(**options)
        self.java_options = list(java_options)
        self.storage_port = 0

    def install(self) -> None:
        self._find_programs()
        version = java_version(self._java)
        self._classes = once(f"cassandra-{_VERSION}-classes-of-java-{version}", _rehearse) / "classes.jsa"

    def _find_programs(self) -> None:
        self._java = java_17()
        self._jars = once(f"cassandra-{_VERSION}", _fetch_jars)

    def command(self) -> list[str]:
        """Files are written at every start, for ports may have changed."""
        if not self.storage_port or not can_bind(self.storage_port):
            self.storage_port = free_port()
        itself = f'{{class_name: {_SEEDS}, parameters: [{{seeds: "127.0.0.1:{self.storage_port}"}}]}}'
        ports = {"native_transport_port": str(self.port), "storage_port": str(self.storage_port)}
        settings = _SETTINGS | ports | {"seed_provider": f"[{itself}]"} | self.settings
        (self.folder / "cassandra.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        (self.folder / "logback.xml").write_text(_LOGGING)
        options = [
            f"-Dcassandra.config=file://{self.folder}/cassandra.yaml",
            f"-Dlogback.configurationFile=file://{self.folder}/logback.xml",
            f"-Dcassandra.storagedir={self.folder}",
            f"-Djava.io.tmpdir={self.folder}",
            *self._class_options(),
        ]
        jars = os.pathsep.join(str(jar) for jar in sorted(self._jars.glob("*.jar")))
        java = [str(self._java / "bin" / "java"), *_JAVA_OPTIONS, *options, *self.java_options]
        # It would not notice another one on the same data. The lock is the process's own and goes with it.
        locked = ["flock", "--nonblock", "--no-fork", "--verbose", str(self.folder / "lock")]
        return [*locked, *java, "-classpath", jars, "org.apache.cassandra.service.CassandraDaemon"]

    def _class_options(self) -> list[str]:
        # Where they do not fit, say after an update of Java, they are not used; that is nothing to speak of.
        return [f"-XX:SharedArchiveFile={self._classes}", "-Xlog:disable", "-Xlog:all=error:stderr"]

    def is_ready(self) -> bool:
        try:
            self.execute("SELECT key FROM system.local")
        except (OSError, ServerError):
            return False
        return True

    def url(self, database: str = "duetime") -> str:
        return f"cassandra://127.0.0.1:{self.port}/{database}"

    def make_database(self, name: str) -> None:
        """A keyspace, with one copy of everything: there is one node."""
        replication = "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        self.execute(f"CREATE KEYSPACE {name} WITH replication = {replication}")

    def execute(self, *statements: str) -> None:
        """In a connection of its own. What they answer is not looked at; a refusal raises ServerError."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            _open_session(connection)
            for statement in statements:
                text = statement.encode()
                # Consistency ONE, no options.
                _call(connection, _QUERY, struct.pack(">i", len(text)) + text + struct.pack(">HB", 1, 0))


def _fetch_jars(folder: Path) -> None:
    maven_artifact(f"org.apache.cassandra:cassandra-all:{_VERSION}", folder)


class _Rehearsal(Cassandra):
    """Writes the classes that it has loaded to a file when it ends."""

    stop_seconds = 180

    def install(self) -> None:
        self._find_programs()

    @property
    def classes(self) -> Path:
        return self.folder / "classes.jsa"

    def _class_options(self) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={self.classes}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def _rehearse(folder: Path) -> None:
    """As much of everything as Duetime asks for."""
    with _Rehearsal() as server:
        server.make_database("stage")
        server.execute(
            "CREATE TABLE stage.t (p text, c blob, s bigint static, v blob, PRIMARY KEY (p, c))",
            "INSERT INTO stage.t (p, s) VALUES ('p', 0) IF NOT EXISTS",
            "BEGIN BATCH UPDATE stage.t SET s = 1 WHERE p = 'p' IF s = 0;"
            " INSERT INTO stage.t (p, c, v) VALUES ('p', 0x01, 0x02); APPLY BATCH",
            "INSERT INTO stage.t (p, c, v) VALUES ('p', 0x03, 0x02) USING TTL 100",
            "SELECT c, v FROM stage.t WHERE p = 'p' AND c > 0x00 AND c < 0xff LIMIT 5",
            "DELETE FROM stage.t WHERE p = 'p' AND c = 0x01",
            "SELECT * FROM system.peers_v2",
            "SELECT * FROM system_schema.tables",
            "SELECT * FROM system_schema.columns",
        )
        server.halt()
        shutil.copyfile(server.classes, folder / "classes.jsa")


# --- as much of CQL's protocol, version 4, as it takes to say something ----------------------------

_ERROR, _STARTUP, _AUTHENTICATE, _QUERY, _AUTH_RESPONSE = 0, 1, 3, 7, 15


def _open_session(connection: socket.socket) -> None:
    version = b"\x00\x01\x00\x0bCQL_VERSION\x00\x053.0.0"  # a map of one entry
    if _call(connection, _STARTUP, version) == _AUTHENTICATE:
        known_to_all = b"\x00cassandra\x00cassandra"
        _call(connection, _AUTH_RESPONSE, struct.pack(">i", len(known_to_all)) + known_to_all)


def _call(connection: socket.socket, operation: int, body: bytes) -> int:
    """Answers what kind of answer there was."""
    connection.sendall(struct.pack(">BBhBi", 4, 0, 0, operation, len(body)) + body)
    _, _, _, kind, length = struct.unpack(">BBhBi", _read(connection, 9))
    answer = _read(connection, length)
    if kind == _ERROR:
        _, size = struct.unpack_from(">iH", answer)
        raise ServerError(f"cassandra: {answer[6 : 6 + size].decode(errors='replace')}")
    return int(kind)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("cassandra closed the connection")
        data += part
    return data
