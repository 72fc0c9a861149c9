"""Store URLs: what the adapters share when they parse them, and the errors of a setup that cannot work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import SetupError

__all__ = ["UNPARSED", "StoreUrl", "parse_store_url", "require_driver", "store_url_error"]

UNPARSED = "are all options name=value, and @ : / ? # [ ] % in the password encoded?"


def store_url_error(problem: str) -> SetupError:
    return SetupError(f"store.url: {problem}", field="store.url")


def require_driver(module: str, product: str, *, extra: str) -> None:
    """A database package calls this first, so that a missing driver is a SetupError and not an ImportError."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise store_url_error(f"{product} needs its driver: pip install 'duetime[{extra}]'") from None


class StoreUrl(Struct, frozen=True):
    """A URL `scheme://user:password@host:port/database?option=value`. Not decoded, except for the options."""

    product: str  # the name of the database product, for error texts
    parts: SplitResult
    options: dict[str, str]

    def error(self, problem: str) -> SetupError:
        return _url_error(self.product, problem)

    @property
    def user_info(self) -> str:
        return self.parts.netloc.rpartition("@")[0]

    @property
    def hosts(self) -> str:
        return self.parts.netloc.rpartition("@")[2]

    @property
    def database(self) -> str:
        return unquote(self.parts.path.strip("/"))

    def port(self, default: int) -> int:
        try:
            return self.parts.port or default
        except ValueError:  # its text is not repeated: it may be a part of the password
            raise self.error("has an invalid port") from None

    def check_options(self, known: Collection[str]) -> None:
        for name in self.options:
            if name not in known:
                raise self.error(f"has the unknown option {name!r}; allowed: {', '.join(known)}")

    def check_value(self, option: str, allowed: Sequence[str], *, ignore_case: bool = False) -> None:
        value = self.options.get(option)
        if value is not None and (value.lower() if ignore_case else value) not in allowed:
            raise self.error(f"has {option}={value}; allowed: {', '.join(allowed)}")


def parse_store_url(url: str, product: str, option_name: Callable[[str], str] = str) -> StoreUrl:
    """`option_name` brings the name of an option to one spelling."""
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its text is not repeated: it may have a part of the password
        raise _url_error(product, f"cannot be parsed: {UNPARSED}") from None
    if parts.fragment:
        raise _url_error(product, "has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise _url_error(product, "has an '@' in its password: there it is written %40")
    if parts.netloc and "@" in parts.path:  # without this check the path, which has a part of the password, is shown
        raise _url_error(product, "has an '@' after a '/': in a name or a password they are written %40 and %2F")
    return StoreUrl(product, parts, {option_name(name): value for name, value in given})


def _url_error(product: str, problem: str) -> SetupError:
    return store_url_error(f"the {product} URL {problem}")
