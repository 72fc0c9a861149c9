"""What `duetime doctor` reports about a message broker, and the checks that are the same for all brokers. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from msgspec import Struct

from duetime.brokers.names import is_token
from duetime.domain.instants import format_duration
from duetime.domain.timer import Namespace

__all__ = [
    "BrokerDiagnosis",
    "Concern",
    "NamespaceTimes",
    "check_duplicate_window",
    "check_retention",
    "check_targets",
    "missing",
]

# A command that could not be carried out is delivered again after at most this time.
_RETRY_MAX_MS: Final = 60_000
# What the instance that takes over the shards of a dead one needs until it has fired their timers again.
_TAKE_OVER_MS: Final = 10_000
_NAMED_MAX: Final = 3
_BROKERS: Final = ("kafka", "nats")


class Concern(Struct, frozen=True):
    problem: str
    consequence: str
    advice: str
    is_wrong: bool = False  # else it is a warning


class BrokerDiagnosis(Struct, frozen=True):
    """Each fact is a short phrase."""

    facts: Sequence[str] = ()
    concerns: Sequence[Concern] = ()


class NamespaceTimes(Struct, frozen=True):
    """What is compared with the settings of a broker."""

    name: str
    retention_ms: int  # how long its timers are kept at least when they are over
    publishes_again_ms: int  # the time from an attempt without an acknowledgement to the end of the next one, at most
    target: str | None = None  # the default target of its timers

    @classmethod
    def of(cls, namespace: Namespace) -> NamespaceTimes:
        return cls(
            namespace.name,
            min(namespace.delivered_retention_ms, namespace.failed_retention_ms),
            2_000 * namespace.callback_timeout_seconds + namespace.retry_policy.initial_interval_ms,
            namespace.callback_url,
        )


def missing(what: str, advice: str, *, is_created: bool) -> Concern:
    """`advice`: how to create it by hand."""
    if is_created:
        return Concern(f"{what} does not exist yet", "", "the first `duetime serve` creates it")
    return Concern(f"{what} does not exist", "`duetime serve` cannot start", advice, is_wrong=True)


def check_targets(namespaces: Sequence[NamespaceTimes], schemes: Collection[str]) -> Iterator[Concern]:
    """`schemes`: those for which the configuration has a section. A namespace keeps its default target when a broker is
    removed from the configuration."""
    unserved: defaultdict[str, list[NamespaceTimes]] = defaultdict(list)
    for namespace in namespaces:
        scheme = (namespace.target or "").partition(":")[0].lower()
        if scheme and scheme not in schemes:
            unserved[scheme].append(namespace)
    for scheme, some in sorted(unserved.items()):
        section = f"[{scheme}]" if scheme in _BROKERS else "section"
        yield Concern(
            f"the default target of {_names(some)} is {scheme}:…, and the configuration has no {section} for it",
            "their commands become dead letters, creates without a target of their own are refused, and pending timers "
            "with such a target fail",
            f"configure it, or change the target: `duetime namespace update {shlex.quote(some[0].name)} --to URL` "
            "(timers that are pending keep the one with which they were created)",
            is_wrong=True,
        )


def check_retention(
    where: str,
    kept_ms: int | None,
    redelivery_ms: int,
    namespaces: Sequence[NamespaceTimes],
    *,
    advice: str = "give commands a maximum age that is some minutes shorter",
) -> Iterator[Concern]:
    """`kept_ms`: how long commands stay in the stream or topic; None: for ever. A command that comes again after the
    row of its timer was purged creates the timer once more. `namespaces` that cannot be a tenant do not count."""
    tenants = [namespace for namespace in namespaces if is_token(namespace.name)]
    if kept_ms is None:
        short, kept = tenants, "for ever"
    else:
        longest_ms = kept_ms + redelivery_ms + _RETRY_MAX_MS
        short = [namespace for namespace in tenants if namespace.retention_ms <= longest_ms]
        kept = f"for {format_duration(kept_ms)}"
    if short:
        shortest_ms = min(namespace.retention_ms for namespace in short)
        yield Concern(
            f"commands stay {kept} in {where}, but timers that are over only for {format_duration(shortest_ms)} in "
            f"{_names(short)}",
            "if a command is delivered again after that, its timer is created and fires again",
            f"{advice}, or give the namespaces a longer retention: "
            "`duetime namespace update NAME --keep-delivered` and `--keep-failed`",
        )


def check_duplicate_window(
    where: str, window_ms: int, dead_after_ms: int, namespaces: Sequence[NamespaceTimes]
) -> Iterator[Concern]:
    """An event that was stored, but not acknowledged, is published again; the stream drops it within the window."""
    after_crash_ms = dead_after_ms + _TAKE_OVER_MS
    slow = [namespace for namespace in namespaces if namespace.publishes_again_ms > window_ms]
    if not slow and after_crash_ms <= window_ms:
        return
    reason = (
        f"the next attempt in {_names(slow)} may end up to "
        f"{format_duration(max(namespace.publishes_again_ms for namespace in slow))} later"
        if slow
        else f"after a crash another instance publishes up to {format_duration(after_crash_ms)} later"
    )
    yield Concern(
        f"{where} drops repeated events within {format_duration(window_ms)} only, but {reason}",
        "subscribers may get such an event twice, with the same id",
        "give the stream a longer duplicate window, or let subscribers ignore ids that they have seen",
    )


def _names(namespaces: Sequence[NamespaceTimes]) -> str:
    named = ", ".join(repr(namespace.name) for namespace in namespaces[:_NAMED_MAX])
    more = len(namespaces) - _NAMED_MAX
    return f"{named} and {more} more namespaces" if more > 0 else named
