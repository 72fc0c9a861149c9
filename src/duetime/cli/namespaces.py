"""namespace create, get, list, update, pause, resume, delete, rotate-secret."""

from __future__ import annotations

import shlex
from argparse import Namespace as Arguments

from duetime.cli.client_options import open_client, retry_policy_from
from duetime.cli.errors import UsageError
from duetime.cli.output import format_retries, print_fields, print_json, print_line, print_table, styled
from duetime.client import Namespace, NamespaceSettings

__all__ = ["create", "delete", "get", "list_all", "pause", "resume", "rotate_secret", "update"]


async def create(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        _show(
            arguments,
            await client.namespaces.create(
                arguments.name, num_shards=arguments.shards, size=arguments.size, **_settings(arguments)
            ),
        )
    return 0


async def get(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        _show(arguments, await client.namespaces.get(arguments.name))
    return 0


async def list_all(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        listed = await client.namespaces.list()
    if arguments.json:
        for namespace in listed:
            print_json(namespace)
    else:
        print_table(
            ["namespace", "shards", "keeps delivered", "keeps failed", "signed", "state", "to"],
            [
                (
                    n.namespace,
                    str(n.num_shards),
                    n.delivered_retention,
                    n.failed_retention,
                    "yes" if n.signing_secrets else "no",
                    styled("paused", "yellow") if n.paused else "",
                    n.callback_url or "",
                )
                for n in listed
            ],
        )
    return 0


async def update(arguments: Arguments) -> int:
    settings = _settings(arguments)
    if not settings:
        raise UsageError("nothing to change: give at least one option, such as --to")
    async with open_client(arguments) as client:
        _show(arguments, await client.namespaces.update(arguments.name, **settings))
    return 0


async def pause(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        namespace = await client.pause_namespace(arguments.name)
    if arguments.json:
        print_json(namespace)
    else:
        name = namespace.namespace
        print_line(
            f"paused {name}: none of its timers fires until you resume it: duetime namespace resume {shlex.quote(name)}"
        )
    return 0


async def resume(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        names = [arguments.name]
        if arguments.all:
            names = [namespace.namespace for namespace in await client.namespaces.list() if namespace.paused]
        for name in names:
            namespace = await client.resume_namespace(name)
            print_json(namespace) if arguments.json else print_line(f"resumed {name}: its timers fire again")
    if not names and not arguments.json:
        print_line("no namespace is paused")
    return 0


async def delete(arguments: Arguments) -> int:
    async with open_client(arguments) as client:
        await client.namespaces.delete(arguments.name)
    if arguments.json:
        print_json({"deleted": arguments.name})
    else:
        print_line(f"deleted {arguments.name}")
    return 0


async def rotate_secret(arguments: Arguments) -> int:
    """The server returns redacted secrets. In an update, a redacted secret means: keep this one."""
    from duetime.signing import new_secret

    secret = new_secret()
    async with open_client(arguments) as client:
        old = () if arguments.drop_old else (await client.namespaces.get(arguments.name)).signing_secrets[:1]
        await client.namespaces.update(arguments.name, signing_secrets=[secret, *old])
    if arguments.json:
        print_json({"namespace": arguments.name, "secret": secret, "kept": len(old)})
        return 0
    print_line("The new secret. It is shown only now; callbacks are signed with it from now on:")
    print_line()
    print_line(f"  {secret}")
    print_line()
    if old:
        print_line(
            "Callbacks are also signed with the previous secret. When all receivers have the new one, remove the old:"
        )
        print_line(f"  duetime namespace update {shlex.quote(arguments.name)} --secret THE_NEW_SECRET")
    return 0


def _settings(arguments: Arguments) -> NamespaceSettings:
    given = {
        "callback_url": arguments.to,
        "retry_policy": retry_policy_from(arguments),
        "callback_timeout_seconds": arguments.callback_timeout,
        "require_ok": arguments.require_ok,
        "delivered_retention": arguments.keep_delivered,
        "failed_retention": arguments.keep_failed,
        "payload_bytes_max": arguments.payload_bytes_max,
        "creates_per_second": arguments.creates_per_second,
        "requests_per_second": arguments.requests_per_second,
        "signing_secrets": arguments.secret,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    for quota in ("creates_per_second", "requests_per_second"):
        if settings.get(quota) == "none":
            settings[quota] = None
    return settings  # type: ignore[return-value]


def _show(arguments: Arguments, namespace: Namespace) -> None:
    if arguments.json:
        print_json(namespace)
        return
    print_fields(
        [
            ("namespace", styled(namespace.namespace, "bold")),
            ("state", styled("paused: none of its timers fires", "yellow") if namespace.paused else ""),
            ("shards", str(namespace.num_shards)),
            ("to", namespace.callback_url or ""),
            ("callback timeout", f"{namespace.callback_timeout_seconds} s"),
            ("retries", format_retries(namespace.retry_policy)),
            ("requires ok", "yes" if namespace.require_ok else "no"),
            ("keeps", f"delivered {namespace.delivered_retention}, failed {namespace.failed_retention}"),
            ("payload up to", f"{namespace.payload_bytes_max} bytes" if namespace.payload_bytes_max else ""),
            ("creates per second", f"{namespace.creates_per_second}" if namespace.creates_per_second else ""),
            ("requests per second", f"{namespace.requests_per_second}" if namespace.requests_per_second else ""),
            ("secrets", ", ".join(namespace.signing_secrets) or "none: callbacks are not signed"),
            ("created", f"{namespace.created_at.astimezone():%Y-%m-%d %H:%M:%S%z}"),
        ]
    )
