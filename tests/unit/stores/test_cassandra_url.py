"""What a Cassandra URL may say, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from duetime.errors import SetupError
from duetime.stores.cassandra.address import Address, address_of
from duetime.stores.cassandra.schema import is_new_enough


def test_hosts_ports_user_password_and_keyspace_are_read() -> None:
    assert address_of("cassandra://me:p%40ss%3A@one,two:9142/timers") == Address(
        hosts=(("one", 9142), ("two", 9142)),
        keyspace="timers",
        label="one,two:9142/timers",
        user="me",
        password="p@ss:",
    )


@pytest.mark.parametrize(
    ("positions", "hosts"),
    [
        ("one", [("one", 9042)]),
        ("one:1,two:2", [("one", 1), ("two", 2)]),
        ("one:1,two", [("one", 1), ("two", 9042)]),
        ("[::1]:7,10.0.0.1", [("::1", 7), ("10.0.0.1", 9042)]),
    ],
)
def test_a_port_after_the_last_host_is_that_of_all_that_have_none(positions: str, hosts: list[tuple[str, int]]) -> None:
    assert list(address_of(f"cassandra://{positions}/k").hosts) == hosts


def test_the_options_are_known_by_name() -> None:
    address = address_of("cassandra://h/k?consistency=local_quorum&datacenter=dc1&replication=3&sslmode=require")
    assert (address.consistency, address.datacenter, address.replication) == ("local_quorum", "dc1", 3)
    assert address.sslmode == "require"
    assert address_of("cassandra://h/k").sslmode == "disable"
    assert address_of("cassandra://h/k?sslrootcert=ca.pem").sslmode == "verify-full"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("cassandra://h/k?replicas=3", r"unknown option 'replicas'; allowed are consistency, datacenter, replica"),
        ("cassandra://h/", "names no keyspace"),
        ("cassandra://h", "names no keyspace"),
        ("cassandra://h/a-b", "names no keyspace"),
        ("cassandra:///k", "names no host"),
        ("cassandra://h:x/k", "names no host"),
        ("cassandra://,h/k", "names no host"),
        ("cassandra://me:a@b@h/k", "%40"),
        ("cassandra://me:a#b@h/k", "%23"),
        ("cassandra://h/k?consistency=one", "has consistency=one; allowed are quorum, local_quorum"),
        ("cassandra://h/k?consistency=local_quorum", "without a datacenter"),
        ("cassandra://h/k?sslmode=prefer", "has sslmode=prefer; allowed are disable"),
        ("cassandra://h/k?replication=0", "has replication=0"),
        ("cassandra://h/k?replication=dc1:3", "has replication=dc1:3"),
        ("cassandra://h/k?replication", "cannot be read"),
    ],
)
def test_an_error_says_what_is_wrong_with_the_url(url: str, expected: str) -> None:
    with pytest.raises(SetupError, match=expected) as error:
        address_of(url)
    assert error.value.field == "store.url"


def test_a_password_is_in_no_label() -> None:
    assert "secret" not in address_of("cassandra://me:secret@h/k").label


@pytest.mark.parametrize(
    ("version", "new_enough"),
    [("5.0.9", True), ("4.0", True), ("4.1-SNAPSHOT", True), ("10.1", True), ("3.11.17", False), ("odd", False)],
)
def test_servers_before_4_0_are_too_old(version: str, new_enough: bool) -> None:
    assert is_new_enough(version) == new_enough
