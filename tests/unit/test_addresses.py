"""Addresses as text: to listen on, to advertise, and those of this machine."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from duetime.addresses import is_loopback, own_address, split_listen, worker_listen
from duetime.config import Config, load_config
from duetime.errors import SetupError
from duetime.telemetry import log


def configured(**flags: Any) -> Config:
    return load_config(environ={}, flags={path.replace("__", "."): value for path, value in flags.items()})


def own(config: Config, port: int, **options: Any) -> str:
    return own_address(config.server.listen, config.cluster.advertise, port, **options)


def test_workers_have_ports_one_after_the_other_or_any_free_one() -> None:
    assert [worker_listen("10.0.0.1:80", 7000, number) for number in (1, 2)] == ["10.0.0.1:7000", "10.0.0.1:7001"]
    assert worker_listen("[::1]:80", 0, 2) == "[::1]:0"


# --- addresses to listen on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("127.0.0.1:65535", ("127.0.0.1", 65_535)),
        ("[::1]:8463", ("::1", 8_463)),
        ("duetime.example:80", ("duetime.example", 80)),
    ],
)
def test_an_address_to_listen_on_is_split(listen: str, found: tuple[str, int]) -> None:
    assert split_listen(listen) == found


@pytest.mark.parametrize("listen", ["", ":", ":80", "host", "host:", "host:http", "host:-1", "host:65536", "host:８０"])
def test_an_address_that_cannot_be_listened_on_is_refused(listen: str) -> None:
    with pytest.raises(SetupError, match=r"server\.listen must be"):
        split_listen(listen)


def test_loopback_is_recognised_in_any_case() -> None:
    assert is_loopback("LocalHost:80")
    assert not is_loopback("localhost.example:80")


@pytest.mark.parametrize("listen", ["", "8463", ":8463", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(SetupError, match=r"server\.listen"):
        split_listen(listen)


# --- the address that an instance advertises -----------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "advertised"),
    [
        ("127.0.0.1:8463", "127.0.0.1:9000"),
        ("10.1.2.3:0", "10.1.2.3:9000"),
        ("node-1.internal:8463", "node-1.internal:9000"),
        ("[fd00::5]:8463", "[fd00::5]:9000"),
    ],
)
def test_a_listener_with_a_host_advertises_that_host_and_the_bound_port(listen: str, advertised: str) -> None:
    assert own(configured(server__listen=listen), 9000) == advertised


def test_a_listener_on_all_addresses_advertises_the_address_this_machine_sends_from() -> None:
    config = configured(server__listen="0.0.0.0:8463")
    assert own(config, 9000, sources=[lambda _: "10.0.0.5", lambda _: "10.0.0.6"]) == "10.0.0.5:9000"
    in_six = configured(server__listen="[::]:8463")
    assert own(in_six, 9000, sources=[lambda _: "fd00::5"]) == "[fd00::5]:9000"


def test_without_a_route_the_address_of_the_host_name_is_advertised() -> None:
    def no_route(_: socket.AddressFamily) -> str:
        raise OSError("Network is unreachable")

    config = configured(server__listen="0.0.0.0:8463")
    assert own(config, 9000, sources=[no_route, lambda _: "10.0.0.6"]) == "10.0.0.6:9000"


def test_without_any_address_loopback_is_advertised_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [lambda _: "127.0.1.1", lambda _: "169.254.3.3", lambda _: "0.0.0.0"]
    caplog.set_level("WARNING", "duetime")
    monkeypatch.setattr(log, "propagate", True)
    assert own(configured(server__listen="0.0.0.0:8463"), 9000, sources=sources) == "127.0.0.1:9000"
    assert own(configured(server__listen="[::]:8463"), 9000, sources=[]) == "[::1]:9000"
    assert caplog.text.count("set cluster.advertise") == 2


def test_the_address_found_for_this_machine_is_one_of_its_own() -> None:
    address = own(configured(server__listen="0.0.0.0:8463"), 9000)
    with socket.socket() as probe:
        probe.bind((address.rpartition(":")[0], 0))


@pytest.mark.parametrize(
    ("advertise", "advertised"),
    [
        ("shop.example:80", "shop.example:80"),
        ("10.0.0.5", "10.0.0.5:9000"),
        ("[fd00::5]:80", "[fd00::5]:80"),
        ("[fd00::5]", "[fd00::5]:9000"),
        ("fd00::5", "[fd00::5]:9000"),
    ],
)
def test_cluster_advertise_is_used_and_a_host_without_a_port_gets_the_bound_port(
    advertise: str, advertised: str
) -> None:
    config = configured(server__listen="0.0.0.0:8463", cluster__advertise=advertise)
    assert own(config, 9000) == advertised


def test_the_ports_of_workers_follow_the_one_that_is_advertised() -> None:
    config = configured(server__workers=3, cluster__worker_ports=7000, cluster__advertise="shop.example:80")
    assert [own(config, 7000, worker=number) for number in (1, 2, 3)] == [
        "shop.example:80",
        "shop.example:81",
        "shop.example:82",
    ]
