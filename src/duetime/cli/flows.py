"""flow list, get, update, pause, resume."""

from __future__ import annotations

import difflib
import sys
from argparse import Namespace as Arguments
from typing import Any

from duetime.cli.client_options import open_client
from duetime.cli.errors import UsageError
from duetime.cli.output import Safe, format_relative, print_fields, print_json, print_line, print_table, shorten, styled
from duetime.client import AsyncClient, DuetimeError, Flow, FlowState, Unanswered

__all__ = ["get", "list_flows", "pause", "resume", "update"]

_PAGE = 500
_STYLES = {FlowState.OPEN: "red", FlowState.HALF_OPEN: "yellow", FlowState.PAUSED: "yellow", FlowState.CLOSED: None}


async def list_flows(arguments: Arguments) -> int:
    limit = arguments.limit or sys.maxsize
    flows: list[Flow] = []
    unanswered: dict[str, Unanswered] = {}
    cursor: str | None = None
    async with open_client(arguments) as client:
        while True:
            page = await client.list_flows_page(
                namespace=arguments.namespace, state=arguments.state, limit=min(limit + 1, _PAGE), cursor=cursor
            )
            flows += page.flows
            unanswered.update((instance.instance_id, instance) for instance in page.unanswered)
            cursor = page.next_cursor
            if cursor is None or len(flows) > limit:
                break
        flows, has_more = flows[:limit], len(flows) > limit or cursor is not None
        paused = await _paused_namespaces(client, flows) if not arguments.json else frozenset()
    _show_list(arguments, flows, paused, has_more=has_more)
    for instance in unanswered.values():
        print_line(
            f"duetime: the instance at {instance.address} does not answer; its timers are missing here: "
            f"{instance.reason}",
            file=sys.stderr,
        )
    return 0


async def _paused_namespaces(client: AsyncClient, flows: list[Flow]) -> frozenset[str]:
    """Those that are paused as a whole. The state of their flows is `paused`, as if the flows were paused."""
    if not any(flow.state is FlowState.PAUSED for flow in flows):
        return frozenset()
    try:
        return frozenset(namespace.namespace for namespace in await client.namespaces.list() if namespace.paused)
    except DuetimeError:
        return frozenset()


def _show_list(arguments: Arguments, flows: list[Flow], paused: frozenset[str], *, has_more: bool) -> None:
    if arguments.json:
        for flow in flows:
            print_json(flow)
        return
    if flows:
        headings = ["namespace", "flow", "state", "waiting", "in flight", "rate", "concurrency", "last error"]
        print_table(headings, [_row(flow, paused) for flow in flows])
    else:
        print_line("no flows")
    if has_more:
        print_line(styled(f"the first {len(flows)}; there are more (--limit 0 shows all)", "dim"))


async def get(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        flow = await client.get_flow(arguments.flow_key, namespace=arguments.namespace)
        paused = await _paused_namespaces(client, [flow]) if not arguments.json else frozenset()
    _show(arguments, flow, paused)
    return 0


async def update(arguments: Arguments) -> int:
    given = {"rate": arguments.rate, "concurrency": arguments.concurrency}
    limits: Any = {name: None if value == "none" else value for name, value in given.items() if value is not None}
    if not limits:
        raise UsageError("nothing to change: give --rate, --concurrency or both")
    async with open_client(arguments) as client:
        flow = await client.update_flow(arguments.flow_key, namespace=arguments.namespace, **limits)
        paused = await _paused_namespaces(client, [flow]) if not arguments.json else frozenset()
    _show(arguments, flow, paused)
    return 0


async def pause(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        flow = await client.pause_flow(arguments.flow_key, namespace=arguments.namespace)
        is_idle = not (flow.waiting or flow.in_flight)
        nearest = await _nearest(client, flow) if is_idle and not arguments.json else None
    if arguments.json:
        print_json(flow)
        return 0
    print_line(f"paused {_name(flow)}: no timer of it fires until you resume it; {flow.waiting} due timers wait")
    if flow.in_flight:
        print_line(f"{flow.in_flight} calls in flight end normally")
    if is_idle:
        meant = f"did you mean {nearest}?" if nearest else "`duetime flow list` shows the flows with due timers"
        print_line(f"no timers of this flow are waiting or known; the pause holds for timers to come; {meant}")
    return 0


async def _nearest(client: AsyncClient, flow: Flow) -> str | None:
    """The flow of the namespace whose key is most similar, of one page. The pause is stored in any case."""
    try:
        page = await client.list_flows_page(namespace=flow.namespace, limit=_PAGE)
    except DuetimeError:
        return None
    others = [other.flow_key for other in page.flows if other.flow_key != flow.flow_key]
    return next(iter(difflib.get_close_matches(flow.flow_key, others, n=1)), None)


async def resume(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        flow = await client.resume_flow(arguments.flow_key, namespace=arguments.namespace)
    if arguments.json:
        print_json(flow)
    elif flow.state is FlowState.PAUSED:
        print_line(f"resumed {_name(flow)}, but its namespace is paused: `duetime namespace resume` resumes that")
    elif flow.state is FlowState.CLOSED:
        print_line(
            f"resumed {_name(flow)}: its timers fire again within its limits; {flow.waiting} due timers wait, "
            f"{flow.in_flight} calls are in flight"
        )
    else:
        error = flow.last_error or "no reason is known"
        print_line(f"{_name(flow)} is not paused, but its breaker is open ({error}): {flow.waiting} due timers wait")
    return 0


def _show(arguments: Arguments, flow: Flow, paused: frozenset[str]) -> None:
    if arguments.json:
        print_json(flow)
        return
    print_fields(
        [
            ("flow", styled(flow.flow_key, "bold")),
            ("namespace", flow.namespace),
            ("state", _state(flow, paused)),
            ("waiting", f"{flow.waiting} due timers"),
            ("in flight", str(flow.in_flight)),
            ("called last", flow.origin),
            ("last error", flow.last_error or ""),
            ("rate", "no limit of its own" if flow.rate is None else f"{flow.rate:g} calls per second"),
            ("concurrency", "no limit of its own" if flow.concurrency is None else f"{flow.concurrency} calls"),
        ]
    )


def _row(flow: Flow, paused: frozenset[str]) -> tuple[str, ...]:
    return (
        shorten(flow.namespace, 20),
        shorten(flow.flow_key, 60),
        _state(flow, paused),
        str(flow.waiting),
        str(flow.in_flight),
        "" if flow.rate is None else f"{flow.rate:g}/s",
        "" if flow.concurrency is None else str(flow.concurrency),
        shorten(flow.last_error or "", 40),
    )


def _state(flow: Flow, paused: frozenset[str]) -> Safe:
    """`paused`: the namespaces that are."""
    if flow.state is FlowState.PAUSED and flow.namespace in paused:
        return styled("paused by namespace", _STYLES[flow.state])
    until = f", {format_relative(flow.until)}" if flow.until else ""
    return styled(flow.state + until, _STYLES[flow.state])


def _name(flow: Flow) -> str:
    return flow.flow_key if flow.namespace == "default" else f"{flow.flow_key} of {flow.namespace}"
