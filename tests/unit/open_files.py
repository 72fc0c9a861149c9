"""A limit of open files for a part of a test."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_more_files"]


@contextmanager
def no_more_files() -> Iterator[None]:
    """What is open stays open. A new file can be opened only in the place of one that was closed meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
