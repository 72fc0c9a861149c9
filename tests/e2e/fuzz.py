"""How much the fuzz tests try: little and always the same in CI, more and by chance when asked.

`DUETIME_FUZZ=20` tries twenty times as many examples, other ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["TIMES", "examples"]

TIMES = int(os.environ.get("DUETIME_FUZZ", "1"))


def examples(count: int) -> settings:
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,  # a real server on a shared machine; what may take how long is bounded where it is waited for
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
