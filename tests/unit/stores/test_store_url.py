"""What the adapters share when they parse store URLs: checks, and errors that do not repeat a password."""

from __future__ import annotations

import pytest

from duetime.errors import SetupError
from duetime.store import open_store
from duetime.stores.store_url import parse_store_url, require_driver


def test_a_url_is_split_into_its_parts() -> None:
    url = parse_store_url("some://me:s%40cret@a:1,b:2/my%20db?One=1&two=", "Some", str.lower)
    assert (url.user_info, url.hosts, url.database) == ("me:s%40cret", "a:1,b:2", "my db")
    assert url.options == {"one": "1", "two": ""}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("some://h/db?novalue", "cannot be parsed"),
        ("some://me:se#cret@h/db", "has a '#': in a name or a password it is written %23"),
        ("some://me:se@cret@h/db", "has an '@' in its password: there it is written %40"),
        ("some://me:se/cret@h/db", "has an '@' after a '/': in a name or a password they are written %40 and %2F"),
        ("some://me:se?cret@h/db", "cannot be parsed: are all options name=value, and @ : / ? # [ ] % in the password"),
        ("some://me:se[cret@h/db", "cannot be parsed"),
        ("some://me:℀cret@h/db", "cannot be parsed"),
    ],
)
def test_a_url_that_cannot_be_parsed_is_an_error_of_the_setting(url: str, problem: str) -> None:
    with pytest.raises(SetupError) as caught:
        parse_store_url(url, "Some")
    assert caught.value.detail.startswith(f"store.url: the Some URL {problem}")
    assert caught.value.field == "store.url"
    assert "cret" not in caught.value.detail


def test_a_port_has_a_default_and_an_invalid_one_is_not_repeated() -> None:
    assert parse_store_url("some://h/db", "Some").port(7) == 7
    assert parse_store_url("some://h:8/db", "Some").port(7) == 8
    with pytest.raises(SetupError, match=r"has an invalid port$"):
        parse_store_url("some://me:a:secret/db", "Some").port(7)


def test_unknown_options_and_values_are_named_with_what_is_allowed() -> None:
    url = parse_store_url("some://h/db?mode=Fast", "Some")
    url.check_options(("mode", "other"))
    url.check_value("other", ("a",))
    url.check_value("mode", ("fast", "slow"), ignore_case=True)
    with pytest.raises(SetupError, match="has the unknown option 'mode'; allowed: other, more"):
        url.check_options(("other", "more"))
    with pytest.raises(SetupError, match="has mode=Fast; allowed: fast, slow"):
        url.check_value("mode", ("fast", "slow"))


def test_a_missing_driver_is_a_setup_error_that_says_how_to_install_it() -> None:
    require_driver("asyncio", "Some", extra="some")
    with pytest.raises(SetupError, match=r"Some needs its driver: pip install 'duetime\[some\]'"):
        require_driver("no_such_driver", "Some", extra="some")


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "oracle", "sqlserver", "mongodb", "cassandra", "dynamodb"])
@pytest.mark.parametrize("password", ["a?xyzzy", "a/xyzzy", "a#xyzzy", "℀xyzzy", "[xyzzy", "xyzzy]", "1/xyzzy"])
def test_no_error_repeats_a_password_that_is_not_encoded(scheme: str, password: str) -> None:
    with pytest.raises(SetupError) as caught:
        open_store(f"{scheme}://me:{password}@h/db")
    assert caught.value.field == "store.url"
    assert "xyzzy" not in caught.value.detail


def test_a_url_without_a_scheme_is_not_repeated() -> None:
    with pytest.raises(SetupError, match="no adapter for 'postgresql//me'") as caught:
        open_store("postgresql//me:secret@h/db")
    assert "secret" not in caught.value.detail
