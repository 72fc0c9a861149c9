"""One frozen Config: defaults, then a TOML file, then the environment, then flags.

`config.default.toml` in this folder is the reference: it has every key with its default, and is read at the start, so
it is always correct. Unknown keys and wrong types are errors that name the path. An unknown environment variable is
only a warning: other programs set variables too, such as Kubernetes for a service named duetime.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from duetime.addresses import split_advertise
from duetime.domain.instants import format_duration, parse_duration
from duetime.domain.timer import SHARDS_MAX
from duetime.errors import SetupError
from duetime.printable import redacted_url

__all__ = ["RENAMED", "SECTIONS", "Config", "load_config", "shown"]

# Variables of the command line and the clients, not settings of the server.
_CLIENT_VARIABLES = frozenset({"DUETIME_URL", "DUETIME_TOKEN", "DUETIME_CONFIG"})

# Kubernetes sets these for each service of its namespace that is named duetime or duetime-something. The pattern is for
# NAME=VALUE, because a variable like DUETIME_PORT=8463 is not from Kubernetes but a mistake, which gets a warning.
_KUBERNETES_ADDRESS = r"(?:tcp|udp|sctp)://\S+"
_KUBERNETES_VARIABLES = re.compile(
    r"DUETIME_(?:[A-Z0-9_]+_)?(?:"
    r"SERVICE_HOST=[0-9A-Fa-f.:]+"
    r"|SERVICE_PORT(?:_[A-Z0-9_]+)?=\d+"
    rf"|PORT={_KUBERNETES_ADDRESS}"
    rf"|PORT_\d+_(?:TCP|UDP|SCTP)(?:={_KUBERNETES_ADDRESS}|_PROTO=(?:tcp|udp|sctp)|_PORT=\d+|_ADDR=[0-9A-Fa-f.:]+)"
    r")"
)


# Settings of earlier versions.
RENAMED = {
    "delivery.concurrency_per_destination": "delivery.concurrency_per_flow",
    "delivery.rate_per_destination": "delivery.rate_per_flow",
}


class Duration:
    """A duration as a setting: written "90s", used as `.ms`."""

    __slots__ = ("ms",)

    def __init__(self, ms: int) -> None:
        self.ms = ms

    @property
    def seconds(self) -> float:
        return self.ms / 1_000

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and self.ms == other.ms

    def __hash__(self) -> int:
        return hash(self.ms)

    def __repr__(self) -> str:
        return f"Duration({format_duration(self.ms)})"


AtLeast1 = Annotated[int, Meta(ge=1)]
AtLeast0 = Annotated[int, Meta(ge=0)]


class Server(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    listen: str
    allowed_hosts: tuple[str, ...]
    workers: AtLeast1
    request_bytes_max: AtLeast1
    connections_max: AtLeast1
    connections_per_address_max: AtLeast0
    buffered_bytes_max: AtLeast1
    tls_certificate: str
    tls_key: str
    idle_timeout: Duration
    drain_timeout: Duration


class Cluster(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    advertise: str
    worker_ports: Annotated[int, Meta(ge=0, le=65_535)]
    ca_file: str


class StoreConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str


class Namespaces(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    default_num_shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)]
    create_on_first_use: bool


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    heartbeat_interval: Duration
    lease: Duration
    dead_after: Duration
    look_ahead: Duration
    timers_in_memory_max: Annotated[int, Meta(ge=1_000)]
    writes_waiting_max: AtLeast1
    write_bytes_waiting_max: AtLeast1
    write_timeout: Duration
    clock_skew_max: Duration


class Delivery(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    concurrency_per_flow: AtLeast1
    concurrency_per_origin: AtLeast1
    concurrency_max: AtLeast1
    rate_per_flow: AtLeast0
    connect_timeout: Duration
    breaker_failures: AtLeast1
    breaker_pause: Duration
    breaker_pause_max: Duration
    rearm_interval_min: Duration
    allow_networks: tuple[str, ...]
    allow_http: bool
    ca_file: str
    user_agent: str


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    payload_bytes_max: AtLeast1
    json_depth_max: AtLeast1
    batch_timers_max: AtLeast1
    page_timers_max: AtLeast1
    page_bytes_max: AtLeast1
    creates_per_second: AtLeast0
    requests_per_second: AtLeast0


class Token(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    sha256: str
    namespaces: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()


class Auth(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tokens: tuple[Token, ...]


class Nats(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str
    credentials: str
    user: str
    password: str
    token: str
    ca_file: str
    tls_certificate: str
    tls_key: str
    command_subject: str
    stream: str
    consumer: str
    target: str
    dead_letter_subject: str
    allow_subjects: tuple[str, ...]
    create_streams: bool
    create_tenants: bool
    tenants_max: AtLeast1
    in_flight_max: AtLeast1
    in_flight_bytes_max: AtLeast1
    ack_wait: Duration
    duplicate_window: Duration


class Kafka(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    servers: tuple[str, ...]
    tls: bool
    ca_file: str
    tls_certificate: str
    tls_key: str
    sasl_mechanism: str
    user: str
    password: str
    command_topic: str
    group: str
    target: str
    dead_letter_topic: str
    allow_topics: tuple[str, ...]
    create_topics: bool
    create_tenants: bool
    tenants_max: AtLeast1
    in_flight_max: AtLeast1
    in_flight_bytes_max: AtLeast1


class Log(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: str
    format: str


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    server: Server
    store: StoreConfig
    cluster: Cluster
    namespaces: Namespaces
    engine: EngineConfig
    delivery: Delivery
    limits: Limits
    auth: Auth
    nats: Nats
    kafka: Kafka
    log: Log
    warnings: tuple[str, ...] = ()  # found while loading; logged after logging is set up


_SECRETS = frozenset({"password", "token"})  # names of settings that `config show` does not print

SECTIONS = tuple(field for field in Config.__struct_fields__ if field != "warnings")


def load_config(
    file: str | Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The effective configuration. `flags` maps paths to values: {"store.url": "memory://"}."""
    text = files("duetime").joinpath("config.default.toml").read_text("utf-8")
    settings: dict[str, Any] = tomllib.loads(text)
    if file is not None:
        _merge(settings, _read_file(Path(file)), str(file))
    changes, warnings = _from_environment(settings, environ)
    _merge(settings, changes, "the environment")
    for path, value in (flags or {}).items():
        section, _, key = path.partition(".")
        _merge(settings, {section: {key: value}}, "flags")
    _read_indirect(settings, environ)
    try:
        config = msgspec.convert(settings, Config, dec_hook=_duration)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise SetupError(f"configuration: {path.rstrip('`') or 'top level'}: {message}") from None
    _check(config)
    return msgspec.structs.replace(config, warnings=warnings)


