"""token new: makes an access token, and the configuration with which a server accepts it."""

from __future__ import annotations

import hashlib
import secrets
from argparse import Namespace as Arguments

from duetime.cli.errors import UsageError
from duetime.cli.output import print_line, to_json

__all__ = ["new_token"]


def new_token(arguments: Arguments) -> int:
    _check_scope(arguments)
    token = "dt_" + secrets.token_urlsafe(32)
    entry = {"name": arguments.name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    entry |= {"namespaces": arguments.namespace, "verbs": arguments.verb}
    if arguments.json:
        print_line(to_json({"token": token, "config": entry}))
        return 0
    print_line("The token. It is shown only now; give it to the client (DUETIME_TOKEN):")
    print_line()
    print_line(f"  {token}")
    print_line()
    print_line("Add this to the server's configuration file:")
    print_line()
    print_line("[[auth.tokens]]")
    for key, value in entry.items():
        if value:
            print_line(f"{key} = {to_json(value)}")
    return 0


def _check_scope(arguments: Arguments) -> None:
    """Nobody gets a token for everything by leaving something out."""
    limited = bool(arguments.namespace or arguments.verb)
    if not limited and not arguments.all:
        raise UsageError(
            "say what the token allows: --namespace NAME and --verb read, write or admin, each repeatable, "
            "or --all for everything in all namespaces"
        )
    if limited and arguments.all:
        raise UsageError("--all cannot be combined with --namespace or --verb")
