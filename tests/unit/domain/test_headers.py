"""Which headers a callback may have."""

from __future__ import annotations

import pytest

from duetime.domain.headers import check_http_headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer abc.def=="},
        {"X-Tenant": "a b", "x-other": "!~"},
        {f"x-{number}": "v" for number in range(32)},
        {"x": "v" * 8_000},
    ],
)
def test_ordinary_headers_pass(headers: dict[str, str]) -> None:
    check_http_headers(headers)


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Host": "evil"}, "reserved for Duetime"),
        ({"CONTENT-LENGTH": "0"}, "reserved for Duetime"),
        ({"Content-Type": "text/plain"}, "reserved for Duetime"),
        ({"webhook-id": "x"}, "reserved for Duetime"),
        ({"Webhook-Anything": "x"}, "reserved for Duetime"),
        ({"Duetime-Fence": "x"}, "reserved for Duetime"),
        ({"Idempotency-Key": "x"}, "reserved for Duetime"),
        ({"Accept": "text/html"}, "reserved for Duetime"),
        ({"User-Agent": "x"}, "reserved for Duetime"),
        ({"Accept-Encoding": "gzip"}, "reserved for Duetime"),
        ({"traceparent": "x"}, "reserved for Duetime"),
        ({"Connection": "close"}, "belongs to the connection"),
        ({"Transfer-Encoding": "chunked"}, "belongs to the connection"),
        ({"TE": "trailers"}, "belongs to the connection"),
        ({"Trailer": "x"}, "belongs to the connection"),
        ({"Upgrade": "h2c"}, "belongs to the connection"),
        ({"Keep-Alive": "1"}, "belongs to the connection"),
        ({"Proxy-Authorization": "x"}, "belongs to the connection"),
        ({"Proxy-Authenticate": "x"}, "belongs to the connection"),
        ({"Proxy-Connection": "close"}, "belongs to the connection"),
        ({"Content-Encoding": "gzip"}, "belongs to the connection"),
        ({"HTTP2-Settings": "x"}, "belongs to the connection"),
        ({"Expect": "100-continue"}, "belongs to the connection"),
        ({"x": "a\r\nb: c"}, "visible ASCII"),
        ({"x": "a\nb"}, "visible ASCII"),
        ({"x": "a\x00b"}, "visible ASCII"),
        ({"x": "é"}, "visible ASCII"),
        ({"x": ""}, "visible ASCII"),
        ({"x": " a"}, "visible ASCII"),
        ({"x": "a\t"}, "visible ASCII"),
        ({"x": "a\tb"}, "visible ASCII"),
        ({"": "a"}, "not a header name"),
        ({"a b": "a"}, "not a header name"),
        ({"a:": "a"}, "not a header name"),
        ({"a\r\nb": "a"}, "not a header name"),
        ({"é": "a"}, "not a header name"),
        ({"a" * 129: "a"}, "not a header name"),
        ({"X-A": "1", "x-a": "2"}, "twice"),
        ({f"x-{number}": "v" for number in range(33)}, "at most 32"),
        ({"x": "v" * 8_188}, "at most 8192 bytes"),
        ({"x": "v" * 4_000, "y": "v" * 4_183}, "at most 8192 bytes"),
    ],
)
def test_headers_that_could_harm_are_refused(headers: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_http_headers(headers)


def test_headers_at_the_limits_pass() -> None:
    check_http_headers({"x": "v" * 8_187})
    check_http_headers({f"x-{number}": "v" for number in range(32)})
    check_http_headers({"a" * 128: "v"})


def test_a_bad_name_is_shown_in_ascii_and_not_at_any_length() -> None:
    cut = "'" + "a:" * 20 + r"\u2026'"
    for name, shown in (("é" * 40, "'" + r"\xe9" * 40 + "'"), ("a:" * 20 + "a", cut), ("a:" * 1_000, cut)):
        with pytest.raises(ValueError) as caught:
            check_http_headers({name: "v"})
        assert str(caught.value) == f"must not have the name {shown}: not a header name of 1 to 128 characters"
