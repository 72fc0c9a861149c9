"""The HTTP API: finds the route, authenticates, decodes, calls the service, encodes. It makes no other decision."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

from msgspec import Raw

from duetime.api import decode, encode
from duetime.api.auth import Authenticator, Caller
from duetime.api.docs import docs_page
from duetime.api.openapi import openapi_document
from duetime.api.peer_server import PeerServer
from duetime.api.routes import PREFIX, ROUTES
from duetime.cluster.peer_protocol import REFUSED
from duetime.config import Config
from duetime.domain.timer import TimerKey, TimerSpec
from duetime.errors import DuetimeError, MethodNotAllowed, NotFound, Unauthenticated, UnsupportedMediaType
from duetime.http.server import JSON, PROBLEM_JSON, Request, Response
from duetime.service.service import Service
from duetime.telemetry import Telemetry
from duetime.wire import ProblemJson, encode_problem, problem_of

__all__ = ["Api"]

log = logging.getLogger("duetime.api")

Operation = Callable[[bytes, Caller], Awaitable[bytes]]

TEXT = b"text/plain; charset=utf-8"
HTML = b"text/html; charset=utf-8"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"
# The pages contain everything they need: nothing is loaded from elsewhere, and no other page may embed them.
_DOCUMENT_HEADERS = (
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"),
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-cache"),
)


class Api:
    """`handle` is the handler of the HTTP server."""

    def __init__(self, service: Service, config: Config, telemetry: Telemetry) -> None:
        self._service = service
        self._limits = config.limits
        self._telemetry = telemetry
        self._authenticator = Authenticator(config.auth)
        self._peers = PeerServer(service)
        operations: dict[str, Operation] = {
            "timers/create": self._create,
            "timers/get": self._get,
            "timers/update": self._update,
            "timers/delete": self._delete,
            "timers/createMany": self._create_many,
            "timers/deleteMany": self._delete_many,
            "timers/list": self._list,
            "timers/fireNow": self._fire_now,
            "timers/replay": self._replay,
            "namespaces/create": self._create_namespace,
            "namespaces/get": self._get_namespace,
            "namespaces/list": self._list_namespaces,
            "namespaces/update": self._update_namespace,
            "namespaces/delete": self._delete_namespace,
            "cluster/status": self._cluster_status,
            "cluster/map": self._cluster_map,
        }
        self._posts = {PREFIX + route.path: (operations[route.path], route.verb) for route in ROUTES}
        self._gets: dict[str, Callable[[Request], Response]] = {
            "/": self._root,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
        }

    async def handle(self, request: Request) -> Response:
        try:
            post = self._posts.get(request.path)
            if post is not None and request.method == "POST":
                answer, verb = post
                caller = self._authenticator.caller(request)
                caller.require_verb(verb)
                _check_media_type(request)
                response = Response(200, await answer(request.body, caller))
            elif request.path in PeerServer.paths and request.method == "POST":
                response = await self._peers.handle(request)
            else:
                response = self._answer_get(request)
        except DuetimeError as error:
            is_from_peer = request.path in PeerServer.paths
            response = _problem(error, headers=((REFUSED, "not carried out"),) if is_from_peer else ())
        except Exception:
            request_id = secrets.token_hex(8)
            log.exception("unexpected error in request %s: %s %s", request_id, request.method, request.path)
            response = _problem(
                DuetimeError(f"internal error; the server's log has the details under {request_id}"), request_id
            )
        self._telemetry.requests.add(_STATUS_TEXT[response.status])
        return response

    # -- timers

    async def _create(self, body: bytes, caller: Caller) -> bytes:
        spec = decode.decode_create(body, self._limits)
        caller.require_namespace(spec.namespace)
        return encode.encode_created(await self._service.create(spec))

    async def _get(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.get(_timer_key(body, caller)))

    async def _update(self, body: bytes, caller: Caller) -> bytes:
        key, patch = decode.decode_update(body, self._limits)
        caller.require_namespace(key.namespace)
        return encode.encode_updated(await self._service.update(key, patch))

    async def _delete(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_verdict(await self._service.delete(_timer_key(body, caller)))

    async def _create_many(self, body: bytes, caller: Caller) -> bytes:
        items = decode.decode_timers(body, self._limits)
        specs = [self._spec_or_error(item, caller) for item in items]
        return encode.encode_created_many(await self._service.create_many(specs))

    def _spec_or_error(self, item: Raw, caller: Caller) -> TimerSpec | DuetimeError:
        try:
            spec = decode.decode_create(item, self._limits)
            caller.require_namespace(spec.namespace)
        except DuetimeError as error:
            return error
        return spec

    async def _delete_many(self, body: bytes, caller: Caller) -> bytes:
        items = decode.decode_timers(body, self._limits)
        keys = [_key_or_error(item, caller) for item in items]
        return encode.encode_deleted_many(await self._service.delete_many(keys))

    async def _list(self, body: bytes, caller: Caller) -> bytes:
        wanted = decode.decode_filter(body, self._limits)
        caller.require_namespace(wanted.namespace)
        views, next_cursor = await self._service.list_timers(wanted)
        return encode.encode_page(views, next_cursor)

    async def _fire_now(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.fire_now(_timer_key(body, caller)))

    async def _replay(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.replay(_timer_key(body, caller)))

    # -- namespaces and the cluster

    async def _create_namespace(self, body: bytes, caller: Caller) -> bytes:
        spec = decode.decode_namespace_create(body, self._limits)
        caller.require_namespace(spec.name)
        return encode.encode_namespace(await self._service.namespaces.create(spec))

    async def _get_namespace(self, body: bytes, caller: Caller) -> bytes:
        name = decode.decode_namespace_name(body)
        caller.require_namespace(name)
        return encode.encode_namespace(await self._service.namespaces.get(name))

    async def _list_namespaces(self, body: bytes, caller: Caller) -> bytes:
        decode.decode_nothing(body)
        known = await self._service.namespaces.list_all()
        return encode.encode_namespaces([namespace for namespace in known if caller.may_see(namespace.name)])

    async def _update_namespace(self, body: bytes, caller: Caller) -> bytes:
        spec = decode.decode_namespace_update(body, self._limits)
        caller.require_namespace(spec.name)
        return encode.encode_namespace(await self._service.namespaces.update(spec))

    async def _delete_namespace(self, body: bytes, caller: Caller) -> bytes:
        name = decode.decode_namespace_name(body)
        caller.require_namespace(name)
        await self._service.namespaces.delete(name)
        return b"{}"

    async def _cluster_status(self, body: bytes, caller: Caller) -> bytes:
        query = decode.decode_cluster_query(body)
        status = await self._service.cluster_status(with_shards=query.shards)
        return encode.encode_cluster_status(status, with_destinations=caller.namespaces is None)

    async def _cluster_map(self, body: bytes, caller: Caller) -> bytes:
        decode.decode_nothing(body)
        return encode.encode_shard_map(self._service.shard_map(), caller.may_see)

    # -- pages and texts, read with GET

    def _answer_get(self, request: Request) -> Response:
        answer = self._gets.get(request.path)
        if answer is None and request.path not in self._posts:
            raise NotFound(f"there is no path {request.path}; /docs lists all paths", code="path_not_found")
        if answer is None or request.method not in ("GET", "HEAD"):
            allowed = "POST" if answer is None else "GET, HEAD"
            error = MethodNotAllowed(f"{request.path} allows {allowed}, not {request.method}")
            return _problem(error, headers=(("allow", allowed),))
        return answer(request)

    def _root(self, _: Request) -> Response:
        text = b"This is Duetime. The API is described at /docs, and for programs at /openapi.json.\n"
        return Response(307, text, TEXT, (("location", "/docs"),))

    def _healthz(self, _: Request) -> Response:
        # A client that got an address from the cluster map checks that the expected instance answers there.
        return Response(200, b"alive\n", TEXT, (("duetime-instance", self._service.as_peer().instance_id),))

    def _readyz(self, _: Request) -> Response:
        reason = self._service.readiness()
        if reason is None:
            return Response(200, b"ready\n", TEXT)
        return Response(503, f"not ready: {reason}\n".encode(), TEXT, (("retry-after", "1"),))

    def _metrics(self, request: Request) -> Response:
        self._authenticator.caller(request).require_verb("read")
        return Response(200, self._telemetry.render().encode(), METRICS)

    def _openapi(self, _: Request) -> Response:
        return Response(200, openapi_document(), JSON, _DOCUMENT_HEADERS)

    def _docs(self, _: Request) -> Response:
        return Response(200, docs_page(), HTML, _DOCUMENT_HEADERS)


_STATUS_TEXT = {status: str(status) for status in range(100, 600)}


def _timer_key(body: bytes, caller: Caller) -> TimerKey:
    key = decode.decode_timer_key(body)
    caller.require_namespace(key.namespace)
    return key


def _key_or_error(item: Raw, caller: Caller) -> TimerKey | DuetimeError:
    try:
        key = decode.decode_timer_key(item)
        caller.require_namespace(key.namespace)
    except DuetimeError as error:
        return error
    return key


def _check_media_type(request: Request) -> None:
    given = request.header(b"content-type")
    if given is None or given == "application/json":
        return
    media_type = given.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"the body must be JSON: send `Content-Type: application/json`, not {media_type}")


def _problem(error: DuetimeError, request_id: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    problem: ProblemJson = problem_of(error, request_id)
    if error.retry_after_seconds is not None:
        headers = (*headers, ("retry-after", str(error.retry_after_seconds)))
    if isinstance(error, Unauthenticated):
        headers = (*headers, ("www-authenticate", 'Bearer realm="duetime"'))
    return Response(error.status, encode_problem(problem), PROBLEM_JSON, headers)
