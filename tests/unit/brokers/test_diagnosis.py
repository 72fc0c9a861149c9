"""What the doctor compares: the age of commands with the retention, and the duplicate window with the next attempt."""

from __future__ import annotations

import pytest

from duetime.brokers.diagnosis import NamespaceTimes, check_duplicate_window, check_retention, check_targets, missing
from duetime.cli.arguments import build_parser
from duetime.domain.timer import Namespace, RetryPolicy

DAY, HOUR, MINUTE, SECOND = 86_400_000, 3_600_000, 60_000, 1_000


def times(name: str = "shop", retention_ms: int = DAY, publishes_again_ms: int = 21 * SECOND) -> NamespaceTimes:
    return NamespaceTimes(name, retention_ms, publishes_again_ms)


def test_the_times_of_a_namespace_are_the_shortest_retention_and_the_latest_end_of_a_second_attempt() -> None:
    policy = RetryPolicy(initial_interval_ms=3 * SECOND)
    namespace = Namespace(
        name="shop",
        num_shards=4,
        callback_url="nats:timers.events.shop",
        created_at_ms=0,
        callback_timeout_seconds=5,
        retry_policy=policy,
        delivered_retention_ms=2 * DAY,
        failed_retention_ms=HOUR,
    )
    assert NamespaceTimes.of(namespace) == NamespaceTimes("shop", HOUR, 13 * SECOND, "nats:timers.events.shop")


# --- retention -----------------------------------------------------------------------------------

ACK_WAIT = 30 * SECOND
LONGEST = DAY - ACK_WAIT - MINUTE  # of commands, with a retention of a day: ACK_WAIT and a retry come on top


@pytest.mark.parametrize("kept_ms", [HOUR, LONGEST - 1])
def test_commands_that_leave_the_stream_before_their_timers_are_purged_are_good(kept_ms: int) -> None:
    assert list(check_retention("the stream 'S'", kept_ms, ACK_WAIT, [times()])) == []


@pytest.mark.parametrize(
    ("kept_ms", "says"),
    [
        (LONGEST, "commands stay for 86310s in the stream 'S', but timers that are over only for 1d in 'shop'"),
        (7 * DAY, "commands stay for 7d in the stream 'S', but timers that are over only for 1d in 'shop'"),
        (None, "commands stay for ever in the stream 'S', but timers that are over only for 1d in 'shop'"),
    ],
)
def test_commands_that_may_come_after_their_timer_was_purged_are_a_warning(kept_ms: int | None, says: str) -> None:
    (concern,) = check_retention("the stream 'S'", kept_ms, ACK_WAIT, [times()])
    assert (concern.problem, concern.is_wrong) == (says, False)
    assert "fires again" in concern.consequence
    command, option = concern.advice.split("`")[1::2]
    build_parser().parse_args([*command.split()[1:], "9d", option, "9d"])  # it exits if there is no such option


def test_only_namespaces_with_a_short_retention_that_can_be_tenants_are_named() -> None:
    namespaces = [times("long", 8 * DAY), times("a", HOUR), times("not.a.tenant", 1), times("b")]
    (concern,) = check_retention("the stream 'S'", 7 * DAY, ACK_WAIT, namespaces)
    assert concern.problem.endswith("only for 1h in 'a', 'b'")
    assert list(check_retention("the stream 'S'", None, ACK_WAIT, [times("not.a.tenant")])) == []


def test_of_many_namespaces_a_few_are_named() -> None:
    (concern,) = check_retention("the stream 'S'", None, ACK_WAIT, [times(f"n{number}") for number in range(40)])
    assert concern.problem.endswith("in 'n0', 'n1', 'n2' and 37 more namespaces")


# --- targets -------------------------------------------------------------------------------------


def test_namespaces_whose_default_target_no_section_serves_are_wrong() -> None:
    def to(name: str, target: str | None) -> NamespaceTimes:
        return NamespaceTimes(name, DAY, 0, target)

    namespaces = [
        to("none", None),
        to("web", "HTTPS://a.test"),
        to("a", "nats:e.a"),
        to("b", "kafka:e"),
        to("c", "nats:e"),
    ]
    assert list(check_targets(namespaces, {"http", "https", "nats", "kafka"})) == []
    (concern,) = check_targets(namespaces, {"http", "https", "kafka"})
    assert concern.problem == ("the default target of 'a', 'c' is nats:…, and the configuration has no [nats] for it")
    assert concern.is_wrong
    command = concern.advice.split("`")[1]
    build_parser().parse_args(command.split()[1:])


# --- the duplicate window -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window_ms", "again_ms", "dead_after_ms", "says"),
    [
        (2 * MINUTE, 21 * SECOND, 3_500, None),
        (30 * SECOND, 30 * SECOND, 20 * SECOND, None),
        (30 * SECOND, 30 * SECOND + 1, 0, "but the next attempt in 'shop' may end up to 30001ms later"),
        (30 * SECOND, 0, 20 * SECOND + 1, "but after a crash another instance publishes up to 30001ms later"),
    ],
)
def test_a_window_that_ends_before_an_event_is_published_again_is_a_warning(
    window_ms: int, again_ms: int, dead_after_ms: int, says: str | None
) -> None:
    concerns = list(check_duplicate_window("the stream 'E'", window_ms, dead_after_ms, [times("shop", DAY, again_ms)]))
    assert [concern.problem.partition(" only, ")[2] for concern in concerns] == ([] if says is None else [says])
    assert not any(concern.is_wrong for concern in concerns)


def test_what_is_missing_is_wrong_only_if_the_server_does_not_create_it() -> None:
    created, by_hand = (missing("the stream 'S'", "nats stream add S", is_created=flag) for flag in (True, False))
    assert (created.is_wrong, created.advice) == (False, "the first `duetime serve` creates it")
    assert (by_hand.is_wrong, by_hand.advice) == (True, "nats stream add S")
