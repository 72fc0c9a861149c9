"""The types of the client have the fields of the API."""

from __future__ import annotations

import msgspec
import pytest

from duetime import wire
from duetime.client import (
    models,
)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (models.Timer, wire.TimerJson),
        (models.Namespace, wire.NamespaceJson),
        (models.Flow, wire.FlowJson),
        (models.FlowPage, wire.FlowsAnswer),
        (models.Unanswered, wire.UnansweredJson),
        (models.Schedule, wire.ScheduleJson),
        (models.Occurrence, wire.OccurrenceJson),
        (models.SchedulePreview, wire.PreviewAnswer),
        (models.ClusterStatus, wire.ClusterStatusJson),
        (models.Member, wire.MemberJson),
        (models.Shard, wire.ShardJson),
        (models.ShardCounts, wire.ShardCountsJson),
        (models.HeldFor, wire.HeldForJson),
        (models.Broker, wire.BrokerJson),
        (models._CreateJson, wire.CreateTimerJson),
        (models.Created, wire.CreatedAnswer),
    ],
)
def test_the_models_of_the_client_have_every_field_of_the_wire(ours: type, theirs: type) -> None:
    def names(kind: type) -> set[str]:
        return {field.encode_name for field in msgspec.structs.fields(kind)}

    assert names(ours) == names(theirs)
