"""Errors as problems (RFC 9457)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from duetime.errors import DuetimeError


class ProblemJson(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An error (RFC 9457). `code` is for programs, `detail` for people."""

    type: Annotated[str, Meta(examples=["urn:duetime:problem:invalid_field"])]
    title: str
    status: Annotated[int, Meta(description="The HTTP status.")]
    detail: str
    code: Annotated[
        str,
        Meta(
            description="Stable name of the problem. `not_applied`: nothing was changed, retry later. "
            "`outcome_unknown`: the write may or may not have been applied; reads, deletes and creates with "
            "`ifAbsent` may be repeated.",
            examples=["invalid_field"],
        ),
    ]
    field: Annotated[str, Meta(description="The wrong field.", examples=["executeAt"])] | None = None
    request_id: (
        Annotated[str, Meta(description="Of an internal error: the id of its entry in the server's log.")] | None
    ) = None


def problem_of(error: DuetimeError, request_id: str | None = None) -> ProblemJson:
    return ProblemJson(
        type=f"urn:duetime:problem:{error.code}",
        title=error.title,
        status=error.status,
        detail=error.detail,
        code=error.code,
        field=error.field,
        request_id=request_id,
    )


def encode_problem(problem: ProblemJson) -> bytes:
    return msgspec.json.encode(problem)
