"""Java 17, which Cassandra and Kafka run on."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path

from .install import debian_package
from .server import open_to_all

__all__ = ["java_17", "java_version"]


def java_17() -> Path:
    """Its home folder. Cassandra 5.0 does not start on the newest Java."""
    java = shutil.which("java")
    homes = [
        *([Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []),
        *([Path(java).resolve().parents[1]] if java else []),
        *sorted(Path("/usr/lib/jvm").glob("*17*")),
    ]
    for home in homes:
        if java_version(home).startswith("17.") and (os.geteuid() != 0 or open_to_all(home)):
            return home
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    home = Path(f"/usr/lib/jvm/java-17-openjdk-{machine}")
    debian_package("openjdk-17-jre-headless", home / "bin" / "java")
    return home


def java_version(home: Path) -> str:
    try:
        told = re.search(r'^JAVA_RUNTIME_VERSION="(\S+)"$', (home / "release").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return told[1] if told else ""
