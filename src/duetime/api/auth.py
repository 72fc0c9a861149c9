"""Authentication and authorization: bearer tokens with verbs and namespaces, and when no token is required.

Only the SHA-256 of a token is configured. Verbs: `read` (get, list, status, metrics), `write` (changes timers), `admin`
(changes namespaces, and includes the other two).
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from hashlib import sha256
from urllib.parse import urlsplit

from msgspec import Struct

from duetime.addresses import is_loopback, is_loopback_host, split_advertise
from duetime.config import Auth, Config, Token
from duetime.errors import CrossOrigin, Forbidden, SetupError, Unauthenticated, UnknownHost
from duetime.http.messages import Request

__all__ = ["ANYONE", "Authenticator", "Caller", "check_binding", "hosts_of"]


class Caller(Struct, frozen=True):
    """The holder of a token. `namespaces` is None: all of them."""

    name: str
    verbs: frozenset[str]
    namespaces: frozenset[str] | None
    is_operator: bool = False  # has a token with `admin` for all namespaces: quotas of tenants do not hold for it

    def require_verb(self, verb: str) -> None:
        if verb not in self.verbs:
            raise Forbidden(f"the token {self.name!r} does not have the verb {verb!r}")

    def require_namespace(self, namespace: str) -> None:
        if self.namespaces is not None and namespace not in self.namespaces:
            raise Forbidden(f"the token {self.name!r} does not allow the namespace {namespace!r}", field="namespace")

    def require_all_namespaces(self, field: str) -> None:
        """For what an operator sets for a tenant. `field`: the one that the request would change."""
        if self.namespaces is not None:
            raise Forbidden(
                f"{field} is set by operators: the token {self.name!r} is restricted to namespaces", field=field
            )

    def require_operator(self, field: str) -> None:
        """For what concerns all namespaces at once."""
        if self.namespaces is not None or "admin" not in self.verbs:
            raise Forbidden(
                f"{field} is for operators: the token {self.name!r} does not have the verb 'admin' for all namespaces",
                field=field,
            )

    def may_see(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces


_KNOWN_HOSTS_MAX = 64
_ALL_VERBS = frozenset({"read", "write", "admin"})
ANYONE = Caller("anyone", _ALL_VERBS, None)


class Authenticator:
    """Turns a request into its Caller, or refuses it."""

    def __init__(self, auth: Auth, hosts: Collection[str] = ()) -> None:
        """`hosts`: names by which a server without tokens may be called, besides loopback."""
        self._hosts = frozenset(name.lower().rstrip(".") for name in hosts)
        self._known_hosts: set[bytes] = set()  # Host headers that were accepted; limited to _KNOWN_HOSTS_MAX
        self._callers = [(token.sha256.lower(), _caller(token)) for token in auth.tokens]
        self._verified: dict[str, Caller] = {}  # by Authorization header; limited by the number of tokens

    def check_host(self, request: Request) -> None:
        """Refuse a request to a server without tokens if it was sent to a name that is not the server's: a web site can
        make its own name resolve to this machine (DNS rebinding), and its pages could then read what they get."""
        if self._callers:
            return
        sent = request.raw_headers.get(b"host")
        if sent is None or sent in self._known_hosts:  # a browser always sends one
            return
        host = sent.decode("latin-1")
        if not self._is_own_host(_host_of(host)):
            raise UnknownHost(
                f"a server without tokens answers only to loopback names and addresses, not to {host[:255]!r}; "
                "add the name to server.allowed_hosts, or configure tokens"
            )
        if len(self._known_hosts) < _KNOWN_HOSTS_MAX:
            self._known_hosts.add(sent)

    def _is_own_host(self, host: str) -> bool:
        return is_loopback_host(host) or host in self._hosts

    def caller(self, request: Request) -> Caller:
        if b"origin" in request.raw_headers:
            self._refuse_other_sites(request)
        if not self._callers:
            return ANYONE
        header = request.header(b"authorization")
        if header is None:
            raise Unauthenticated("this server requires a token: send `Authorization: Bearer TOKEN`")
        known = self._verified.get(header)
        return self._verify(header) if known is None else known

    def _refuse_other_sites(self, request: Request) -> None:
        """A web page must not be able to reach a server on its visitor's machine through the visitor's browser.

        Only browsers send Origin. It must be the address that the request was sent to, and without tokens one of this
        server's own (see `check_host`).
        """
        try:
            origin = urlsplit(request.header(b"origin") or "")
        except ValueError:  # brackets that do not match: not sent by a browser
            origin = urlsplit("")
        same = bool(origin.netloc) and origin.netloc == (request.header(b"host") or "")
        if not same or (not self._callers and not self._is_own_host((origin.hostname or "").rstrip("."))):
            raise CrossOrigin("requests from pages of other web sites are refused")

    def _verify(self, header: str) -> Caller:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the Authorization header must be `Bearer TOKEN`")
        digest = sha256(token.strip().encode("latin-1")).hexdigest()
        found: Caller | None = None
        for expected, caller in self._callers:
            if hmac.compare_digest(digest, expected):
                found = caller
        if found is None:
            raise Unauthenticated("the token is unknown")
        if len(self._verified) < 2 * len(self._callers):  # one token may be written in two ways
            self._verified[header] = found
        return found


def _caller(token: Token) -> Caller:
    verbs = frozenset(token.verbs)
    if not verbs or "admin" in verbs:
        verbs = _ALL_VERBS
    return Caller(
        token.name,
        verbs,
        frozenset(token.namespaces) or None,
        is_operator="admin" in verbs and not token.namespaces,
    )


def hosts_of(config: Config) -> tuple[str, ...]:
    """The names by which a server may be called, besides loopback: clients that send writes to the owner use
    `cluster.advertise`."""
    advertise = config.cluster.advertise
    return (*config.server.allowed_hosts, *((split_advertise(advertise)[0],) if advertise else ()))


def _host_of(header: str) -> str:
    """The name or address in a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def check_binding(config: Config) -> None:
    """Refuse an address that other machines can reach if there are no tokens."""
    if not config.auth.tokens and not is_loopback(config.server.listen):
        raise SetupError(
            f"server.listen = {config.server.listen!r} can be reached from other machines, but there are no tokens. "
            "Create one with `duetime token new` and add it as [[auth.tokens]], or listen on 127.0.0.1"
        )
