"""What DynamoDB's errors mean: whether a request was applied, and whether it is worth repeating."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable

try:
    import aiohttp
    from botocore import exceptions as aws
    from botocore.parsers import ResponseParserError
except ImportError:
    raise SetupError(
        "store.url: DynamoDB needs its driver: pip install 'duetime[dynamodb]'", field="store.url"
    ) from None

__all__ = [
    "CONDITION_FAILED",
    "ERROR_MEANINGS",
    "ConditionFailed",
    "ErrorMeaning",
    "meaning_of",
    "setup_error",
    "store_error",
]


class ErrorMeaning(enum.Enum):
    """What an error means for the request that failed."""

    CONDITION = "condition"  # not applied: a condition of the request was not met
    BUSY = "busy"  # not applied: throttled, or in conflict with another transaction; may succeed later
    UNREACHABLE = "unreachable"  # not applied: the service was not reached; may succeed later
    REJECTED = "rejected"  # not applied, and repeating it will not help
    UNKNOWN = "unknown"  # unknown outcome


# Every error that the driver's description of the service has for our operations, and the errors common to all of AWS.
# tests/unit/stores/test_dynamodb_errors.py fails if one is missing. Errors that are not listed are UNKNOWN.
ERROR_MEANINGS: Final[dict[str, ErrorMeaning]] = {
    "ConditionalCheckFailedException": ErrorMeaning.CONDITION,
    "TransactionCanceledException": ErrorMeaning.REJECTED,  # depends on its reasons, see below
    **dict.fromkeys(
        (
            "ProvisionedThroughputExceededException",
            "RequestLimitExceeded",
            "ThrottlingException",
            "Throttling",
            "TooManyRequestsException",
            "LimitExceededException",
            "TransactionConflictException",
            "ReplicatedWriteConflictException",
        ),
        ErrorMeaning.BUSY,
    ),
    **dict.fromkeys(
        (
            "AccessDeniedException",
            "ExpiredTokenException",
            "IncompleteSignatureException",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "ItemCollectionSizeLimitExceededException",
            "MissingAuthenticationTokenException",
            "NotAuthorized",
            "OptInRequired",
            "RequestExpired",
            "ResourceInUseException",
            "ResourceNotFoundException",
            "SerializationException",
            "SignatureDoesNotMatch",
            "TableNotFoundException",
            "UnknownOperationException",
            "UnrecognizedClientException",
            "ValidationException",
        ),
        ErrorMeaning.REJECTED,
    ),
    **dict.fromkeys(
        (
            "IdempotentParameterMismatchException",  # the token was used for another request: never by us
            "InternalFailure",
            "InternalServerError",
            "ServiceUnavailable",
            "ServiceUnavailableException",
            "TransactionInProgressException",  # our earlier attempt is still in progress: wait for it
            "Unavailable",
        ),
        ErrorMeaning.UNKNOWN,
    ),
}

# Why a transaction was cancelled: one code for each of its actions. A cancelled transaction was not applied, whatever
# the codes are.
CONDITION_FAILED: Final = "ConditionalCheckFailed"
_BUSY_REASONS = frozenset({"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError"})

_NEVER_SENT = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
    aws.MetadataRetrievalError,
    aws.NoRegionError,
    aws.ParamValidationError,
    aws.ConnectTimeoutError,
    aws.ProxyConnectionError,
    aws.SSLError,  # the driver raises it only while connecting
)


def meaning_of(error: BaseException) -> ErrorMeaning:
    if isinstance(error, aws.ClientError):
        code = _code(error)
        if code == "TransactionCanceledException":
            reasons = reasons_of(error)
            if CONDITION_FAILED in reasons:
                return ErrorMeaning.CONDITION
            return ErrorMeaning.BUSY if _BUSY_REASONS.intersection(reasons) else ErrorMeaning.REJECTED
        return ERROR_MEANINGS.get(code, ErrorMeaning.UNKNOWN)
    if isinstance(error, _NEVER_SENT):
        return ErrorMeaning.UNREACHABLE
    if isinstance(error, aws.EndpointConnectionError):
        # The driver raises the same error for a connection that was reset later and for one that was never opened.
        return (
            ErrorMeaning.UNREACHABLE
            if isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorError)
            else ErrorMeaning.UNKNOWN
        )
    return ErrorMeaning.UNKNOWN


def reasons_of(error: aws.ClientError) -> list[str]:
    return [str(reason.get("Code", "None")) for reason in error.response.get("CancellationReasons", ())]


def store_error(error: BaseException, meaning: ErrorMeaning, *, may_be_applied: bool) -> StoreError:
    """The StoreError for the engine. `may_be_applied`: this attempt, or one before it, may have been applied."""
    detail = f"dynamodb: {_error_text(error)}"
    if may_be_applied:
        return OutcomeUnknown(detail)
    return StoreThrottled(detail) if meaning is ErrorMeaning.BUSY else StoreUnavailable(detail)


def _code(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _error_text(error: BaseException) -> str:
    if isinstance(error, aws.ClientError):
        reasons = {reason for reason in reasons_of(error) if reason != "None"}
        message = str(error.response.get("Error", {}).get("Message") or "").partition("\n")[0]
        if "ItemCollectionSizeLimitExceeded" in reasons or _code(error).startswith("ItemCollectionSizeLimit"):
            return "a shard has reached the limit of 10 GB of DynamoDB; use a namespace with more shards"
        return f"{_code(error)}: {', '.join(sorted(reasons)) or message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (str(error) or type(error).__name__).partition("\n")[0]


class ConditionFailed(Exception):
    """A condition was not met. `may_be_applied`: an earlier attempt may have been applied, and may be the reason."""

    def __init__(self, error: aws.ClientError, may_be_applied: bool) -> None:
        super().__init__(_error_text(error))
        self.may_be_applied = may_be_applied
        self.reasons = reasons_of(error)
        self.item: Mapping[str, Any] | None = error.response.get("Item") or None


def setup_error(label: str, error: BaseException) -> SetupError | StoreError:
    """The error for a failure while opening, with what to do about it. An unreachable service is not a SetupError: it
    may come back."""
    for code, explanation in _EXPLANATIONS.items():
        if isinstance(error, aws.ClientError) and _code(error) == code:
            return _setup(label, f"{explanation} ({_error_text(error)})")
    if isinstance(error, ResponseParserError) or (
        isinstance(error, aws.ClientError) and _code(error) not in ERROR_MEANINGS and _status(error) < 500
    ):
        return _setup(label, f"{_UNSUPPORTED} ({_error_text(error)})")
    if isinstance(error, aws.SSLError):
        return _setup(label, f"no TLS connection; set a certificate authority with ?ca_file= ({_error_text(error)})")
    if isinstance(error, aws.NoRegionError):
        return _setup(label, "no region: set it with dynamodb://REGION/PREFIX or AWS_DEFAULT_REGION")
    if isinstance(error, aws.NoCredentialsError):
        return _setup(label, "no credentials in the environment, in a profile or by a role")
    if isinstance(error, (aws.ProfileNotFound, aws.PartialCredentialsError, aws.ParamValidationError, ValueError)):
        return _setup(label, _error_text(error))
    meaning = meaning_of(error)
    if meaning is ErrorMeaning.UNREACHABLE:
        return StoreUnavailable(f"dynamodb: {label} cannot be reached ({_error_text(error)})")
    return store_error(error, meaning, may_be_applied=False)


def _setup(label: str, what: str) -> SetupError:
    return SetupError(f"store.url: {label}: {what}", field="store.url")


_CREDENTIALS: Final = "does not accept these credentials"
_PERMISSIONS: Final = "does not give the needed permissions; docs/operating/dynamodb.md lists them"
_UNSUPPORTED: Final = "is not DynamoDB, or does not support the needed operations"
_EXPLANATIONS: Final[dict[str, str]] = {
    "UnrecognizedClientException": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "MissingAuthenticationTokenException": _CREDENTIALS,
    "IncompleteSignatureException": _CREDENTIALS,
    "ExpiredTokenException": f"{_CREDENTIALS}: they have expired",
    "InvalidSignatureException": "does not accept the signature: a wrong secret, or a clock that is wrong by minutes",
    "RequestExpired": "does not accept the signature: this machine's clock is wrong by minutes",
    "AccessDeniedException": _PERMISSIONS,
    "OptInRequired": "is in a region that is not enabled for this account",
    "NotAuthorized": _PERMISSIONS,
    "UnknownOperationException": _UNSUPPORTED,
    "SerializationException": _UNSUPPORTED,
}
