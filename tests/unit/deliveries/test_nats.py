"""Targets `nats:SUBJECT`: which ones a timer may have, and with which headers. No server is needed for that."""

from __future__ import annotations

import re

import pytest

from duetime.brokers.nats import NatsConnection
from duetime.clock import SystemClock
from duetime.config import Nats, load_config
from duetime.deliveries.nats import NatsDeliverer
from duetime.errors import SetupError
from duetime.telemetry import Telemetry


def settings(**fields: object) -> Nats:
    given = {"url": "nats://127.0.0.1:1", **fields}
    return load_config(environ={}, flags={f"nats.{name}": value for name, value in given.items()}).nats


def deliverer(**fields: object) -> NatsDeliverer:
    config = settings(**fields)
    return NatsDeliverer(config, NatsConnection(config), SystemClock(), Telemetry())


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("", "tokens of visible ASCII"),
        (".a", "tokens of visible ASCII"),
        ("a.", "tokens of visible ASCII"),
        ("a..b", "tokens of visible ASCII"),
        ("a.*", "without * and >"),
        ("a.>", "without * and >"),
        ("a b", "tokens of visible ASCII"),
        ("a\r\nPUB x 0", "tokens of visible ASCII"),
        ("a\0b", "tokens of visible ASCII"),
        ("ä", "tokens of visible ASCII"),
        ("a" * 256, "at most 255 bytes"),
        ("$JS.API.STREAM.DELETE.TIMER_EVENTS", "reserved for NATS"),
        ("_INBOX.abc", "reserved for NATS"),
        ("timers.commands.orders", "commands or dead letters"),
        ("timers.dead.orders", "commands or dead letters"),
    ],
)
def test_a_subject_that_no_timer_may_have(subject: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        deliverer(allow_subjects=[">"]).check(f"nats:{subject}", "orders")


@pytest.mark.parametrize("subject", ["a", "a.b-c_d.e/f", "timers.commands", "a" * 255])
def test_a_subject_that_is_allowed(subject: str) -> None:
    deliverer(allow_subjects=[">"]).check(f"nats:{subject}", "orders")


def test_a_namespace_has_only_its_own_subjects() -> None:
    nats = deliverer()
    nats.check("nats:timers.events.orders", "orders")
    for subject in ("timers.events.billing", "timers.events.orders.more", "timers.events", "other"):
        with pytest.raises(ValueError, match=r"nats\.allow_subjects"):
            nats.check(f"nats:{subject}", "orders")


@pytest.mark.parametrize("name", ["Nats-Rollup", "nats-msg-id", "Duetime-Fence", "Status"])
def test_a_header_that_nats_or_duetime_sets(name: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        deliverer().check_headers("nats:timers.events.orders", {name: "all"})


@pytest.mark.parametrize("name", ["a:b", "a b", "a\r\nb", "", "ä"])
def test_a_name_that_is_no_header_name(name: str) -> None:
    with pytest.raises(ValueError, match="header name"):
        deliverer().check_headers("nats:timers.events.orders", {name: "x"})


def test_other_headers_are_allowed() -> None:
    deliverer().check_headers("nats:timers.events.orders", {"x-order": "17"})


def test_all_subjects_are_one_origin() -> None:
    nats = deliverer()
    assert nats.origin("nats:timers.events.a") == nats.origin("nats:timers.events.b") == "nats:"


@pytest.mark.parametrize("url", ["ws://127.0.0.1:4222", "http://127.0.0.1", "nats://", "nats://127.0.0.1:0", " , "])
def test_an_address_that_cannot_be_one_of_nats(url: str) -> None:
    with pytest.raises(SetupError, match=r"nats\.url"):
        NatsConnection(settings(url=url))
