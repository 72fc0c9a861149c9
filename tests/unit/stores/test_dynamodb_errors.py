"""What DynamoDB's errors mean: not applied, perhaps later, or nobody knows."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from botocore import exceptions as aws
from botocore.loaders import create_loader
from botocore.model import ServiceModel
from botocore.parsers import ResponseParserError

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.stores.dynamodb.connection import address_of
from duetime.stores.dynamodb.errors import VERDICTS, Verdict, judged, setup_error, store_error

LABEL = address_of("dynamodb://key:hunter2@us-east-1/timers").label
OPERATIONS = (
    "TransactWriteItems", "UpdateItem", "PutItem", "DeleteItem", "GetItem", "Query", "CreateTable", "DescribeTable",
)  # fmt: skip


def _raised(code: str, status: int = 400, **members: object) -> aws.ClientError:
    response: dict[str, Any] = {
        "Error": {"Code": code, "Message": "told so"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return aws.ClientError(response | members, "TransactWriteItems")


def _cancelled(*codes: str) -> aws.ClientError:
    return _raised("TransactionCanceledException", CancellationReasons=[{"Code": code} for code in codes])


def test_every_error_that_the_service_describes_is_listed() -> None:
    model = ServiceModel(create_loader().load_service_model("dynamodb", "service-2"))
    described = {shape.name for name in OPERATIONS for shape in model.operation_model(name).error_shapes}
    assert len(described) > 10
    # Of the replication to other services, which no operation of ours takes part in.
    assert described - {"InvalidEndpointException", "PolicyNotFoundException"} <= set(VERDICTS)


def test_only_the_fence_of_a_transaction_says_that_a_shard_is_lost_and_conditions_go_to_who_made_them() -> None:
    assert judged(_cancelled("ConditionalCheckFailed", "None")) is Verdict.CONDITION
    assert judged(_cancelled("None", "ConditionalCheckFailed", "TransactionConflict")) is Verdict.CONDITION
    assert judged(_raised("ConditionalCheckFailedException")) is Verdict.CONDITION


@pytest.mark.parametrize("reason", ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"])
def test_a_transaction_that_is_in_the_way_or_too_much_is_worth_another_try(reason: str) -> None:
    assert judged(_cancelled("None", reason)) is Verdict.BUSY


@pytest.mark.parametrize("reason", ["ItemCollectionSizeLimitExceeded", "ValidationError", "AccessDenied", "Whatever"])
def test_a_transaction_cancelled_for_another_reason_was_not_applied_either(reason: str) -> None:
    error = _cancelled("None", reason)
    assert judged(error) is Verdict.REFUSED
    assert type(store_error(error, judged(error), in_doubt=False)) is StoreUnavailable


@pytest.mark.parametrize("code", ["ThrottlingException", "RequestLimitExceeded", "TransactionConflictException"])
def test_throttling_is_not_applied_unless_an_earlier_attempt_was(code: str) -> None:
    error = _raised(code)
    assert judged(error) is Verdict.BUSY
    assert type(store_error(error, Verdict.BUSY, in_doubt=False)) is StoreThrottled
    assert type(store_error(error, Verdict.BUSY, in_doubt=True)) is OutcomeUnknown


@pytest.mark.parametrize(
    "error",
    [
        _raised("InternalServerError", 500),
        _raised("ServiceUnavailable", 503),
        _raised("TransactionInProgressException"),
        _raised("SomethingNewException"),
        _raised("SomethingNewException", 503),
        _raised(""),
        aws.ReadTimeoutError(endpoint_url="x"),
        aws.ConnectionClosedError(endpoint_url="x"),
        aws.HTTPClientError(error=OSError()),
        # As the driver reports a connection that is reset while the answer is awaited.
        aws.EndpointConnectionError(endpoint_url="x", error=aiohttp.ClientOSError(104, "reset by peer")),
        ResponseParserError("not JSON"),
        TimeoutError(),
        RuntimeError("a bug"),
    ],
)
def test_everything_else_that_may_have_arrived_is_of_unknown_outcome(error: Exception) -> None:
    assert judged(error) is Verdict.MAYBE


@pytest.mark.parametrize(
    "error",
    [
        aws.EndpointConnectionError(
            endpoint_url="x",
            error=aiohttp.ClientConnectorError(None, OSError(111, "refused")),  # type: ignore[arg-type]
        ),
        aws.ConnectTimeoutError(endpoint_url="x"),
        aws.SSLError(endpoint_url="x", error="certificate"),
        aws.ProxyConnectionError(proxy_url="x"),
        aws.NoCredentialsError(),
        aws.CredentialRetrievalError(provider="x", error_msg="y"),
    ],
)
def test_what_never_got_there_was_not_applied(error: Exception) -> None:
    assert judged(error) is Verdict.AWAY
    assert type(store_error(error, Verdict.AWAY, in_doubt=False)) is StoreUnavailable


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_raised("UnrecognizedClientException"), "credentials"),
        (_raised("InvalidSignatureException"), "clock"),
        (_raised("ExpiredTokenException"), "expired"),
        (_raised("AccessDeniedException"), "permissions"),
        (_raised("UnknownOperationException"), "not DynamoDB"),
        (_raised("404", 404), "not DynamoDB"),
        (ResponseParserError("<html>"), "not DynamoDB"),
        (aws.NoRegionError(), "no region"),
        (aws.NoCredentialsError(), "no credentials"),
        (aws.ProfileNotFound(profile="shop"), "shop"),
        (aws.SSLError(endpoint_url="x", error="certificate"), "TLS"),
    ],
)
def test_what_cannot_work_is_said_at_the_start_without_the_secret(error: Exception, says: str) -> None:
    said = setup_error(LABEL, error)
    assert isinstance(said, SetupError)
    assert says in said.detail
    assert "hunter2" not in said.detail


@pytest.mark.parametrize(
    "error", [aws.ConnectTimeoutError(endpoint_url="x"), _raised("InternalServerError", 500), TimeoutError()]
)
def test_a_service_that_is_away_may_come_back(error: Exception) -> None:
    assert isinstance(setup_error(LABEL, error), StoreUnavailable)
