"""The client and the retry policy that the options of a command ask for."""

from __future__ import annotations

from argparse import Namespace as Arguments

from duetime.client import AsyncClient, RetryPolicy

__all__ = ["open_client", "retry_policy_from"]

RETRIES = 3  # fewer than the default, because a person waits for the command


def open_client(arguments: Arguments) -> AsyncClient:
    return AsyncClient(arguments.url, arguments.token, timeout=arguments.timeout, retries=RETRIES)


def retry_policy_from(arguments: Arguments) -> RetryPolicy | None:
    given = {
        "max_retries": arguments.max_retries,
        "initial_interval": arguments.retry_from,
        "max_interval": arguments.retry_up_to,
        "max_duration": arguments.retry_for,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return RetryPolicy(**given) if given else None
