"""Authentication and authorization: bearer tokens with verbs and namespaces, and when no token is required.

Only the SHA-256 of a token is configured. Verbs: `read` (get, list, status, metrics), `write` (changes timers), `admin`
(changes namespaces, and includes the other two).
"""

from __future__ import annotations

import hmac
import ipaddress
from hashlib import sha256
from urllib.parse import urlsplit

from msgspec import Struct

from duetime.config import Auth, Config, Token
from duetime.errors import CrossOrigin, Forbidden, SetupError, Unauthenticated
from duetime.http.server import Request

__all__ = ["Authenticator", "Caller", "check_binding", "is_loopback", "split_listen"]


class Caller(Struct, frozen=True):
    """The holder of a token. `namespaces` is None: all of them."""

    name: str
    verbs: frozenset[str]
    namespaces: frozenset[str] | None

    def require_verb(self, verb: str) -> None:
        if verb not in self.verbs:
            raise Forbidden(f"the token {self.name!r} does not have the verb {verb!r}")

    def require_namespace(self, namespace: str) -> None:
        if not self.may_see(namespace):
            raise Forbidden(f"the token {self.name!r} does not allow the namespace {namespace!r}", field="namespace")

    def may_see(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces


_ALL_VERBS = frozenset({"read", "write", "admin"})
ANYONE = Caller("anyone", _ALL_VERBS, None)


class Authenticator:
    """Turns a request into its Caller, or refuses it."""

    def __init__(self, auth: Auth) -> None:
        self._callers = [(token.sha256.lower(), _caller(token)) for token in auth.tokens]
        self._verified: dict[str, Caller] = {}  # by Authorization header; limited by the number of tokens

    def caller(self, request: Request) -> Caller:
        if request.header(b"origin") is not None:
            _refuse_other_sites(request, open_to_all=not self._callers)
        if not self._callers:
            return ANYONE
        header = request.header(b"authorization")
        if header is None:
            raise Unauthenticated("this server requires a token: send `Authorization: Bearer TOKEN`")
        known = self._verified.get(header)
        return self._verify(header) if known is None else known

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
    return Caller(token.name, verbs, frozenset(token.namespaces) or None)


def _refuse_other_sites(request: Request, *, open_to_all: bool) -> None:
    """A web page must not be able to reach a server on its visitor's machine through the visitor's browser.

    Only browsers send Origin. It must be the address that the request was sent to. Without tokens that address must be
    a loopback address, because a web site can make its own name resolve to one (DNS rebinding).
    """
    try:
        origin = urlsplit(request.header(b"origin") or "")
    except ValueError:  # brackets that do not match: not sent by a browser
        origin = urlsplit("")
    same = bool(origin.netloc) and origin.netloc == (request.header(b"host") or "")
    if not same or (open_to_all and not _is_loopback_host(origin.hostname or "")):
        raise CrossOrigin("requests from pages of other web sites are refused")


def split_listen(listen: str) -> tuple[str, int]:
    """ "127.0.0.1:8463" or "[::1]:8463" as host and port."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SetupError(f'server.listen must be "host:port", as in "127.0.0.1:8463", not {listen!r}')
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(listen: str) -> bool:
    return _is_loopback_host(split_listen(listen)[0])


def _is_loopback_host(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(config: Config) -> None:
    """Refuse an address that other machines can reach if there are no tokens."""
    if not config.auth.tokens and not is_loopback(config.server.listen):
        raise SetupError(
            f"server.listen = {config.server.listen!r} can be reached from other machines, but there are no tokens. "
            "Create one with `duetime token new` and add it as [[auth.tokens]], or listen on 127.0.0.1"
        )
