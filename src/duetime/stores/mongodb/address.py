"""The URL of a MongoDB database."""

from __future__ import annotations

import re
import warnings
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import SetupError
from duetime.stores.store_url import UNPARSED

try:
    from pymongo.errors import PyMongoError
    from pymongo.uri_parser import parse_uri, split_options
except ImportError:
    raise SetupError("store.url: MongoDB needs its driver: pip install 'duetime[mongodb]'", field="store.url") from None

__all__ = ["Address", "address_of"]

# Options of the driver, without those that Duetime sets itself: pools, deadlines, retries, concerns.
_OPTIONS: Final = (
    "appName", "authMechanism", "authMechanismProperties", "authSource", "compressors", "connectTimeoutMS",
    "directConnection", "heartbeatFrequencyMS", "loadBalanced", "localThresholdMS", "maxIdleTimeMS", "replicaSet",
    "serverMonitoringMode", "serverSelectionTimeoutMS", "srvMaxHosts", "srvServiceName", "ssl", "tls",
    "tlsAllowInvalidCertificates", "tlsAllowInvalidHostnames", "tlsCAFile", "tlsCRLFile", "tlsCertificateKeyFile",
    "tlsCertificateKeyFilePassword", "tlsDisableOCSPEndpointCheck", "tlsInsecure", "zlibCompressionLevel",
)  # fmt: skip
# URLs of hosted databases contain some of these. They are allowed with the values that Duetime uses anyway. The retries
# of the driver are always off.
_FIXED_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "w": ("majority",),
    "journal": ("true",),
    "readPreference": ("primary",),
    "readConcernLevel": ("majority",),
    "retryWrites": ("true", "false"),
    "retryReads": ("true", "false"),
}
_SPELLING: Final = {name.lower(): name for name in (*_OPTIONS, *_FIXED_OPTIONS)}
_DATABASE: Final = re.compile(r'[^/\\. "$*<>:|?\0]{1,63}')


class Address(Struct, frozen=True):
    """Where the database is: the URI for the driver, and `label` for people, without the password."""

    uri: str
    database: str
    label: str
    options: frozenset[str] = frozenset()  # names of the given options, in lower case

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(url: str) -> Address:
    """mongodb://user:password@host:port,host:port/database?option=value, or mongodb+srv://…, in the driver's format."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its text is not repeated: it may have a part of the password
        raise _url_error(f"cannot be read: {UNPARSED}") from None
    if parts.fragment:
        raise _url_error("has a '#': in a name or a password write it as %23")
    if parts.netloc.count("@") > 1 or "@" in parts.path:
        raise _url_error("has an '@' or a '/' in its password: write them as %40 and %2F")
    database = unquote(parts.path[1:])
    if not database:
        raise _url_error("names no database: mongodb://user:password@host:27017/DATABASE")
    if not _DATABASE.fullmatch(database):
        raise _url_error(
            f'has the database {database!r}: at most 63 characters, none of / \\ . " $ * < > : | ? or space'
        )
    options = _checked(parts.query)
    if parts.scheme == "mongodb":  # mongodb+srv is resolved by DNS when connecting
        try:
            parse_uri(url)
        except (PyMongoError, ValueError):
            raise _url_error(
                "cannot be read: are the hosts host:port, and @ : / ? # % in the password encoded?"
            ) from None
    label = f"{parts.netloc.rpartition('@')[2]}/{database}"
    return Address(url, database, label, frozenset(options))


def _checked(query: str) -> set[str]:
    """Check the options, and return their names."""
    if not query:
        return set()
    for name, value in parse_qsl(query, keep_blank_values=True):
        spelled = _SPELLING.get(name.lower())
        if spelled is None:
            raise _url_error(f"has the unknown option {name!r}; allowed are {', '.join(_OPTIONS)}")
        if value.lower() not in _FIXED_OPTIONS.get(spelled, (value.lower(),)):
            raise _url_error(
                f"has {name}={value}: only {' or '.join(_FIXED_OPTIONS[spelled])} is allowed, so leave it out"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # how the driver reports an option given twice, or an invalid value
            return {name.lower() for name in split_options(query)}
    except (PyMongoError, ValueError, TypeError, OSError, Warning) as error:
        raise _url_error(f"has invalid options: {error}") from None


def _url_error(what: str) -> SetupError:
    return SetupError(f"store.url: the MongoDB URL {what}", field="store.url")
