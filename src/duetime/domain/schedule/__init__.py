"""Wall-clock schedules: local times in a zone, with recurrence, as instants. Pure."""

from duetime.domain.schedule.schedule import (
    EXCLUDED_DATES_MAX,
    Occurrence,
    Schedule,
    check_schedule,
    occurrences,
    with_start,
)
from duetime.domain.schedule.steps import PREVIEW_STEPS_MAX, SEARCH_STEPS_MAX, Steps
from duetime.domain.schedule.zones import TZDATA_VERSION

__all__ = [
    "EXCLUDED_DATES_MAX",
    "PREVIEW_STEPS_MAX",
    "SEARCH_STEPS_MAX",
    "TZDATA_VERSION",
    "Occurrence",
    "Schedule",
    "Steps",
    "check_schedule",
    "occurrences",
    "with_start",
]