def shown(config: Config) -> str:
    """The configuration as TOML, with secrets redacted. If it has no secrets, the text loads to the same Config."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        part = getattr(config, section)
        lines.extend(f"{key} = {_toml(_redacted(key, getattr(part, key)))}" for key in part.__struct_fields__)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _redacted(key: str, value: Any) -> Any:
    if key in _SECRETS and value:
        return "***"
    return redacted_url(value) if key == "url" else value


def _toml(value: Any) -> str:
    if isinstance(value, Duration):
        return f'"{format_duration(value.ms)}"'
    if isinstance(value, Token):
        listed = ", ".join(f"{key} = {_toml(getattr(value, key))}" for key in ("name", "namespaces", "verbs"))
        return f'{{ {listed}, sha256 = "***" }}'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON of these values is valid TOML, except for characters that JSON does not escape.
    text = msgspec.json.encode(value).decode()
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SetupError(f"configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"configuration file {path}: {error}") from None


def _merge(settings: dict[str, Any], changes: dict[str, Any], source: str) -> None:
    for section, keys in changes.items():
        if section not in settings:
            raise SetupError(f"{source}: unknown section [{section}]; the sections are {', '.join(settings)}")
        if not isinstance(keys, dict):
            raise SetupError(f"{source}: {section} must be a section, written [{section}]")
        for key, value in keys.items():
            if key not in settings[section]:
                if f"{section}.{key}" in RENAMED:
                    raise SetupError(f"{source}: {section}.{key} is now named {RENAMED[f'{section}.{key}']}")
                raise SetupError(f"{source}: unknown key {section}.{key}; the keys are {', '.join(settings[section])}")
            settings[section][key] = value


def _from_environment(settings: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings in the environment, and a warning for each variable that looks like a setting but is not one."""
    paths = {_variable(f"{s}.{k}"): (s, k) for s, keys in settings.items() for k in keys}
    renamed = {_variable(old): new for old, new in RENAMED.items()}
    changes: dict[str, Any] = {}
    warnings: list[str] = []
    for name, text in environ.items():
        if not name.startswith("DUETIME_") or name in _CLIENT_VARIABLES:
            continue
        if name in paths:
            section, key = paths[name]
            changes.setdefault(section, {})[key] = _typed(name, text, settings[section][key])
        elif name in renamed:
            raise SetupError(f"the environment: {name} is now named {_variable(renamed[name])}")
        elif _KUBERNETES_VARIABLES.fullmatch(f"{name}={text}") is None:
            warnings.append(_unknown_variable(name, [*paths, *_CLIENT_VARIABLES]))
    return changes, tuple(warnings)


