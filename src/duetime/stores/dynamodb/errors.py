"""What DynamoDB's errors mean: whether a request was applied, and whether it is worth asking again."""

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

__all__ = ["CONDITION_FAILED", "VERDICTS", "Refused", "Verdict", "judged", "setup_error", "store_error"]


class Verdict(enum.Enum):
    """What an error says of the request that met it."""

    CONDITION = "condition"  # not applied: a condition of ours was not met
    BUSY = "busy"  # not applied: too much, or somebody else's transaction is in the way; later it may work
    AWAY = "away"  # not applied: nobody was reached; later it may work
    REFUSED = "refused"  # not applied, and trying again will not help
    MAYBE = "maybe"  # nobody knows


# Every error that the service's own description has for what we ask of it, and those common to all of AWS.
# tests/unit/stores/test_dynamodb_errors.py fails when one is missing; what is not listed here is MAYBE.
VERDICTS: Final[dict[str, Verdict]] = {
    "ConditionalCheckFailedException": Verdict.CONDITION,
    "TransactionCanceledException": Verdict.REFUSED,  # by its reasons, see below
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
        Verdict.BUSY,
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
        Verdict.REFUSED,
    ),
    **dict.fromkeys(
        (
            "IdempotentParameterMismatchException",  # the token is known, and for something else: never by us
            "InternalFailure",
            "InternalServerError",
            "ServiceUnavailable",
            "ServiceUnavailableException",
            "TransactionInProgressException",  # the one that we sent before: its end is worth waiting for
            "Unavailable",
        ),
        Verdict.MAYBE,
    ),
}

# Why a transaction was cancelled, one code for each of its parts. Cancelled is not applied, whatever they say.
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
    aws.SSLError,  # while connecting: the driver says so of nothing else
)


def judged(error: BaseException) -> Verdict:
    if isinstance(error, aws.ClientError):
        code = _code(error)
        if code == "TransactionCanceledException":
            reasons = reasons_of(error)
            if CONDITION_FAILED in reasons:
                return Verdict.CONDITION
            return Verdict.BUSY if _BUSY_REASONS.intersection(reasons) else Verdict.REFUSED
        return VERDICTS.get(code, Verdict.MAYBE)
    if isinstance(error, _NEVER_SENT):
        return Verdict.AWAY
    if isinstance(error, aws.EndpointConnectionError):
        # The driver calls a connection that was reset in the middle by the same name as one that never came about.
        return Verdict.AWAY if isinstance(error.kwargs.get("error"), aiohttp.ClientConnectorError) else Verdict.MAYBE
    return Verdict.MAYBE


def reasons_of(error: aws.ClientError) -> list[str]:
    return [str(reason.get("Code", "None")) for reason in error.response.get("CancellationReasons", ())]


def store_error(error: BaseException, verdict: Verdict, *, in_doubt: bool) -> StoreError:
    """What it means to the engine. `in_doubt`: it, or one before it, may have been applied."""
    detail = f"dynamodb: {_in_words(error)}"
    if in_doubt:
        return OutcomeUnknown(detail)
    return StoreThrottled(detail) if verdict is Verdict.BUSY else StoreUnavailable(detail)


def _code(error: aws.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: aws.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _in_words(error: BaseException) -> str:
    if isinstance(error, aws.ClientError):
        reasons = {reason for reason in reasons_of(error) if reason != "None"}
        said = str(error.response.get("Error", {}).get("Message") or "").partition("\n")[0]
        if "ItemCollectionSizeLimitExceeded" in reasons or _code(error).startswith("ItemCollectionSizeLimit"):
            return "a shard has reached the 10 GB that DynamoDB lets it have; a namespace with more shards is needed"
        return f"{_code(error)}: {', '.join(sorted(reasons)) or said}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (str(error) or type(error).__name__).partition("\n")[0]


class Refused(Exception):
    """A condition was not met. `in_doubt`: an attempt before this one may have been applied, and be the reason."""

    def __init__(self, error: aws.ClientError, in_doubt: bool) -> None:
        super().__init__(_in_words(error))
        self.in_doubt = in_doubt
        self.reasons = reasons_of(error)
        self.item: Mapping[str, Any] | None = error.response.get("Item") or None


def setup_error(label: str, error: BaseException) -> SetupError | StoreError:
    """What goes wrong while opening: said so that one knows what to do. A service that is away may come back."""
    for code, explanation in _EXPLANATIONS.items():
        if isinstance(error, aws.ClientError) and _code(error) == code:
            return _setup(label, f"{explanation} ({_in_words(error)})")
    if isinstance(error, ResponseParserError) or (
        isinstance(error, aws.ClientError) and _code(error) not in VERDICTS and _status(error) < 500
    ):
        return _setup(label, f"{_EXPLANATIONS['UnknownOperationException']} ({_in_words(error)})")
    if isinstance(error, aws.SSLError):
        return _setup(label, f"no TLS connection as asked for; ?ca_file= names an authority ({_in_words(error)})")
    if isinstance(error, aws.NoRegionError):
        return _setup(label, "no region: dynamodb://REGION/PREFIX, or AWS_DEFAULT_REGION")
    if isinstance(error, aws.NoCredentialsError):
        return _setup(label, "no credentials: neither in the environment nor in a profile nor by a role")
    if isinstance(error, (aws.ProfileNotFound, aws.PartialCredentialsError, aws.ParamValidationError, ValueError)):
        return _setup(label, _in_words(error))
    verdict = judged(error)
    if verdict is Verdict.AWAY:
        return StoreUnavailable(f"dynamodb: {label} cannot be reached ({_in_words(error)})")
    return store_error(error, verdict, in_doubt=False)


def _setup(label: str, what: str) -> SetupError:
    return SetupError(f"store.url: {label}: {what}", field="store.url")


_CREDENTIALS = "does not accept these credentials"
_EXPLANATIONS: Final[dict[str, str]] = {
    "UnrecognizedClientException": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "MissingAuthenticationTokenException": _CREDENTIALS,
    "IncompleteSignatureException": _CREDENTIALS,
    "ExpiredTokenException": "does not accept these credentials any more: they have expired",
    "InvalidSignatureException": "does not accept the signature: a wrong secret, or a clock that is minutes off",
    "RequestExpired": "does not accept the signature: this machine's clock is minutes off",
    "AccessDeniedException": "does not allow what is needed; the page on DynamoDB lists the permissions",
    "OptInRequired": "is a region that this account has not opted in to",
    "NotAuthorized": "does not allow what is needed; the page on DynamoDB lists the permissions",
    "UnknownOperationException": "is not DynamoDB, or one that cannot do what is needed",
    "SerializationException": "is not DynamoDB, or one that cannot do what is needed",
}
