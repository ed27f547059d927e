"""Everything a caller can cause or must be told, as exceptions. Each dialect turns them into its own status and body.

The message is a sentence that names the value, the limit and the next step; `status` is what plain HTTP would say.
"""

from attnserve.errors import AttnserveError

CANNOT_START = "the service cannot start"  # how the readiness probe's answer begins when waiting is of no use


class ServiceError(AttnserveError):
    """Base of all of them. `param` is the request field at fault."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ServiceError):
    """The request can be read but not be meant: a field out of range, of the wrong type, or in conflict with another."""

    status = 422
    code = "invalid_request"


class MalformedBody(InvalidRequest):
    """The body is not JSON at all."""

    status = 400
    code = "malformed_body"


class EmptyInput(InvalidRequest):
    """Nothing to work on: an empty string or an empty list."""

    status = 400
    code = "empty_input"


class TokenizationFailed(InvalidRequest):
    """An input that cannot become ids of this model: outside its vocabulary, or over its length."""

    code = "tokenizer"


class InputTooLong(TokenizationFailed):
    """An input that is over the model's length and must not be cut."""

    code = "context_length_exceeded"  # OpenAI's, which clients look for


class BatchTooLarge(InvalidRequest):
    """More inputs in one request than the service takes."""

    code = "batch_too_large"


class NeverFits(ServiceError):
    """A request so large that it could not be admitted even by an idle service. Trying again is useless."""

    status = 413
    code = "too_large"


class BodyTooLarge(ServiceError):
    status = 413
    code = "body_too_large"


class UnsupportedEncoding(ServiceError):
    """A body in a content-encoding that the service does not read."""

    status = 415
    code = "unsupported_content_encoding"


class BodyTooSlow(ServiceError):
    """The body of a request stalled, or arrived more slowly than the limit."""

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
    """A browser sends a request from a page whose origin may not call this service."""

    status = 403
    code = "origin_refused"


class WrongKind(ServiceError):
    """The model is of another kind than the route needs (an encoder asked for rerank logits, say)."""

    status = 424
    code = "wrong_model_kind"


class Overloaded(ServiceError):
    """The queue is full. `retry_after_s` is when room for this request is expected, from the measured rate."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A tenant has used what its limits allow; others are served. `retry_after_s` is when there will be room for one request."""

    code = "rate_limit_exceeded"  # OpenAI's


class QueueTooLong(Overloaded):
    """Any request that joins this queue now would wait too long."""


class DeadlineExceeded(ServiceError):
    status = 504
    code = "deadline_exceeded"


class NotReady(ServiceError):
    """Still warming up, or shutting down."""

    status = 503
    code = "not_ready"
    elsewhere = False  # whether another replica may answer the same request at once

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RuntimeFailed(ServiceError):
    """The runtime raised, or its answer must not leave the house (NaN, Inf, zero length)."""

    status = 500
    code = "backend_failure"


class StartFailed(AttnserveError):
    """The service did not come up; the message says what stood in the way."""
