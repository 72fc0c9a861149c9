"""token new: makes an access token, and the configuration with which a server accepts it."""

from __future__ import annotations

import hashlib
import secrets
from argparse import Namespace as Arguments

from duetime.cli.output import to_json

__all__ = ["new_token"]


def new_token(arguments: Arguments) -> int:
    token = "dt_" + secrets.token_urlsafe(32)
    entry = {"name": arguments.name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    entry |= {"namespaces": arguments.namespace, "verbs": arguments.verb}
    if arguments.json:
        print(to_json({"token": token, "config": entry}))
        return 0
    print("The token. It is shown only now; give it to the client (DUETIME_TOKEN):\n")
    print(f"  {token}\n")
    print("Add this to the server's configuration file:\n")
    print("[[auth.tokens]]")
    for key, value in entry.items():
        if value:
            print(f"{key} = {to_json(value)}")
    return 0
