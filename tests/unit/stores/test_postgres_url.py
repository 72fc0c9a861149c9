"""The URL of a PostgreSQL store: what is allowed, and what is rejected."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.postgres.connection import address_of, begin_sql
from duetime.stores.postgres.store import PostgresStore


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_both_schemes_open_a_postgres_store(scheme: str) -> None:
    assert isinstance(open_store(f"{scheme}://host/db"), PostgresStore)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:p%40ss@host:5433/db?sslmode=verify-full&sslrootcert=/etc/ca.pem",
        "postgresql://one:5432,two:5433/db?target_session_attrs=read-write",
        "postgresql:///db?host=/var/run/postgresql",
        "postgresql://host?dbname=db",
        "postgresql://host/db?options=-c%20statement_timeout%3D5s",
    ],
)
def test_the_driver_gets_its_own_options(url: str) -> None:
    address = address_of(url)
    kept = url.partition("?")[2].replace("&target_session_attrs=read-write", "")
    for option in kept.split("&"):
        assert option.partition("=")[0] in address.dsn or option.startswith("target_session_attrs")


def test_our_own_options_do_not_reach_the_driver() -> None:
    address = address_of("postgresql://h/db?pooler=transaction&schema=timers&application_name=shop&sslmode=require")
    assert address.dsn == "postgresql://h/db?sslmode=require"
    assert (address.pooled, address.schema, address.application_name) == (True, "timers", "shop")


def test_the_default_is_a_primary_and_our_application_name() -> None:
    address = address_of("postgresql://h/db")
    assert (address.pooled, address.schema, address.application_name, address.target) == (
        False,
        None,
        "duetime",
        "primary",
    )
    assert address_of("postgresql://h/db?target_session_attrs=any").target == "primary"
    assert address_of("postgresql://h/db?target_session_attrs=read-write").target == "read-write"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://h/db?ssl=true", "'ssl'"),
        ("postgresql://h/db?poolr=transaction", "'poolr'"),
        ("postgresql://h/db?connect_timeout=3", "'connect_timeout'"),
        ("postgresql://h/db?pooler=statement", "pooler=statement"),
        ("postgresql://h/db?sslmode=yes", "sslmode=yes"),
        ("postgresql://h/db?target_session_attrs=standby", "target_session_attrs=standby"),
        ("postgresql://h/db?schema=a;drop", "schema"),
        ("postgresql://h/db?schema=", "schema"),
        ("postgresql://h/db?novalue", "cannot be parsed"),
        ("postgresql://h", "names no database"),
        ("postgresql://h/", "names no database"),
        ("postgresql://u:p#w@h/db", "%23"),
        ("postgresql://u:p@w@h/db", "%40"),
    ],
)
def test_a_mistake_in_the_url_is_named(url: str, says: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert says in caught.value.detail


def test_a_password_is_in_no_label() -> None:
    for url in ("postgresql://u:secret@h:1/db", "postgresql://h/db?password=secret", "postgresql:///db?host=/run"):
        assert "secret" not in address_of(url).label
        assert address_of(url).label.endswith("/db")


def test_behind_a_pooler_every_transaction_sets_its_own_settings() -> None:
    begin = begin_sql(address_of("postgresql://h/db?pooler=transaction&schema=timers"))
    assert begin.startswith("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
    assert "SET LOCAL search_path = 'timers'" in begin


def test_without_the_driver_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('postgresql://h/db')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[postgres]'" in said
