"""The URL of a MongoDB store: what is allowed, and the errors for mistakes in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.mongodb.address import address_of
from duetime.stores.mongodb.connection import connect
from duetime.stores.mongodb.store import MongoStore


@pytest.mark.parametrize("scheme", ["mongodb", "mongodb+srv"])
def test_both_schemes_make_a_mongo_store_without_a_network_request(scheme: str) -> None:
    assert isinstance(open_store(f"{scheme}://cluster.example.com/db"), MongoStore)


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://h/db",
        "mongodb://user:p%40ss@one:27017,two:27018,[::1]:27019/db?replicaSet=rs0&authSource=admin",
        "mongodb+srv://user:pass@cluster0.example.mongodb.net/db?retryWrites=true&w=majority&appName=Cluster0",
        "mongodb://h/db?TLS=true&tlsAllowInvalidHostnames=true",
        "mongodb://h/db?ssl=true",
        "mongodb://%2Ftmp%2Fmongodb-27017.sock/db",
        "mongodb://h/db?readPreference=primary&readConcernLevel=majority&journal=true",
    ],
)
def test_common_urls_are_passed_to_the_driver_unchanged(url: str) -> None:
    address = address_of(url)
    assert (address.uri, address.database) == (url, "db")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mongodb://h", "names no database"),
        ("mongodb://h/", "names no database"),
        ("mongodb://h/?replicaSet=rs0", "names no database"),
        ("mongodb://h/a.b", "'a.b'"),
        ("mongodb://h/" + "x" * 64, "at most 63"),
        ("mongodb://h/db?replicaset=rs0&tsl=true", "'tsl'"),
        ("mongodb://h/db?maxPoolSize=5", "'maxPoolSize'"),
        ("mongodb://h/db?timeoutMS=5", "'timeoutMS'"),
        ("mongodb://h/db?socketTimeoutMS=5", "'socketTimeoutMS'"),
        ("mongodb://h/db?w=1", "w=1: only majority is allowed"),
        ("mongodb://h/db?journal=false", "journal=false"),
        ("mongodb://h/db?readPreference=secondaryPreferred", "only primary is allowed"),
        ("mongodb://h/db?tls=yes", "has invalid options"),
        ("mongodb://h/db?tls=true&tls=false", "has invalid options"),
        ("mongodb://h/db?tls=true&ssl=false", "has invalid options"),
        ("mongodb://h/db?connectTimeoutMS=soon", "has invalid options"),
        ("mongodb://h/db?tlsCAFile=/no/such/file.pem", "has invalid options"),
        ("mongodb://h:70000000/db", "cannot be read"),
        ("mongodb://u:p:w@h/db", "cannot be read"),
        ("mongodb://u:p#w@h/db", "%23"),
        ("mongodb://u:p@w@h/db", "%40"),
    ],
)
def test_a_mistake_is_named(url: str, expected: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert expected in caught.value.detail
    assert caught.value.field == "store.url"


def test_a_password_is_in_no_label_and_in_no_error() -> None:
    assert address_of("mongodb://u:secret@h:1,i:2/db").label == "h:1,i:2/db"
    for url in ("mongodb://u:secret@h:1x/db", "mongodb://u:sec:ret@h/db", "mongodb://u:secret@h/db?tls=no"):
        with pytest.raises(SetupError) as caught:
            address_of(url)
        assert "sec" not in caught.value.detail


async def test_concerns_and_retries_are_set_whatever_the_url_says(tmp_path: Path) -> None:
    client = connect(address_of("mongodb://h/db?retryWrites=true&retryReads=true&appName=shop"), 7)
    options = client.options
    assert (options.retry_writes, options.retry_reads) == (False, False)
    assert options.write_concern.document == {"w": "majority", "j": True}
    assert options.read_concern.level == "majority"
    assert options.read_preference.mongos_mode == "primary"
    assert options.pool_options.max_pool_size == 7
    assert options.pool_options.appname == "shop"
    assert connect(address_of("mongodb://h/db"), 7).options.pool_options.appname == "duetime"
    await client.close()


def test_without_the_driver_one_is_told_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['pymongo'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('mongodb://h/db')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[mongodb]'" in said
