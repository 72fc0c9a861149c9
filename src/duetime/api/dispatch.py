"""The HTTP API: finds the route, authenticates, decodes, calls the service, encodes. It makes no other decision."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Generator
from itertools import islice
from typing import TypeVar, cast

from msgspec import UNSET

from duetime.api import decode, decode_flows, decode_schedules, encode
from duetime.api.auth import ANYONE, Authenticator, Caller, hosts_of
from duetime.api.decode_json import STEP_BYTES, Body
from duetime.api.docs import docs_page, docs_policy
from duetime.api.openapi import openapi_document
from duetime.api.peer_server import PeerServer
from duetime.api.routes import PREFIX, ROUTES, body_bytes_max
from duetime.cluster.peer_protocol import REFUSED, SIGNATURE
from duetime.config import Config
from duetime.domain.schedule import PREVIEW_STEPS_MAX, Steps, check_schedule, occurrences, with_start
from duetime.domain.timer import Namespace, NamespaceSpec, TimerKey, TimerSpec
from duetime.errors import DuetimeError, MethodNotAllowed, NotFound, Unauthenticated, UnsupportedMediaType
from duetime.http.messages import JSON, PROBLEM_JSON, Request, Response
from duetime.service.service import Service
from duetime.service.turns import Turns
from duetime.telemetry import Telemetry
from duetime.wire import ProblemJson, encode_problem, occurrence_json, problem_of

__all__ = ["Api"]

log = logging.getLogger("duetime.api")

T = TypeVar("T")
Operation = Callable[[bytes, Caller], Awaitable[bytes]]

# A GET needs no body, and what is not a path has none that is read.
_UNUSED_BODY_BYTES_MAX = 64 * 1024
_SEARCHED_AT_ONCE = 50  # steps of a preview in one step of the event loop, or those for one instant if they are more

TEXT = b"text/plain; charset=utf-8"
HTML = b"text/html; charset=utf-8"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_DOCUMENT_HEADERS = (
    ("content-security-policy", docs_policy()),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),  # for browsers that do not know frame-ancestors
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)
_NO_SNIFFING = (("x-content-type-options", "nosniff"),)
# Probes of proxies send any Host. These answers have nothing that a web page could use.
_ANY_HOST_PATHS = frozenset({"/healthz", "/readyz"})


class Api:
    """`admit` gets the head of each request of the HTTP server, `handle` the whole request if it was admitted."""

    def __init__(
        self,
        service: Service,
        config: Config,
        telemetry: Telemetry,
        *,
        not_ready: Callable[[], str | None] | None = None,
    ) -> None:
        """`not_ready`: why the instance cannot serve, if not only the service knows."""
        self._service = service
        self._not_ready = not_ready
        self._limits = config.limits
        self._request_bytes_max = config.server.request_bytes_max
        self._telemetry = telemetry
        self._authenticator = Authenticator(config.auth, hosts_of(config))
        self._peers = PeerServer(service)
        self._page_turns = Turns()
        self._preview_turns = Turns()
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
            "timers/pause": self._pause,
            "timers/resume": self._resume,
            "schedules/preview": self._preview_schedule,
            "namespaces/create": self._create_namespace,
            "namespaces/get": self._get_namespace,
            "namespaces/list": self._list_namespaces,
            "namespaces/update": self._update_namespace,
            "namespaces/delete": self._delete_namespace,
            "namespaces/pause": self._pause_namespace,
            "namespaces/resume": self._resume_namespace,
            "flows/list": self._list_flows,
            "flows/get": self._get_flow,
            "flows/update": self._update_flow,
            "flows/pause": self._pause_flow,
            "flows/resume": self._resume_flow,
            "cluster/status": self._cluster_status,
            "cluster/map": self._cluster_map,
        }
        self._posts = {
            PREFIX + route.path: (
                operations[route.path],
                route.verb,
                body_bytes_max(route.path, config.limits, config.server.request_bytes_max),
            )
            for route in ROUTES
        }
        self._gets: dict[str, Callable[[Request], Response]] = {
            "/": self._root,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
        }

    def admit(self, request: Request) -> int | Response:
        """Authenticates a request before its body is read. Returns the largest body that it may have, or the answer
        that refuses it."""
        try:
            post = self._posts.get(request.path)
            if post is None or request.method != "POST":
                return self._admit_other(request)
            self._authenticator.check_host(request)
            answer, verb, limit = post
            caller = self._authenticator.caller(request)
            caller.require_verb(verb)
            media_type = request.raw_headers.get(b"content-type", JSON)
            if media_type != JSON:
                _check_media_type(media_type.decode("latin-1"))
        except DuetimeError as error:
            return self._refused(request, error)
        request.admitted = answer, caller
        if caller is not ANYONE:
            request.tenant = caller.name
        return limit

    def _admit_other(self, request: Request) -> int:
        """A request between instances, or a page or text."""
        # Requests of other instances are signed, and sent to the address in the member row.
        if request.path not in _ANY_HOST_PATHS and request.path not in PeerServer.paths:
            self._authenticator.check_host(request)
        if request.path in PeerServer.paths and request.method == "POST":
            # The signature is that of the body, so it cannot be verified yet. Instances share the memory for bodies by
            # their addresses, and apart from the holders of tokens.
            if request.header(SIGNATURE.encode()) is None:
                raise Unauthenticated("the request is not signed with this instance's secret")
            request.tenant = f"instance at {request.tenant}"
            return self._request_bytes_max
        return _UNUSED_BODY_BYTES_MAX

    def _refused(self, request: Request, error: DuetimeError) -> Response:
        is_from_peer = request.path in PeerServer.paths
        response = _problem(error, headers=((REFUSED, "not carried out"),) if is_from_peer else ())
        self._telemetry.requests.add(_STATUS_TEXT[response.status])
        return response

    async def handle(self, request: Request) -> Response:
        if request.admitted is None and request.method == "POST" and request.path in self._posts:
            refusal = self.admit(request)  # the caller is not a server that has done it
            if isinstance(refusal, Response):
                return refusal
        try:
            if request.admitted is not None:
                answer, caller = request.admitted
                response = Response(200, await answer(request.body, caller))
            elif request.path in PeerServer.paths and request.method == "POST":
                response = await self._peers.handle(request)
                request.admitted = True  # it was signed: the server need not close this connection first
            else:
                response = self._answer_get(request)
        except DuetimeError as error:
            return self._refused(request, error)
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
        return encode.encode_created(await self._service.create(spec), says_existed=spec.says_existed)

    async def _get(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.get(self._timer_key(body, caller)))

    def _timer_key(self, body: bytes, caller: Caller) -> TimerKey:
        key = decode.decode_timer_key(body)
        caller.require_namespace(key.namespace)
        self._count_request(key.namespace, caller)
        return key

    def _count_request(self, namespace: str, caller: Caller) -> None:
        """An operator must be able to look at and to stop what a tenant does that has used up its quota. A create
        always counts: the service does that."""
        if not caller.is_operator:
            self._service.quotas.take_request(namespace)

    async def _update(self, body: bytes, caller: Caller) -> bytes:
        key, patch = decode.decode_update(body, self._limits)
        caller.require_namespace(key.namespace)
        self._count_request(key.namespace, caller)
        return encode.encode_updated(await self._service.update(key, patch))

    async def _delete(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_verdict(await self._service.delete(self._timer_key(body, caller)))

    async def _create_many(self, body: bytes, caller: Caller) -> bytes:
        items = await _in_steps(decode.decode_timers(body, self._limits))
        specs = await _in_steps(_each(items, lambda item: self._spec_or_error(item, caller)))
        self._take_bulk_request({spec.namespace for spec in specs if isinstance(spec, TimerSpec)})
        return encode.encode_created_many(await self._service.create_many(specs), specs)

    def _spec_or_error(self, item: Body, caller: Caller) -> TimerSpec | DuetimeError:
        try:
            spec = decode.decode_create(item, self._limits)
            caller.require_namespace(spec.namespace)
        except DuetimeError as error:
            return error
        return spec

    async def _delete_many(self, body: bytes, caller: Caller) -> bytes:
        items = await _in_steps(decode.decode_timers(body, self._limits))
        keys = await _in_steps(_each(items, lambda item: _key_or_error(item, caller)))
        if not caller.is_operator:
            self._take_bulk_request({key.namespace for key in keys if isinstance(key, TimerKey)})
        return encode.encode_deleted_many(await self._service.delete_many(keys))

    def _take_bulk_request(self, namespaces: set[str]) -> None:
        """A bulk request counts as one of each namespace that it names."""
        for namespace in sorted(namespaces):
            self._service.quotas.take_request(namespace)

    async def _list(self, body: bytes, caller: Caller) -> bytes:
        wanted = decode.decode_filter(body, self._limits)
        if wanted.namespace is None:
            caller.require_operator("allNamespaces")
        else:
            caller.require_namespace(wanted.namespace)
            self._count_request(wanted.namespace, caller)
        views, next_cursor = await self._service.list_timers(wanted)
        # To encode a page takes long. Without turns, all pages that were read at the same time would be encoded in one
        # step of the event loop, and no timer would fire meanwhile.
        async with self._page_turns.turn(wanted.namespace or ""):
            await asyncio.sleep(0)
            return encode.encode_page(views, next_cursor)

    async def _fire_now(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.fire_now(self._timer_key(body, caller)))

    async def _replay(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.replay(self._timer_key(body, caller)))

    async def _pause(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.pause(self._timer_key(body, caller)))

    async def _resume(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_view(await self._service.resume(self._timer_key(body, caller)))

    # -- schedules

    async def _preview_schedule(self, body: bytes, caller: Caller) -> bytes:
        query = decode_schedules.decode_preview(body)
        now_ms = self._service.now_ms()
        from_ms = now_ms if query.from_ms is None else query.from_ms
        schedule = with_start(query.schedule, min(from_ms, now_ms))
        steps = Steps(total=PREVIEW_STEPS_MAX)
        instants, pause_at = [], _SEARCHED_AT_ONCE
        # As for pages: the previews of many requests must not be computed in one step of the event loop.
        async with self._preview_turns.turn(caller.name):
            await asyncio.sleep(0)
            check_schedule(schedule)
            await asyncio.sleep(0)
            for occurrence in islice(occurrences(schedule, from_ms, steps), query.count):
                instants.append(occurrence_json(occurrence))
                if steps.used >= pause_at:
                    pause_at = steps.used + _SEARCHED_AT_ONCE
                    await asyncio.sleep(0)
        return encode.encode_preview(instants)

    # -- namespaces

    async def _create_namespace(self, body: bytes, caller: Caller) -> bytes:
        spec = decode.decode_namespace_create(body, self._limits)
        caller.require_namespace(spec.name)
        _require_quotas_unchanged(spec, caller)
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
        _require_quotas_unchanged(spec, caller)
        return encode.encode_namespace(await self._service.namespaces.update(spec))

    async def _delete_namespace(self, body: bytes, caller: Caller) -> bytes:
        name = decode.decode_namespace_name(body)
        caller.require_namespace(name)
        if caller.namespaces is not None:  # without its row, the namespace would have no quota when it is created again
            _require_no_quotas(await self._service.namespaces.get(name), caller)
        await self._service.namespaces.delete(name)
        return b"{}"

    async def _pause_namespace(self, body: bytes, caller: Caller) -> bytes:
        name = decode.decode_namespace_name(body)
        caller.require_namespace(name)
        return encode.encode_namespace(await self._service.namespaces.pause(name))

    async def _resume_namespace(self, body: bytes, caller: Caller) -> bytes:
        name = decode.decode_namespace_name(body)
        caller.require_namespace(name)
        return encode.encode_namespace(await self._service.namespaces.resume(name))

    # -- flows. Changes need `admin` and are never refused by a quota.

    async def _list_flows(self, body: bytes, caller: Caller) -> bytes:
        wanted = decode_flows.decode_flow_filter(body, self._limits)
        namespaces = None if caller.namespaces is None else tuple(caller.namespaces)
        if wanted.namespace is not None:
            caller.require_namespace(wanted.namespace)
            self._count_request(wanted.namespace, caller)
        return encode.encode_flows(await self._service.flows.list_page(wanted, namespaces))

    async def _get_flow(self, body: bytes, caller: Caller) -> bytes:
        namespace, flow_key = _flow(body, caller)
        self._count_request(namespace, caller)
        return encode.encode_flow(await self._service.flows.get(namespace, flow_key))

    async def _update_flow(self, body: bytes, caller: Caller) -> bytes:
        change = decode_flows.decode_flow_update(body)
        caller.require_namespace(change.namespace)
        return encode.encode_flow(
            await self._service.flows.update(change.namespace, change.flow_key, change.rate, change.concurrency)
        )

    async def _pause_flow(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_flow(await self._service.flows.pause(*_flow(body, caller)))

    async def _resume_flow(self, body: bytes, caller: Caller) -> bytes:
        return encode.encode_flow(await self._service.flows.resume(*_flow(body, caller)))

    # -- the cluster

    async def _cluster_status(self, body: bytes, caller: Caller) -> bytes:
        query = decode.decode_cluster_query(body)
        status = await self._service.cluster_status(with_shards=query.shards)
        return encode.encode_cluster_status(status, with_held_for=caller.namespaces is None)

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
        reason = (self._not_ready or self._service.readiness)()
        if reason is None:
            return Response(200, b"ready\n", TEXT)
        return Response(503, f"not ready: {reason}\n".encode(), TEXT, (("retry-after", "1"),))

    def _metrics(self, request: Request) -> Response:
        self._authenticator.caller(request).require_verb("read")
        return Response(200, self._telemetry.render().encode(), METRICS, _NO_SNIFFING)

    def _openapi(self, _: Request) -> Response:
        return Response(200, openapi_document(), JSON, _DOCUMENT_HEADERS)

    def _docs(self, _: Request) -> Response:
        return Response(200, docs_page(), HTML, _DOCUMENT_HEADERS)


_STATUS_TEXT = {status: str(status) for status in range(100, 600)}


async def _in_steps(work: Generator[int, None, T]) -> T:
    """Runs work that is too long for one step of the event loop. It yields the number of bytes it has handled; after
    every STEP_BYTES other requests and due timers get their turn."""
    handled = 0
    while True:
        try:
            handled += next(work)
        except StopIteration as stop:
            return cast(T, stop.value)
        if handled >= STEP_BYTES:
            handled = 0
            await asyncio.sleep(0)


def _each(items: list[Body], convert: Callable[[Body], T]) -> Generator[int, None, list[T]]:
    converted: list[T] = []
    handled = 0
    for item in items:
        handled += len(item)
        if handled > STEP_BYTES:  # before the item: it may be a long one
            yield handled
            handled = len(item)
        converted.append(convert(item))
    return converted


def _key_or_error(item: Body, caller: Caller) -> TimerKey | DuetimeError:
    try:
        key = decode.decode_timer_key(item)
        caller.require_namespace(key.namespace)
    except DuetimeError as error:
        return error
    return key


def _flow(body: bytes, caller: Caller) -> tuple[str, str]:
    namespace, flow_key = decode_flows.decode_flow(body)
    caller.require_namespace(namespace)
    return namespace, flow_key


def _require_quotas_unchanged(spec: NamespaceSpec, caller: Caller) -> None:
    """A tenant with `admin` for its namespaces must not raise the quotas that an operator has set for it."""
    if spec.creates_per_second is not UNSET:
        caller.require_all_namespaces("createsPerSecond")
    if spec.requests_per_second is not UNSET:
        caller.require_all_namespaces("requestsPerSecond")


def _require_no_quotas(namespace: Namespace, caller: Caller) -> None:
    if namespace.creates_per_second is not None:
        caller.require_all_namespaces("createsPerSecond")
    if namespace.requests_per_second is not None:
        caller.require_all_namespaces("requestsPerSecond")


def _check_media_type(given: str) -> None:
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