def _variable(path: str) -> str:
    return f"DUETIME_{path.replace('.', '_')}".upper()


def _unknown_variable(name: str, known: list[str]) -> str:
    """The value is left out: it may be a secret."""
    # Compared without the common prefix, which would make any two names similar.
    endings = [other.removeprefix("DUETIME_") for other in known]
    nearest = difflib.get_close_matches(name.removeprefix("DUETIME_"), endings, n=1)
    hint = f"did you mean DUETIME_{nearest[0]}?" if nearest else "`duetime config show --env` lists all variables"
    return f"unknown environment variable {name} is ignored: {hint}"


def _typed(name: str, text: str, default: Any) -> Any:
    """The value of an environment variable, in the type of its default. Lists and tables are written as JSON."""
    if isinstance(default, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        raise SetupError(f"the environment: {name} must be {type(default).__name__}, got {text!r}") from None


def _read_indirect(value: Any, environ: Mapping[str, str]) -> Any:
    """Replaces "file:/path" by the content of the file and "env:NAME" by the variable, in all values."""
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _read_indirect(item, environ)
    elif isinstance(value, list):
        return [_read_indirect(item, environ) for item in value]
    elif isinstance(value, str) and value.startswith("file:"):
        try:
            return Path(value.removeprefix("file:")).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"configuration: {value}: {getattr(error, 'strerror', error)}") from None
    elif isinstance(value, str) and value.startswith("env:"):
        name = value.removeprefix("env:")
        if name not in environ:
            raise SetupError(f"configuration: {value}: the environment variable is not set")
        return environ[name]
    return value


