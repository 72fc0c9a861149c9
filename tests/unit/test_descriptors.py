"""How the file descriptors of a process are divided."""

from __future__ import annotations

import subprocess
import sys

import pytest

from duetime.config import Config, load_config
from duetime.descriptors import Sizes, fitted, lowered_text, size
from duetime.errors import SetupError
from duetime.http.connection_limits import HEALTH_CONNECTIONS_MAX
from duetime.http.server import BACKLOG, TLS_HANDSHAKES_MAX


def config(**settings: object) -> Config:
    return load_config(environ={}, flags={key.replace("__", "."): value for key, value in settings.items()})


def used(sizes: Sizes) -> int:
    """The descriptors of everything that has a limit, all at the same time."""
    api = sizes.connections_max + HEALTH_CONNECTIONS_MAX + max(sizes.backlog, sizes.handshakes_max)
    return api + sizes.callback_sockets_max + 2 * sizes.lookups_max


CONFIGURATIONS = [
    config(),
    config(store__url="memory://"),
    config(store__url="postgresql://host/database"),
    config(store__url="dynamodb://eu-west-1"),
    config(server__connections_max=10),
    config(server__connections_max=100_000, delivery__concurrency_max=10_000),
    config(delivery__concurrency_max=1),
    config(server__tls_certificate="a", server__tls_key="b"),
]


@pytest.mark.parametrize("settings", CONFIGURATIONS)
def test_the_limits_together_are_below_the_limit_of_open_files(settings: Config) -> None:
    worked = 0
    for limit in [*range(64, 2_048, 16), 4_096, 8_192, 16_384, 65_536]:
        try:
            sizes = size(limit, settings)
        except SetupError:
            assert limit <= 512
            continue
        worked += 1
        assert used(sizes) + 40 <= limit
        assert min(sizes.connections_max, sizes.concurrency_max, sizes.lookups_max) >= 1
        assert sizes.concurrency_max <= sizes.callback_sockets_max
        assert sizes.connections_max <= settings.server.connections_max
        assert sizes.concurrency_max <= settings.delivery.concurrency_max
    assert worked > 100


@pytest.mark.parametrize("settings", CONFIGURATIONS)
def test_nothing_is_lowered_from_the_limit_that_is_named_on(settings: Config) -> None:
    wanted = size(None, settings).wanted
    enough = size(wanted, settings)
    assert not enough.lowered
    assert enough.connections_max == settings.server.connections_max
    assert enough.concurrency_max == settings.delivery.concurrency_max
    assert (enough.backlog, enough.handshakes_max) == (BACKLOG, TLS_HANDSHAKES_MAX)
    assert fitted(settings, enough) == settings


def test_the_default_limits_fit_into_the_limit_of_the_documented_unit_file() -> None:
    for settings in (config(), config(store__url="postgresql://host/database")):
        assert not size(16_384, settings).lowered


def test_with_few_descriptors_neither_the_api_nor_the_callbacks_take_those_of_the_other() -> None:
    small = size(256, config())
    assert min(small.connections_max, small.concurrency_max) >= 30
    few_clients = size(1_024, config(server__connections_max=20))
    assert few_clients.connections_max == 20
    assert few_clients.concurrency_max > 500, "what the API does not want is for callbacks"
    few_callbacks = size(1_024, config(delivery__concurrency_max=20))
    assert few_callbacks.concurrency_max == 20
    assert few_callbacks.connections_max > 500


def test_the_configuration_gets_the_limits_that_fit_and_the_log_names_them() -> None:
    settings = config()
    sizes = size(1_024, settings)
    lowered = fitted(settings, sizes)
    assert lowered.server.connections_max == sizes.connections_max < 4_096
    assert lowered.delivery.concurrency_max == sizes.concurrency_max < 1_024
    text = lowered_text(settings, sizes)
    for part in ("1024 open files", f"connections_max is {sizes.connections_max} instead of 4096", "LimitNOFILE="):
        assert part in text


def test_too_few_to_work_is_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(SetupError, match=r"at least (\d+) are needed.*LimitNOFILE=\d+.*ulimit -Hn") as caught:
        size(100, config())
    needed = int(str(caught.value).partition("at least ")[2].split()[0])
    least = size(needed, config())
    assert least.lowered
    assert min(least.connections_max, least.concurrency_max) >= 16
    with pytest.raises(SetupError):
        size(needed - 8, config())


def test_the_soft_limit_is_raised_to_the_hard_limit() -> None:
    """In a process of its own: a limit that was lowered cannot be raised again."""
    lines = (
        "import resource",
        "from duetime.descriptors import raised_limit",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))",
        "print(raised_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))",
        "print(raised_limit())",
    )
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["512", "512", "512", "512"]
