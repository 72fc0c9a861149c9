"""Apache Kafka 4.1 (jars of Maven, on Java 17): one node, which flushes to disk before it acknowledges."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .install import maven_artifact, once
from .java import java_17
from .server import Server, can_bind, free_port, listens

__all__ = ["Kafka"]

_VERSION = "4.1.1"
_CLUSTER = "ZHVldGltZS1kdWV0aW1lMA"  # 16 bytes in base64: any will do, and the same one after a restart

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "CLIENT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    # After a kill -9 it may come back only when the controller takes it for dead: by the default, after 9 seconds.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # Kafka leaves this to the other replicas; there are none.
    "log.flush.interval.messages": "1",
    # A small machine, which others use as well.
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.cleaner.threads": "1",
}

_LOGGING = """\
Configuration:
  Appenders:
    Console: {name: out, PatternLayout: {pattern: "%d{ISO8601} %-5p [%t] %c{1} %m%n"}}
  Loggers:
    Root: {level: WARN, AppenderRef: {ref: out}}
    Logger: {name: kafka.server.KafkaRaftServer, level: INFO}
"""

_JAVA_OPTIONS = [
    "-Xms64m",
    "-Xmx384m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:TieredStopAtLevel=1",  # the better compiler pays off only after many minutes
    "-XX:+PerfDisableSharedMem",
    "-Djava.net.preferIPv4Stack=true",
]


class Kafka(Server):
    """`settings` are settings of server.properties by their names: `message.max.bytes`…

    `users` are the logins (SASL PLAIN) and their passwords: with any, nobody comes in without a password, and all but
    the first, who may do everything, need ACLs. Without any, nobody needs a password and all is allowed.

    `linked` is the port of a second listener, and the port of the link (of Toxiproxy) that leads to it: a client that
    comes by the link is told to go on by it. Without that it would go to the first listener after its first question.
    """

    name = "kafka"
    stop_seconds = 20

    def __init__(
        self, *, users: Mapping[str, str] | None = None, linked: tuple[int, int] | None = None, **options: Any
    ):
        super().__init__(**options)
        self.users = dict(users or {})
        self.linked = linked
        self.controller_port = 0
        self._log_begins_at = 0

    def install(self) -> None:
        self._java = java_17()
        self._jars = once(f"kafka-{_VERSION}", _fetch_jars)

    def prepare(self) -> None:
        self.controller_port = free_port()
        self._write_properties()
        self.run([*self._program("kafka.tools.StorageTool"), "format", "-t", _CLUSTER, "-c", str(self._properties)])

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def command(self) -> list[str]:
        """The file is written at every start, for ports may have changed."""
        if not self.controller_port or not can_bind(self.controller_port):  # 0: `up` found its data of a former run
            self.controller_port = free_port()
        self._write_properties()
        self._log_begins_at = self.log.stat().st_size
        return [*self._program("kafka.Kafka"), str(self._properties)]

    def _program(self, main: str) -> list[str]:
        jars = os.pathsep.join(str(jar) for jar in sorted(self._jars.glob("*.jar")))
        logging = f"-Dlog4j2.configurationFile=file://{self.folder}/log4j2.yaml"
        folder = f"-Djava.io.tmpdir={self.folder}"
        return [str(self._java / "bin" / "java"), *_JAVA_OPTIONS, logging, folder, "-classpath", jars, main]

    def _write_properties(self) -> None:
        client, controller = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.controller_port}"
        protocol = "SASL_PLAINTEXT" if self.users else "PLAINTEXT"
        settings = _SETTINGS | {
            "listeners": f"CLIENT://{client},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENT://{client}",
            "listener.security.protocol.map": f"CLIENT:{protocol},CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(self.folder / "data"),
        }
        if self.linked is not None:
            port, advertised = self.linked
            settings["listeners"] += f",LINKED://127.0.0.1:{port}"
            settings["advertised.listeners"] += f",LINKED://127.0.0.1:{advertised}"
            settings["listener.security.protocol.map"] += f",LINKED:{protocol}"
        if self.users:
            first, password = next(iter(self.users.items()))
            logins = " ".join(f'user_{user}="{secret}"' for user, secret in self.users.items())
            settings |= {
                "sasl.enabled.mechanisms": "PLAIN",
                "sasl.mechanism.inter.broker.protocol": "PLAIN",
                "listener.name.client.plain.sasl.jaas.config": (
                    "org.apache.kafka.common.security.plain.PlainLoginModule required"
                    f' username="{first}" password="{password}" {logins};'
                ),
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": f"User:{first};User:ANONYMOUS",  # the controller's listener knows no logins
            }
        settings |= self.settings
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (self.folder / "log4j2.yaml").write_text(_LOGGING)

    def is_ready(self) -> bool:
        """It says so when clients may create topics, which is some time after it listens."""
        return listens(self.pid, self.port) and "Kafka Server started" in self._log_from(self._log_begins_at)

    def url(self, database: str = "") -> str:
        """What clients call the bootstrap server. Kafka knows no databases: names of topics tell tests apart."""
        return f"127.0.0.1:{self.port}"


def _fetch_jars(folder: Path) -> None:
    maven_artifact(f"org.apache.kafka:kafka_2.13:{_VERSION}", folder)
    maven_artifact("org.apache.logging.log4j:log4j-slf4j-impl:2.24.3", folder)  # else it logs nothing
