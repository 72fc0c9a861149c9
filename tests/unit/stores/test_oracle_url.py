"""The URL of an Oracle store: what is allowed, and what is rejected."""

from __future__ import annotations

import subprocess
import sys

import oracledb
import pytest

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.oracle.connection import address_of
from duetime.stores.oracle.store import OracleStore


def test_the_scheme_opens_an_oracle_store() -> None:
    store = open_store("oracle://me:secret@host/service")
    assert isinstance(store, OracleStore)
    assert store.capabilities.name == "oracle"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("oracle://me:p%40ss@db.example:1522/FREEPDB1", [("db.example", 1522)]),
        ("oracle://me:x@db.example/FREEPDB1?protocol=tcps", [("db.example", 1521)]),
        ("oracle://me:x@one:1521,two:1522/FREEPDB1", [("one", 1521), ("two", 1522)]),
    ],
)
def test_the_driver_parses_the_address(url: str, hosts: list[tuple[str, int]]) -> None:
    params = oracledb.ConnectParams()
    params.parse_connect_string(address_of(url).dsn)
    found = params.host if isinstance(params.host, list) else [params.host]
    ports = params.port if isinstance(params.port, list) else [params.port]
    assert list(zip(found, ports, strict=True)) == hosts
    assert {*([params.service_name] if isinstance(params.service_name, str) else params.service_name)} == {"FREEPDB1"}


def test_a_sid_replaces_a_service() -> None:
    address = address_of("oracle://me:x@db.example:1522?sid=ORCL&protocol=tcps")
    params = oracledb.ConnectParams()
    params.parse_connect_string(address.dsn)
    assert (params.host, params.port, params.sid, params.protocol) == ("db.example", 1522, "ORCL", "tcps")
    assert address.label == "db.example:1522/ORCL"


def test_names_and_passwords_are_percent_encoded() -> None:
    address = address_of("oracle://me%2Fyou:p%40%23%3A%25@host/service")
    assert (address.user, address.password) == ("me/you", "p@#:%")


def test_options_reach_the_driver_and_our_own_do_not() -> None:
    address = address_of(
        "oracle://me:x@h/s?protocol=tcps&wallet_location=/etc/wallet&wallet_password=w&ssl_server_dn_match=true"
        "&schema=TIMERS&server_type=dedicated"
    )
    assert address.options == {
        "wallet_location": "/etc/wallet",
        "wallet_password": "w",
        "ssl_server_dn_match": True,
        "server_type": "dedicated",
    }
    assert address.schema == "TIMERS"
    oracledb.ConnectParams(**address.options)  # it knows all of them


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("oracle://me:x@h/s?ssl=true", "'ssl'"),
        ("oracle://me:x@h/s?protocl=tcps", "'protocl'"),
        ("oracle://me:x@h/s?protocol=udp", "protocol=udp"),
        ("oracle://me:x@h/s?ssl_server_dn_match=yes", "ssl_server_dn_match=yes"),
        ("oracle://me:x@h/s?server_type=fast", "server_type=fast"),
        ("oracle://me:x@h/s?schema=a;drop", "schema"),
        ("oracle://me:x@h/s?schema=", "schema"),
        ("oracle://me:x@h/s?novalue", "cannot be parsed"),
        ("oracle://me:x@h", "names no service"),
        ("oracle://me:x@h/s?sid=ORCL", "names no service"),
        ("oracle://h/s", "names no user"),
        ("oracle://me:x@/s", "names no host"),
        ("oracle://u:secret#w@h/s", "%23"),
        ("oracle://u:secret@w@h/s", "%40"),
    ],
)
def test_a_mistake_in_the_url_is_named(url: str, says: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert says in caught.value.detail
    assert "secret" not in caught.value.detail
    assert caught.value.field == "store.url"


def test_a_password_is_in_no_label() -> None:
    address = address_of("oracle://me:secret@h:1/s?wallet_password=secret")
    assert address.label == "h:1/s"
    assert "secret" not in repr(address)


def test_without_the_driver_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['oracledb'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('oracle://me:x@h/s')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[oracle]'" in said
