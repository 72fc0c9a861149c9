"""Problems of the API become errors of the client."""

from __future__ import annotations

import pytest
from scripted_server import Answer, Peer, problem

from duetime.client import (
    AsyncClient,
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    Unauthenticated,
)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(problem(400, "invalid_field", field="executeAt"), 400), InvalidField),
        (Answer(problem(401, "unauthenticated"), 401), Unauthenticated),
        (Answer(problem(404, "timer_not_found"), 404), NotFound),
        (Answer(problem(409, "if_absent"), 409), Conflict),
        (Answer(problem(500, "internal"), 500), DuetimeError),
        (Answer(problem(404, "path_not_found"), 404), DuetimeError),  # no server there, not: no such timer
        (Answer("<html>", 404), DuetimeError),
    ],
)
async def test_a_problem_becomes_an_error_of_its_class_and_is_not_retried(
    peer: Peer, client: AsyncClient, answer: Answer, kind: type[DuetimeError]
) -> None:
    peer.script = [answer]
    with pytest.raises(DuetimeError) as caught:
        await client.get("a")
    assert type(caught.value) is kind
    assert caught.value.status == answer.status
    assert len(peer.requests) == 1
    if isinstance(answer.body, dict):
        assert caught.value.code == answer.body["code"]
        assert caught.value.field == answer.body.get("field")
