"""The base class of all errors of the project, and the errors of requests.

Each dialect turns these errors into its own status and body. A message is a sentence that contains the value, the limit and a
remedy. `status` is the HTTP status, unless a dialect uses another one.
"""

CANNOT_START = "the service cannot start"  # the readiness probe's answer begins with these words if the service will never become ready


class AttnserveError(Exception):
    """An error whose message is a sentence for the user. The command line prints the message without a traceback."""


class ServiceError(AttnserveError):
    """Base class of the errors of requests. `param` is the name of the invalid field, or None if the error has no such field."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServiceError):
    """A field of the request is out of range, has the wrong type, or conflicts with another field."""

    status = 422
    code = "invalid_request"


class MalformedBody(InvalidRequest):
    """The body is not JSON."""

    status = 400
    code = "malformed_body"


class EmptyInput(InvalidRequest):
    """An input is an empty string, or there are no inputs."""

    status = 400
    code = "empty_input"


class TokenizationFailed(InvalidRequest):
    """An input cannot be converted to token ids of this model, or has token ids outside its vocabulary, or too many of them."""

    code = "tokenizer"


class InputTooLong(TokenizationFailed):
    """An input is longer than the model's limit, and the request forbids truncation."""

    code = "context_length_exceeded"  # OpenAI's error code, which clients check


class BatchTooLarge(InvalidRequest):
    """A request has more inputs than the service accepts."""

    code = "batch_too_large"


class NeverFits(ServiceError):
    """A request is too large even for an idle service, so retrying it is useless."""

    status = 413
    code = "too_large"


class BodyTooLarge(ServiceError):
    status = 413
    code = "body_too_large"


class UnsupportedEncoding(ServiceError):
    """The body of a request has a content-encoding that the service does not support."""

    status = 415
    code = "unsupported_content_encoding"


class PackageMissing(ServiceError):
    """The answer was asked for in a format that needs a Python package which is not installed."""

    status = 406
    code = "not_acceptable"


class BodyTooSlow(ServiceError):
    """The body of a request stalled, or arrived more slowly than the minimum rate."""

    status = 408
    code = "request_timeout"


class ModelNotFound(ServiceError):
    status = 404
    code = "model_not_found"


class RouteNotFound(ServiceError):
    status = 404
    code = "not_found"


class MethodNotAllowed(ServiceError):
    status = 405
    code = "method_not_allowed"


class Unauthorized(ServiceError):
    status = 401
    code = "invalid_api_key"


class OriginRefused(ServiceError):
    """The request comes from a web page whose origin is not in `cors_origins`."""

    status = 403
    code = "origin_refused"


class WrongKind(ServiceError):
    """The model is not of a kind that the route accepts, such as an encoder at a route for classifiers."""

    status = 424
    code = "wrong_model_kind"


class Overloaded(ServiceError):
    """The queue is full. `retry_after_s`: seconds until this request is expected to fit, by the measured throughput."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A tenant has reached its limit; others are still served. `retry_after_s`: seconds until its next request is allowed."""

    code = "rate_limit_exceeded"  # OpenAI's error code, which clients check


class QueueTooLong(Overloaded):
    """The queue is too long, so the request is not admitted."""


class DeadlineExceeded(ServiceError):
    status = 504
    code = "deadline_exceeded"


class NotReady(ServiceError):
    """The service is starting or shutting down, or the model does not respond."""

    status = 503
    code = "not_ready"
    elsewhere = False  # whether another replica may accept the same request at once

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RuntimeFailed(ServiceError):
    """The runtime raised an error, or its output is invalid: NaN, infinite, or a vector of length zero."""

    status = 500
    code = "backend_failure"


class StartFailed(AttnserveError):
    """The service did not start. The message contains the reason."""


class StateNotFound(ServiceError):
    """The state does not exist, or belongs to another tenant. The message does not reveal which."""

    status = 404
    code = "state_not_found"


class StateGone(ServiceError):
    """The state existed, but has expired, was evicted, or has damaged bytes in the store."""

    status = 410
    code = "state_gone"


class NameMoved(ServiceError):
    """The name of a state does not have the version that the request expects."""

    status = 412
    code = "precondition_failed"


class SpaceMoved(ServiceError):
    """The model gives vectors of another embedding space than the one that the request names."""

    status = 412
    code = "embedding_space_changed"


class DocumentMoved(ServiceError):
    """A document in the store does not have the version that its writer expects, because another process has changed the document."""

    status = 409
    code = "document_moved"


class RangeRefused(ServiceError):
    """The byte range in a request begins after the end of the requested content."""

    status = 416
    code = "range_not_satisfiable"


class KeyReused(ServiceError):
    """The idempotency key was used before for a different request."""

    status = 409
    code = "idempotency_key_reused"


class QuotaExceeded(ServiceError):
    """The tenant has reached its limit of states or bytes. Retrying the request is useless."""

    status = 403
    code = "state_quota_exceeded"


class StoreFailed(ServiceError):
    """The store of states could not be read or written."""

    status = 503
    code = "store_failed"
    retry_after_s = 5.0  # in which a disk or a Redis may come back


class StoreFull(StoreFailed):
    """The disk of the store of states has no room. What needs none, such as a deletion, still works."""

    code = "store_full"


class RunNotFound(ServiceError):
    """The run to continue does not exist, or belongs to another tenant. The message does not reveal which."""

    status = 404
    code = "run_not_found"


class Diverged(ServiceError):
    """A stream cannot be continued, because its output was computed again and differs from the output that the client has received."""

    status = 409
    code = "diverged"
