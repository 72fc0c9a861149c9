"""serve: runs a server, as one process or as several workers."""

from __future__ import annotations

from argparse import Namespace as Arguments

from duetime.cli.settings import config_from

__all__ = ["serve"]


def serve(arguments: Arguments) -> int:
    config = config_from(arguments)
    if arguments.paused:
        import asyncio

        from duetime.process import pause_namespaces

        asyncio.run(pause_namespaces(config))
    if config.server.workers > 1:
        from duetime.supervisor import run_workers

        return run_workers(config)
    from duetime.process import run  # imports the whole server

    return run(config)
