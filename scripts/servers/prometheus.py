"""promtool (of Debian's package prometheus): checks rules and metrics as Prometheus reads them. No server is run."""

from __future__ import annotations

from pathlib import Path

from .install import debian_root

__all__ = ["promtool"]


def promtool() -> Path:
    # Of one release, so that its version (2.42) stays the same. It runs with the libc of this machine.
    return debian_root("prometheus-2.42", "bookworm", "prometheus") / "usr" / "bin" / "promtool"
