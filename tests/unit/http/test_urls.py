"""URLs taken apart, or refused with a reason that can be read on after the name of a field."""

from __future__ import annotations

import pytest

from duetime.http.urls import parse_target, request_head


@pytest.mark.parametrize(
    ("url", "origin", "host_header", "path"),
    [
        ("http://a", "http://a:80", "a", "/"),
        ("HTTPS://Example.COM/Path?q=1", "https://example.com:443", "example.com", "/Path?q=1"),
        ("http://a:8080?x", "http://a:8080", "a:8080", "/?x"),
        ("https://[2001:DB8:0::1]/", "https://[2001:db8::1]:443", "[2001:db8::1]", "/"),
        ("http://[::1]:81/", "http://[::1]:81", "[::1]:81", "/"),
        ("http://my_service.local:1/", "http://my_service.local:1", "my_service.local:1", "/"),
    ],
)
def test_a_url_is_parsed(url: str, origin: str, host_header: str, path: str) -> None:
    target = parse_target(url)
    assert (target.origin, target.host_header, target.path) == (origin, host_header, path)
    assert target.tls == origin.startswith("https")
    assert "[" not in target.host


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "absolute URL"),
        ("/relative", "absolute URL"),
        ("//host/path", "absolute URL"),
        ("ftp://host/", "absolute URL"),
        ("http:/host", "absolute URL"),
        ("javascript:alert(1)", "absolute URL"),
        ("http://", "have a host"),
        ("http:///path", "have a host"),
        ("http://:80/", "have a host"),
        ("http://user:pw@host/", "user name"),
        ("http://good.test@127.0.0.1/", "user name"),
        ("http://host/#fragment", "fragment"),
        ("http://host/a b", "spaces"),
        ("http://host/\r\nx: y", "spaces or control"),
        ("http://ho\tst/", "spaces or control"),
        ("http://host/\x00", "spaces or control"),
        ("http://bücher.example/", "xn--"),
        ("http://host/ü", "ASCII"),
        ("http://１２７.0.0.1/", "ASCII"),
        ("http://host:0/", "port"),
        ("http://host:65536/", "port"),
        ("http://host:/", "port"),
        ("http://host:8o/", "port"),
        ("http://ho%41st/", "valid host name"),
        ("http://a\\@b/", "valid host name"),
        ("http://a\\b/", "valid host name"),
        ("http://a..b/", "1 to 63"),
        ("http://./", "1 to 63"),
        ("http://" + "a" * 64 + ".test/", "1 to 63"),
        ("http://[::1%25eth0]/", "valid host name"),
        ("http://[::g]/", "valid host name"),
        ("http://[127.0.0.1]/", "IPv6"),
        ("http://[1:2]/", "IPv6"),
        ("http://[::1]x/", "valid host name"),
        ("http://host/" + "a" * 2048, "2048"),
    ],
)
def test_a_url_that_could_be_misread_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_target(url)
    assert str(caught.value).startswith("must ")


@pytest.mark.parametrize(("name", "value"), [("a", "b\r\nc: d"), ("a b", "c"), ("", "c"), ("a", "é"), ("a:", "b")])
def test_a_header_that_could_smuggle_another_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="header"):
        request_head("POST", parse_target("http://a/"), {name: value})


def test_a_url_at_the_limits_is_accepted() -> None:
    longest = "http://shop.example/" + "x" * (2048 - 20)
    assert len(longest) == 2048
    assert parse_target(longest).path == "/" + "x" * 2028
    with pytest.raises(ValueError, match="at most 2048 bytes"):
        parse_target(longest + "x")
    assert parse_target("http://shop.example:65535/").port == 65_535
    assert parse_target("http://shop.example:1/").port == 1
    assert parse_target("http://shop.example./").host == "shop.example."
    assert parse_target(f"http://{'a' * 63}.example/").host == f"{'a' * 63}.example"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://shop.example/\x7f", "spaces or control characters"),
        ("HTTP://u@shop.example/", "user name or password"),
        ("http:shop.example", "absolute URL"),
        ("http", "absolute URL"),
    ],
)
def test_errors_of_urls_are_distinct(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_target(url)
