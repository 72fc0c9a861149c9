"""The DynamoDB URL: its parts, and the errors for mistakes in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duetime.errors import SetupError
from duetime.stores.dynamodb.address import address_of


def test_a_region_and_a_prefix_are_all_that_is_needed_on_aws() -> None:
    address = address_of("dynamodb://eu-central-1/duetime")
    assert (address.region, address.timers, address.cluster) == ("eu-central-1", "duetime-timers", "duetime-cluster")
    assert (address.access_key, address.secret_key, address.endpoint, address.profile) == (None,) * 4
    assert address.units is None, "on demand"
    assert address.label == "dynamodb eu-central-1/duetime"


def test_the_region_may_be_left_to_the_environment() -> None:
    address = address_of("dynamodb:///duetime?profile=timers")
    assert (address.region, address.profile) == (None, "timers")
    assert address.label == "dynamodb of the default region/duetime"


def test_an_emulator_has_an_endpoint_and_dummy_credentials() -> None:
    address = address_of("dynamodb://test:t%2Fst@us-east-1/duetime?endpoint=http://127.0.0.1:8000/")
    assert (address.access_key, address.secret_key) == ("test", "t/st")
    assert address.endpoint == "http://127.0.0.1:8000"


def test_a_secret_is_in_no_label() -> None:
    address = address_of("dynamodb://key:hunter2@us-east-1/duetime?endpoint=http://127.0.0.1:8000")
    assert "hunter2" not in address.label
    assert "key" not in address.label


def test_provisioned_units_have_a_default_and_may_be_given() -> None:
    assert address_of("dynamodb://us-east-1/d?billing=provisioned").units == (25, 25)
    assert address_of("dynamodb://us-east-1/d?billing=provisioned&read_units=7&write_units=900").units == (7, 900)
    assert address_of("dynamodb://us-east-1/d?billing=on-demand").units is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("dynamodb://us-east-1/d?region=x", "'region'"),
        ("dynamodb://us-east-1/d?sslmode=require", "'sslmode'"),
        ("dynamodb://us-east-1/d?novalue", "cannot be read"),
        ("dynamodb://us-east-1", "PREFIX"),
        ("dynamodb://us-east-1/", "PREFIX"),
        ("dynamodb://us-east-1/a/b", "'a/b'"),
        ("dynamodb://us-east-1/ümlaut", "PREFIX"),
        ("dynamodb://127.0.0.1:8000/d", "?endpoint="),
        ("dynamodb://dynamodb.us-east-1.amazonaws.com/d", "?endpoint="),
        ("dynamodb://key@us-east-1/d", "both access key and secret"),
        ("dynamodb://key:@us-east-1/d", "both access key and secret"),
        ("dynamodb://key:hunter2@us-east-1/d?profile=p", "only one of them"),
        ("dynamodb://us-east-1/d?endpoint=127.0.0.1:8000", "endpoint="),
        ("dynamodb://us-east-1/d?endpoint=ftp://h", "endpoint="),
        ("dynamodb://us-east-1/d?endpoint=http://u:hunter2@h", "endpoint="),
        ("dynamodb://us-east-1/d?billing=free", "billing=free"),
        ("dynamodb://us-east-1/d?read_units=5", "billing=provisioned"),
        ("dynamodb://us-east-1/d?billing=provisioned&read_units=0", "read_units"),
        ("dynamodb://us-east-1/d?billing=provisioned&write_units=many", "write_units"),
        ("dynamodb://key:hunter2#x@us-east-1/d", "%23"),
        ("dynamodb://key:hunter2/x@us-east-1/d", "%2F"),
    ],
)
def test_a_mistake_is_named(url: str, expected: str) -> None:
    with pytest.raises(SetupError, match=r"store\.url") as caught:
        address_of(url)
    assert expected in caught.value.detail
    assert "hunter2" not in caught.value.detail


def test_without_the_driver_one_is_told_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['aiobotocore'] = None\n"
        "from duetime.errors import SetupError\n"
        "from duetime.store import open_store\n"
        "try: open_store('dynamodb://us-east-1/d')\n"
        "except SetupError as error: print(error.detail)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'duetime[dynamodb]'" in said
