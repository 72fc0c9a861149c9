"""The URL of a Cassandra cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import SetupError
from duetime.stores.store_url import UNPARSED

__all__ = ["CONSISTENCY_LEVELS", "Address", "address_of", "wrong_url"]

_OPTIONS: Final = frozenset(
    {"consistency", "datacenter", "replication", "sslcert", "sslkey", "sslmode", "sslpassword", "sslrootcert"}
)
_SSL_MODES: Final = ("disable", "require", "verify-ca", "verify-full")
CONSISTENCY_LEVELS: Final = ("quorum", "local_quorum")


class Address(Struct, frozen=True):
    """Where the cluster is. `label` describes it for people, without the password."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    label: str
    user: str | None = None
    password: str = ""
    consistency: str = "quorum"
    datacenter: str | None = None
    replication: int | None = None
    sslmode: str = "disable"
    sslrootcert: str | None = None
    sslcert: str | None = None
    sslkey: str | None = None
    sslpassword: str | None = None

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(url: str) -> Address:
    """cassandra://user:password@host1,host2:9042/keyspace?option=value."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:  # its text is not repeated: it may have a part of the password
        raise wrong_url(f"cannot be read: {UNPARSED}") from None
    for name in options:
        if name not in _OPTIONS:
            raise wrong_url(f"has the unknown option {name!r}; allowed are {', '.join(sorted(_OPTIONS))}")
    if parts.fragment:
        raise wrong_url("has a '#': in a name or a password write it as %23")
    if parts.netloc.count("@") > 1:
        raise wrong_url("has an '@' in its password: write it as %40")
    login, _, positions = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    keyspace = unquote(parts.path.strip("/"))
    if not re.fullmatch(r"[A-Za-z]\w{0,47}", keyspace, re.ASCII):
        raise wrong_url(
            "names no keyspace (1 to 48 letters, digits and underscores): cassandra://user:password@host:9042/KEYSPACE"
        )
    given_tls = bool(options.keys() & {"sslrootcert", "sslcert", "sslkey", "sslpassword"})
    _check(options, "sslmode", _SSL_MODES)
    _check(options, "consistency", CONSISTENCY_LEVELS)
    if options.get("consistency") == "local_quorum" and not options.get("datacenter"):
        raise wrong_url("has consistency=local_quorum without a datacenter: add &datacenter=NAME")
    return Address(
        hosts=_hosts(positions),
        keyspace=keyspace,
        label=f"{positions}/{keyspace}",
        user=unquote(user) or None,
        password=unquote(password),
        consistency=options.get("consistency", "quorum"),
        datacenter=options.get("datacenter") or None,
        replication=_replication(options.get("replication")),
        sslmode=options.get("sslmode", "verify-full" if given_tls else "disable"),
        sslrootcert=options.get("sslrootcert"),
        sslcert=options.get("sslcert"),
        sslkey=options.get("sslkey"),
        sslpassword=options.get("sslpassword"),
    )


def wrong_url(what: str) -> SetupError:
    return SetupError(f"store.url: the Cassandra URL {what}", field="store.url")


def _check(options: dict[str, str], name: str, known: Sequence[str]) -> None:
    if options.get(name, known[0]) not in known:
        raise wrong_url(f"has {name}={options[name]}; allowed are {', '.join(known)}")


def _replication(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d?", text):
        raise wrong_url(f"has replication={text}: it must be the number of copies of each row, such as 3")
    return int(text)


def _hosts(positions: str) -> tuple[tuple[str, int], ...]:
    found = re.findall(r"(?:^|,)(\[[0-9A-Fa-f:.]+\]|[^\[\],:]+)(?::(\d{1,5}))?(?=,|$)", positions)
    if ",".join(host + (f":{port}" if port else "") for host, port in found) != positions or not found:
        raise wrong_url("names no host: cassandra://user:password@host1,host2:9042/keyspace")
    last = found[-1][1] or "9042"  # a port after the last host is used for all hosts without a port
    return tuple((host.strip("[]"), int(port or last)) for host, port in found)