def _duration(kind: type, value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError('must be a duration in quotes, such as "90s"')
    return Duration(parse_duration(value))


def _check(config: Config) -> None:
    engine, delivery = config.engine, config.delivery
    positive = {
        "server.idle_timeout": config.server.idle_timeout,
        "engine.heartbeat_interval": engine.heartbeat_interval,
        "engine.look_ahead": engine.look_ahead,
        "engine.write_timeout": engine.write_timeout,
        "delivery.connect_timeout": delivery.connect_timeout,
        "delivery.breaker_pause": delivery.breaker_pause,
    }
    wrong: list[tuple[bool, str]] = [
        *((duration.ms == 0, f"{path}: more than 0") for path, duration in positive.items()),
        (
            config.server.buffered_bytes_max < config.server.request_bytes_max,
            "server.buffered_bytes_max: at least request_bytes_max",
        ),
        (
            bool(config.server.tls_certificate) != bool(config.server.tls_key),
            "server.tls_certificate: set together with tls_key, or both empty",
        ),
        (engine.heartbeat_interval.ms * 2 >= engine.lease.ms, "engine.lease: more than two heartbeat_intervals"),
        (engine.dead_after.ms <= engine.lease.ms, "engine.dead_after: more than the lease"),
        (
            delivery.breaker_pause_max.ms < delivery.breaker_pause.ms,
            "delivery.breaker_pause_max: at least breaker_pause",
        ),
        *_wrong_brokers(config),
        (config.log.level not in ("debug", "info", "warning", "error"), "log.level: debug, info, warning or error"),
        (config.log.format not in ("text", "json"), "log.format: text or json"),
    ]
    for is_wrong, must_be in wrong:
        if is_wrong:
            path, _, rule = must_be.partition(": ")
            raise SetupError(f"configuration: {path} must be {rule}")
    _check_cluster(config)
    for token in config.auth.tokens:
        unknown = set(token.verbs) - {"read", "write", "admin"}
        if unknown:
            raise SetupError(f"configuration: auth.tokens: {token.name}: unknown verbs {', '.join(sorted(unknown))}")
        if re.fullmatch("[0-9a-fA-F]{64}", token.sha256) is None:
            raise SetupError(f"configuration: auth.tokens: {token.name}: sha256 must be 64 hex digits")


def _wrong_brokers(config: Config) -> list[tuple[bool, str]]:
    nats, kafka = config.nats, config.kafka
    return [
        ("@" in nats.url, "nats.url: without a login; use nats.user and nats.password, or nats.token"),
        (nats.ack_wait.ms < 1_000, "nats.ack_wait: at least 1s"),
        (nats.duplicate_window.ms < 100, "nats.duplicate_window: at least 100ms, which is NATS' own minimum"),
        (bool(nats.user) != bool(nats.password), "nats.password: set together with user, or both empty"),
        (
            sum(map(bool, (nats.credentials, nats.user, nats.token))) > 1,
            "nats.credentials: the only login; credentials, user and token exclude each other",
        ),
        (
            bool(nats.tls_certificate) != bool(nats.tls_key),
            "nats.tls_certificate: set together with tls_key, or both empty",
        ),
        (
            kafka.sasl_mechanism not in ("", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
            'kafka.sasl_mechanism: "", PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512',
        ),
        (
            bool(kafka.sasl_mechanism) != bool(kafka.user),
            "kafka.user: set together with sasl_mechanism, or both empty",
        ),
        (bool(kafka.user) != bool(kafka.password), "kafka.password: set together with user, or both empty"),
        (
            bool(kafka.tls_certificate) != bool(kafka.tls_key),
            "kafka.tls_certificate: set together with tls_key, or both empty",
        ),
    ]


def _check_cluster(config: Config) -> None:
    advertise, first, count = config.cluster.advertise, config.cluster.worker_ports, config.server.workers
    port: int | None = None
    if advertise:
        try:
            port = split_advertise(advertise)[1]
        except ValueError:
            raise SetupError(
                f"configuration: cluster.advertise must be host:port or host that other instances can reach, "
                f"not {advertise!r}"
            ) from None
    if count == 1:
        return
    last = first + count - 1
    if last > 65_535:
        raise SetupError(f"configuration: cluster.worker_ports must be at most {65_536 - count} for {count} workers")
    if first and re.search(r":\d{1,5}$", config.server.listen):
        shared = int(config.server.listen.rpartition(":")[2])
        if first <= shared <= last:
            raise SetupError(
                f"configuration: cluster.worker_ports must not include the port of server.listen: "
                f"{first} to {last} includes {shared}"
            )
    if port is not None and not first:
        raise SetupError(
            "configuration: cluster.advertise must be a host without a port if several workers use free ports; "
            "otherwise set cluster.worker_ports"
        )
    if port is not None and port + count - 1 > 65_535:
        raise SetupError(
            f"configuration: cluster.advertise must have a port of at most {65_536 - count} for {count} workers"
        )
