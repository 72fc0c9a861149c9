"""What DynamoDB's errors mean: not applied, worth repeating, or an unknown outcome."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from botocore import exceptions as aws
from botocore.loaders import create_loader
from botocore.model import ServiceModel
from botocore.parsers import ResponseParserError

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.stores.dynamodb.address import address_of
from duetime.stores.dynamodb.errors import ERROR_MEANINGS, ErrorMeaning, meaning_of, setup_error, store_error

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
    # These two concern replication to other services, which none of our operations uses.
    assert described - {"InvalidEndpointException", "PolicyNotFoundException"} <= set(ERROR_MEANINGS)


def test_a_failed_condition_is_reported_as_such_in_and_outside_transactions() -> None:
    assert meaning_of(_cancelled("ConditionalCheckFailed", "None")) is ErrorMeaning.CONDITION
    assert meaning_of(_cancelled("None", "ConditionalCheckFailed", "TransactionConflict")) is ErrorMeaning.CONDITION
    assert meaning_of(_raised("ConditionalCheckFailedException")) is ErrorMeaning.CONDITION


@pytest.mark.parametrize("reason", ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"])
def test_a_conflicting_or_throttled_transaction_is_busy(reason: str) -> None:
    assert meaning_of(_cancelled("None", reason)) is ErrorMeaning.BUSY


@pytest.mark.parametrize("reason", ["ItemCollectionSizeLimitExceeded", "ValidationError", "AccessDenied", "Whatever"])
def test_a_transaction_cancelled_for_another_reason_was_not_applied(reason: str) -> None:
    error = _cancelled("None", reason)
    assert meaning_of(error) is ErrorMeaning.REJECTED
    assert type(store_error(error, meaning_of(error), may_be_applied=False)) is StoreUnavailable


@pytest.mark.parametrize("code", ["ThrottlingException", "RequestLimitExceeded", "TransactionConflictException"])
def test_throttling_means_not_applied_unless_an_earlier_attempt_may_be(code: str) -> None:
    error = _raised(code)
    assert meaning_of(error) is ErrorMeaning.BUSY
    assert type(store_error(error, ErrorMeaning.BUSY, may_be_applied=False)) is StoreThrottled
    assert type(store_error(error, ErrorMeaning.BUSY, may_be_applied=True)) is OutcomeUnknown


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
def test_all_other_errors_have_an_unknown_outcome(error: Exception) -> None:
    assert meaning_of(error) is ErrorMeaning.UNKNOWN


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
def test_a_request_that_was_never_sent_was_not_applied(error: Exception) -> None:
    assert meaning_of(error) is ErrorMeaning.UNREACHABLE
    assert type(store_error(error, ErrorMeaning.UNREACHABLE, may_be_applied=False)) is StoreUnavailable


@pytest.mark.parametrize(
    ("error", "expected"),
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
def test_setup_errors_say_what_to_do_and_do_not_contain_the_secret(error: Exception, expected: str) -> None:
    said = setup_error(LABEL, error)
    assert isinstance(said, SetupError)
    assert expected in said.detail
    assert "hunter2" not in said.detail


@pytest.mark.parametrize(
    "error", [aws.ConnectTimeoutError(endpoint_url="x"), _raised("InternalServerError", 500), TimeoutError()]
)
def test_a_service_that_is_away_may_come_back(error: Exception) -> None:
    assert isinstance(setup_error(LABEL, error), StoreUnavailable)
