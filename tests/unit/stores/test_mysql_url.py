"""The URL of a MySQL, MariaDB or TiDB store: what is allowed, and what is rejected."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.mysql.connection import address_of
from duetime.stores.mysql.schema import kind_of
from duetime.stores.mysql.store import MySqlStore


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "tidb"])
def test_all_three_schemes_open_the_same_store(scheme: str) -> None:
    assert isinstance(open_store(f"{scheme}://host/db"), MySqlStore)


def test_a_url_has_host_database_user_and_password() -> None:
    address = address_of("mysql://me:p%40ss%3Aw%2Frd@db.example:4000/timers")
    assert (address.host, address.port, address.user) == ("db.example", 4000, "me")
    assert (address.password, address.database, address.ssl_mode) == ("p@ss:w/rd", "timers", "preferred")
    assert address.label == "db.example:4000/timers"


def test_the_defaults_are_those_of_the_clients() -> None:
    address = address_of("mysql:///timers")
    assert (address.host, address.port, address.user, address.password) == ("localhost", 3306, "root", "")
    assert address_of("mysql://[::1]:3307/timers").host == "::1"


def test_options_are_those_of_the_clients_however_they_are_spelled() -> None:
    address = address_of("mysql://h/db?ssl-mode=VERIFY_IDENTITY&ssl-ca=/ca.pem&ssl_cert=/c.pem&SSL_KEY=/k.pem")
    assert (address.ssl_mode, address.ssl_ca, address.ssl_cert, address.ssl_key) == (
        "verify_identity",
        "/ca.pem",
        "/c.pem",
        "/k.pem",
    )
    assert address_of("mysql://h/db?ssl-mode=verify-ca").ssl_mode == "verify_ca"
    assert address_of("mysql://me@/db?socket=/run/mysqld.sock").label == "/run/mysqld.sock/db"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://h/db?ssl=true", "'ssl'"),
        ("mysql://h/db?charset=latin1", "'charset'"),
        ("mysql://h/db?ssl-mode=yes", "ssl-mode=yes"),
        ("mysql://h/db?novalue", "cannot be parsed"),
        ("mysql://h:port/db", "port"),
        ("mysql://h", "names no database"),
        ("mysql://h/", "names no database"),
        ("mysql://h/a/b", "names no database"),
        ("mysql://u:p#w@h/db", "%23"),
        ("mysql://u:p@w@h/db", "%40"),
        ("mysql://one:3306,two:3306/db", "more than one host"),
        ("mysql://one,two/db", "more than one host"),
    ],
)
def test_a_mistake_in_the_url_is_named(url: str, says: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert says in caught.value.detail


def test_a_password_is_in_no_label_and_no_traceback() -> None:
    address = address_of("mysql://u:secret@h:1/db")
    assert "secret" not in address.label + repr(address) + str(address)


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("9.7.4-2", ("MySQL", (9, 7))),
        ("8.0.35-27", ("MySQL", (8, 0))),
        ("8.0.mysql_aurora.3.04.0", ("MySQL", (8, 0))),
        ("5.7.44-log", ("MySQL", (5, 7))),
        ("10.11.19-MariaDB-0+deb12u1", ("MariaDB", (10, 11))),
        ("5.5.5-10.4.8-MariaDB-log", ("MariaDB", (10, 4))),
        ("8.0.11-TiDB-v8.5.6", ("TiDB", (8, 5))),
        ("5.7.25-TiDB-v5.0.0-serverless", ("TiDB", (5, 0))),
        ("something else", ("MySQL", (0, 0))),
    ],
)
def test_the_server_is_recognised_by_its_version_text(version: str, kind: tuple[str, tuple[int, int]]) -> None:
    assert kind_of(version) == kind


def test_without_the_driver_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['asyncmy'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('mysql://h/db')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[mysql]'" in said


def test_with_ssl_ca_the_certificate_is_verified() -> None:
    assert address_of("mysql://u@h/d?ssl-ca=ca.pem").ssl_mode == "verify_ca"
    assert address_of("mysql://u@h/d?ssl-ca=ca.pem&ssl-mode=preferred").ssl_mode == "preferred"
    assert address_of("mysql://u@h/d").ssl_mode == "preferred"
