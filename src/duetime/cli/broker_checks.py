"""The part of `doctor` for message brokers: connects to each that is configured, as an instance would, and reads what
is there. It needs no server of Duetime, and creates nothing."""

from __future__ import annotations

import asyncio
from argparse import Namespace as Arguments
from collections.abc import Sequence
from pathlib import Path

from duetime.brokers.diagnosis import BrokerDiagnosis, Concern, NamespaceTimes, check_targets
from duetime.cli.client_options import open_client
from duetime.cli.diagnosis import GOOD, NOTE, WRONG, Finding
from duetime.client import DuetimeError, Namespace
from duetime.config import Config
from duetime.domain.instants import parse_duration
from duetime.domain.timer import Namespace as StoredNamespace
from duetime.engine.namespaces import DEFAULT_NAMESPACE
from duetime.store import open_store
from duetime.telemetry import log

__all__ = ["check_brokers"]

_SECONDS_MAX = 30.0
_HTTP = ("http", "https")


async def check_brokers(arguments: Arguments, config: Config, *, has_server: bool) -> list[Finding]:
    """`has_server`: a server of Duetime answers, and is asked for the namespaces. Otherwise the store is."""
    names = [name for name, used in (("nats", config.nats.url), ("kafka", config.kafka.servers)) if used]
    was_silent, log.disabled = log.disabled, True  # what a store or a connection logs is reported as findings
    try:
        namespaces = await (_served_namespaces(arguments) if has_server else _stored_namespaces(config))
        findings = [finding for name in names for finding in await _check(name, config, namespaces or ())]
        findings += [_finding("targets", concern) for concern in check_targets(namespaces or (), {*_HTTP, *names})]
    finally:
        log.disabled = was_silent
    if namespaces is None and names:
        says = "the namespaces cannot be read, so their settings are not compared with those of the brokers"
        findings.append(Finding("brokers", NOTE, says))
    return findings


async def _check(name: str, config: Config, namespaces: Sequence[NamespaceTimes]) -> list[Finding]:
    try:
        async with asyncio.timeout(_SECONDS_MAX):
            diagnosis = await _diagnose(name, config, namespaces)
    except ImportError as error:
        return [_unusable(name, f'the package {error.name} is missing: pip install "duetime[{name}]"')]
    except TimeoutError:
        return [_unusable(name, f"no answer within {_SECONDS_MAX:g} s")]
    except DuetimeError as error:
        return [_unusable(name, error.detail.removeprefix(f"{name}: "))]
    return [
        *(_finding(name, concern) for concern in diagnosis.concerns),
        Finding(name, GOOD, "; ".join(diagnosis.facts)),
    ]


async def _diagnose(name: str, config: Config, namespaces: Sequence[NamespaceTimes]) -> BrokerDiagnosis:
    # The adapters are imported only if they are used: they need packages that are not always installed.
    if name == "nats":
        from duetime.brokers.nats_diagnosis import diagnose_nats

        return await diagnose_nats(config.nats, config.engine.dead_after.ms, namespaces)
    from duetime.brokers.kafka_diagnosis import diagnose_kafka

    return await diagnose_kafka(config.kafka, namespaces)


def _unusable(name: str, reason: str) -> Finding:
    return Finding(
        name,
        WRONG,
        reason,
        f"commands of {name} are not received, and timers with a target {name}:… wait",
        f"start or repair the broker, or correct [{name}] of the configuration",
    )


def _finding(name: str, concern: Concern) -> Finding:
    verdict = WRONG if concern.is_wrong else NOTE
    return Finding(name, verdict, concern.problem, concern.consequence, concern.advice)


# --- the namespaces ------------------------------------------------------------------------------


async def _served_namespaces(arguments: Arguments) -> list[NamespaceTimes] | None:
    try:
        async with open_client(arguments) as client:
            return [_times(namespace) for namespace in await client.namespaces.list()]
    except DuetimeError:
        return None


def _times(namespace: Namespace) -> NamespaceTimes:
    retention_ms = min(parse_duration(namespace.delivered_retention), parse_duration(namespace.failed_retention))
    first_pause_ms = parse_duration(namespace.retry_policy.initial_interval)
    return NamespaceTimes(
        namespace.namespace,
        retention_ms,
        2_000 * namespace.callback_timeout_seconds + first_pause_ms,
        namespace.callback_url,
    )


async def _stored_namespaces(config: Config) -> list[NamespaceTimes] | None:
    url = config.store.url
    try:
        if url.startswith("sqlite:"):
            from duetime.stores.sqlite.connection import holder, path_of

            if holder(url):
                return None
            if not _exists(path_of(url)):  # it must not be created here; the first start makes one namespace
                return [NamespaceTimes.of(StoredNamespace(name=DEFAULT_NAMESPACE, num_shards=1, created_at_ms=0))]
        store = open_store(url)
        try:
            await store.open()
            return [NamespaceTimes.of(namespace) for namespace in await store.namespaces() if not namespace.deleted]
        finally:
            await store.close()
    except DuetimeError:  # another check reports it
        return None


def _exists(path: str) -> bool:
    return Path(path).exists()
