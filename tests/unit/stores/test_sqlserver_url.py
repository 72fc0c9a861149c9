"""The URL of a SQL Server store: what is allowed, and what is rejected."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mssql_python.connection_string_parser import _ConnectionStringParser

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.sqlserver.connection import address_of
from duetime.stores.sqlserver.store import SqlServerStore


def _as_the_driver_reads(url: str) -> dict[str, str]:
    read = _ConnectionStringParser(validate_keywords=True)._parse(address_of(url).connection_string)
    return {name.lower(): value for name, value in read.items()}


def test_the_scheme_opens_a_sql_server_store() -> None:
    store = open_store("sqlserver://me:secret@host/db")
    assert isinstance(store, SqlServerStore)
    assert store.capabilities.name == "sqlserver"


def test_the_driver_parses_address_and_user() -> None:
    said = _as_the_driver_reads("sqlserver://me:secret@db.example:1434/timers")
    assert (said["server"], said["database"]) == ("db.example,1434", "timers")
    assert (said["uid"], said["pwd"]) == ("me", "secret")


def test_special_characters_in_a_password_are_escaped() -> None:
    said = _as_the_driver_reads("sqlserver://m%40e:p%40%3B%7Bx%7D%7D%3Bencrypt%3Dno@h/db%3B1")
    assert (said["uid"], said["pwd"], said["database"]) == ("m@e", "p@;{x}};encrypt=no", "db;1")
    assert "encrypt" not in said


def test_the_driver_does_not_reconnect_by_itself() -> None:
    assert _as_the_driver_reads("sqlserver://me:x@h/db")["connectretrycount"] == "0"


def test_options_are_those_of_its_connection_strings() -> None:
    said = _as_the_driver_reads(
        "sqlserver://me:x@h/db?Encrypt=strict&trustServerCertificate=no&HostNameInCertificate=db.example"
        "&servercertificate=/etc/ca.pem&MultiSubnetFailover=yes"
    )
    assert said["encrypt"] == "strict"
    assert said["trustservercertificate"] == "no"
    assert said["hostnameincertificate"] == "db.example"
    assert said["servercertificate"] == "/etc/ca.pem"
    assert said["multisubnetfailover"] == "yes"


def test_a_managed_identity_needs_no_user() -> None:
    said = _as_the_driver_reads("sqlserver://h/db?authentication=ActiveDirectoryMSI")
    assert said["authentication"] == "ActiveDirectoryMSI"
    assert "uid" not in said


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlserver://me:x@h/db?ssl=true", "'ssl'"),
        ("sqlserver://me:x@h/db?encrpt=yes", "'encrpt'"),
        ("sqlserver://me:x@h/db?applicationintent=readonly", "'applicationintent'"),
        ("sqlserver://me:x@h/db?encrypt=true", "encrypt=true"),
        ("sqlserver://me:x@h/db?trustservercertificate=true", "trustservercertificate=true"),
        ("sqlserver://me:x@h/db?novalue", "cannot be parsed"),
        ("sqlserver://me:x@h:port/db", "has an invalid port"),
        ("sqlserver://me:x@h", "names no database"),
        ("sqlserver://me:x@h/a/b", "names no database"),
        ("sqlserver://h/db", "names no user"),
        ("sqlserver://me:x@/db", "names no host"),
        ("sqlserver://u:secret#w@h/db", "%23"),
        ("sqlserver://u:secret@w@h/db", "%40"),
    ],
)
def test_a_mistake_in_the_url_is_named(url: str, says: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert says in caught.value.detail
    assert "secret" not in caught.value.detail
    assert caught.value.field == "store.url"


def test_a_password_is_in_no_label() -> None:
    address = address_of("sqlserver://me:secret@h:1/db")
    assert address.label == "h:1/db"
    assert "secret" not in repr(address)


def test_without_the_driver_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['mssql_python'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('sqlserver://me:x@h/db')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[sqlserver]'" in said
