"""The URL of the DynamoDB store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import SetupError
from duetime.stores.store_url import UNPARSED

__all__ = ["Address", "address_of", "wrong_url"]

_OPTIONS = ("billing", "ca_file", "endpoint", "profile", "read_units", "write_units")
_BILLING = ("on-demand", "provisioned")
_UNITS_DEFAULT = "25"


class Address(Struct, frozen=True):
    """Where the tables are. `label` describes them for people, without secrets."""

    prefix: str
    label: str
    region: str | None = None  # None: from the environment or the profile
    access_key: str | None = None  # None: from the default credential chain of AWS
    secret_key: str | None = None
    endpoint: str | None = None
    profile: str | None = None
    ca_file: str | None = None
    units: tuple[int, int] | None = None  # read, write; None: on demand

    def __repr__(self) -> str:
        return f"Address({self.label})"

    @property
    def timers(self) -> str:
        return f"{self.prefix}-timers"

    @property
    def cluster(self) -> str:
        return f"{self.prefix}-cluster"


def address_of(url: str) -> Address:
    """dynamodb://REGION/PREFIX?option=value: the tables PREFIX-timers and PREFIX-cluster in that region."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:  # its text is not repeated: it may have a part of the password
        raise wrong_url(f"cannot be read: {UNPARSED}") from None
    for name in options:
        if name not in _OPTIONS:
            raise wrong_url(f"has the unknown option {name!r}; allowed are {', '.join(_OPTIONS)}")
    if parts.fragment:
        raise wrong_url("has a '#': in a name or a secret write it as %23")
    if "@" in parts.path:
        raise wrong_url("has a '/' in its secret: write it as %2F")
    credentials, _, region = parts.netloc.rpartition("@")
    if region and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", region):
        shown = "credentials" if ":" in region else repr(region)
        raise wrong_url(
            f"has {shown} in place of a region: dynamodb://eu-central-1/PREFIX;"
            " set the address of an emulator or of a VPC endpoint with ?endpoint=http://host:port"
        )
    prefix = parts.path.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", prefix):
        what = f"has an invalid prefix {prefix!r}" if prefix else "has no prefix"
        raise wrong_url(f"{what} for the table names: dynamodb://REGION/PREFIX, of letters, digits, _ . -")
    access_key, secret_key = _credentials(credentials, options)
    endpoint = _endpoint(options.get("endpoint"))
    return Address(
        prefix=prefix,
        label=f"dynamodb {region or 'of the default region'}/{prefix}" + (f" at {endpoint}" if endpoint else ""),
        region=region or None,
        access_key=access_key,
        secret_key=secret_key,
        endpoint=endpoint,
        profile=options.get("profile"),
        ca_file=options.get("ca_file"),
        units=_units(options),
    )


def wrong_url(what: str) -> SetupError:
    return SetupError(f"store.url: the DynamoDB URL {what}", field="store.url")


def _credentials(given: str, options: Mapping[str, str]) -> tuple[str | None, str | None]:
    if not given:
        return None, None
    key, _, secret = given.partition(":")
    if not key or not secret:
        raise wrong_url("needs both access key and secret, or neither: dynamodb://ACCESS_KEY:SECRET@REGION/PREFIX")
    if "profile" in options:
        raise wrong_url("has credentials and a profile: use only one of them")
    return unquote(key), unquote(secret)


def _endpoint(given: str | None) -> str | None:
    if given is None:
        return None
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise wrong_url("has an invalid endpoint=: it must be like https://host:port")
    return given.rstrip("/")


def _units(options: Mapping[str, str]) -> tuple[int, int] | None:
    billing = options.get("billing", _BILLING[0])
    if billing not in _BILLING:
        raise wrong_url(f"has billing={billing}; allowed are {', '.join(_BILLING)}")
    if billing == _BILLING[0]:
        for name in ("read_units", "write_units"):
            if name in options:
                raise wrong_url(f"has {name}, which needs billing=provisioned")
        return None
    found = [options.get(name, _UNITS_DEFAULT) for name in ("read_units", "write_units")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,6}", value) for value in found):
        raise wrong_url("has invalid read_units or write_units: each must be a number from 1")
    return int(found[0]), int(found[1])
