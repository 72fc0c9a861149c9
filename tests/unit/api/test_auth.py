"""The authenticator: which headers are accepted, what is cached, and requests from pages of web browsers."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from recording_service import configured

from duetime.addresses import is_loopback
from duetime.api.auth import ANYONE, Authenticator, Caller, check_binding, hosts_of
from duetime.config import Auth, Token, load_config
from duetime.errors import Forbidden, SetupError, Unauthenticated, UnknownHost
from duetime.http.messages import Request


def token(secret: str, **fields: Any) -> Token:
    return Token(name=secret, sha256=sha256(secret.encode("latin-1")).hexdigest(), **fields)


def gate(*tokens: Token) -> Authenticator:
    return Authenticator(Auth(tokens=tokens))


def request(**headers: str) -> Request:
    return Request("POST", "/", headers={name.encode(): value.encode("latin-1") for name, value in headers.items()})


# --- tokens --------------------------------------------------------------------------------------


def test_without_tokens_anyone_may_do_anything() -> None:
    assert gate().caller(request()) is ANYONE
    assert gate().caller(request(authorization="Bearer whatever")) is ANYONE
    for verb in ("read", "write", "admin"):
        ANYONE.require_verb(verb)
    ANYONE.require_namespace("any")


@pytest.mark.parametrize("header", ["Bearer root", "bearer root", "BEARER root", "Bearer  root ", "Bearer root\t"])
def test_the_scheme_may_be_in_any_case_and_blanks_do_not_count(header: str) -> None:
    server = gate(token("other"), token("root"), token("third"))
    for _ in range(2):  # the second time it is remembered
        assert server.caller(request(authorization=header)).name == "root"


@pytest.mark.parametrize("header", ["Basic root", "root", " root", "Bearer", "Bearer ", "Bearerroot", "", "Bearer roo"])
def test_a_good_token_in_another_form_and_a_bad_one_are_refused(header: str) -> None:
    server = gate(token("root"))
    server.caller(request(authorization="Bearer root"))
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            server.caller(request(authorization=header))


def test_a_missing_header_is_refused_also_after_a_good_one() -> None:
    server = gate(token("root"))
    server.caller(request(authorization="Bearer root"))
    with pytest.raises(Unauthenticated, match="requires a token"):
        server.caller(request())


def test_a_digest_may_be_configured_in_capitals() -> None:
    known = token("root")
    server = gate(Token(name="root", sha256=known.sha256.upper()))
    assert server.caller(request(authorization="Bearer root")).name == "root"


def test_what_is_remembered_is_bounded_and_only_of_good_tokens() -> None:
    server = gate(token("root"), token("shop"))
    for blanks in range(1, 50):
        assert server.caller(request(authorization=f"Bearer{' ' * blanks}root")).name == "root"
        with pytest.raises(Unauthenticated):
            server.caller(request(authorization=f"Bearer bad{blanks}"))
    assert len(server._verified) == 4
    assert {caller.name for caller in server._verified.values()} == {"root"}


def test_a_token_that_is_remembered_keeps_its_own_rights() -> None:
    server = gate(token("eye", verbs=("read",)), token("root"))
    for _ in range(2):
        assert server.caller(request(authorization="Bearer eye")).verbs == {"read"}
        assert server.caller(request(authorization="Bearer root")).verbs == {"read", "write", "admin"}


@pytest.mark.parametrize(
    ("verbs", "may"),
    [
        ((), {"read", "write", "admin"}),
        (("admin",), {"read", "write", "admin"}),
        (("read",), {"read"}),
        (("write",), {"write"}),
        (("read", "write"), {"read", "write"}),
    ],
)
def test_a_token_has_its_verbs_and_none_means_all(verbs: tuple[str, ...], may: set[str]) -> None:
    caller = gate(token("t", verbs=verbs)).caller(request(authorization="Bearer t"))
    for verb in ("read", "write", "admin"):
        if verb in may:
            caller.require_verb(verb)
        else:
            with pytest.raises(Forbidden, match=f"'t' does not have the verb '{verb}'"):
                caller.require_verb(verb)


def test_a_token_has_its_namespaces_and_none_means_all() -> None:
    one: Caller = gate(token("t", namespaces=("orders",))).caller(request(authorization="Bearer t"))
    one.require_namespace("orders")
    assert (one.may_see("orders"), one.may_see("default"), one.may_see("")) == (True, False, False)
    with pytest.raises(Forbidden, match="does not allow the namespace 'default'"):
        one.require_namespace("default")
    every = gate(token("t")).caller(request(authorization="Bearer t"))
    every.require_namespace("default")


@pytest.mark.parametrize("other", ["team-10", "team-", "team", "tea", "TEAM-1", "team-1 ", "my-team-1", "-1", ""])
def test_a_namespace_is_allowed_by_its_whole_name(other: str) -> None:
    caller = gate(token("t", namespaces=("team-1", "sales"))).caller(request(authorization="Bearer t"))
    assert caller.may_see("team-1")
    assert not caller.may_see(other)
    with pytest.raises(Forbidden, match="does not allow the namespace"):
        caller.require_namespace(other)


# --- pages of web sites --------------------------------------------------------------------------

_PAGES = [
    ("http://127.0.0.1:8463", "127.0.0.1:8463", True),
    ("http://LOCALHOST:8463", "LOCALHOST:8463", True),
    ("http://[::1]:8463", "[::1]:8463", True),
    ("http://evil.example", "127.0.0.1:8463", False),
    ("http://127.0.0.1:9999", "127.0.0.1:8463", False),
    ("http://evil.example:8463", "evil.example:8463", False),  # its name was made to point here
    ("http://10.0.0.5:8463", "10.0.0.5:8463", False),
    ("null", "127.0.0.1:8463", False),
    ("", "", False),
    ("null", "", False),
    ("http://[::1", "[::1", False),
    ("http://[::1", "", False),
]


@pytest.mark.parametrize(("origin", "host", "passes"), _PAGES)
def test_an_open_server_serves_only_pages_of_its_own_at_loopback(origin: str, host: str, passes: bool) -> None:
    if passes:
        assert gate().caller(request(origin=origin, host=host)) is ANYONE
    else:
        with pytest.raises(Forbidden, match="other web sites"):
            gate().caller(request(origin=origin, host=host))


@pytest.mark.parametrize(("origin", "host", "of_loopback"), _PAGES)
def test_a_server_with_tokens_serves_pages_of_its_own_wherever_it_is(origin: str, host: str, of_loopback: bool) -> None:
    passes = of_loopback or (origin == f"http://{host}" and "[" not in host)
    server = gate(token("root"))
    server.caller(request(authorization="Bearer root"))  # a cached token does not allow other pages
    asked = request(origin=origin, host=host, authorization="Bearer root")
    if passes:
        assert server.caller(asked).name == "root"
    else:
        with pytest.raises(Forbidden, match="other web sites"):
            server.caller(asked)


def test_a_page_needs_a_host_header_to_be_of_the_same_site() -> None:
    with pytest.raises(Forbidden):
        gate().caller(request(origin="http://127.0.0.1:8463"))


# --- names of the server -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("127.0.0.1:8463", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LOCALHOST.:1", True),
        ("[::1]:8463", True),
        ("timers.internal", True),
        ("Timers.Internal.:443", True),
        ("evil.example:8463", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("timers.internal.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("10.0.0.5", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_an_open_server_answers_only_to_names_of_its_own(host: str, passes: bool) -> None:
    server = Authenticator(Auth(tokens=()), ["timers.internal"])
    for _ in range(2):  # the second time it is remembered
        if passes:
            server.check_host(request(host=host))
        else:
            with pytest.raises(UnknownHost, match="allowed_hosts"):
                server.check_host(request(host=host))


def test_a_server_with_tokens_answers_to_any_name_and_http_1_0_needs_none() -> None:
    gate(token("root")).check_host(request(host="evil.example"))
    gate().check_host(request())


def test_the_hosts_that_are_remembered_are_bounded() -> None:
    server = gate()
    for port in range(1_000):
        server.check_host(request(host=f"127.0.0.1:{port}"))
    assert len(server._known_hosts) == 64


def test_a_page_of_an_allowed_host_may_call_an_open_server() -> None:
    server = Authenticator(Auth(tokens=()), ["timers.internal"])
    assert server.caller(request(origin="https://timers.internal", host="timers.internal")) is ANYONE


def test_the_advertised_name_is_one_of_the_servers_own() -> None:
    config = load_config(
        environ={}, flags={"cluster.advertise": "timers-1.internal:8463", "server.allowed_hosts": ["timers.internal"]}
    )
    assert hosts_of(config) == ("timers.internal", "timers-1.internal")


# --- what may listen without tokens --------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:8463", True),
        ("127.9.9.9:1", True),
        ("[::1]:8463", True),
        ("localhost:8463", True),
        ("0.0.0.0:8463", False),
        ("[::]:8463", False),
        ("10.0.0.1:8463", False),
        ("example.org:80", False),
    ],
)
def test_a_server_others_can_reach_must_have_tokens(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback
    open_config = configured(**{"server.listen": listen})
    if loopback:
        check_binding(open_config)
    else:
        with pytest.raises(SetupError, match="no tokens"):
            check_binding(open_config)
    check_binding(configured(token("root"), **{"server.listen": listen}))
