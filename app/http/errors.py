"""Failures of the HTTP layer, and the response that a failed request gets in its API's dialect."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from tessera.app.http.dialect import OPENAI, Dialect
from tessera.engine.contract.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)

UNAVAILABLE_RETRY_AFTER = 2  # seconds


class PayloadTooLargeError(InvalidRequestError):
    """A request body beyond the limit."""

    status = 413
    code = "request_too_large"


class BodyTimeoutError(InvalidRequestError):
    """A request body that did not arrive in time."""

    status = 408
    code = "request_timeout"


class MediaTypeError(InvalidRequestError):
    """A request body that is not declared as JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class HostError(InvalidRequestError):
    """A request to a name that this server does not have."""

    status = 403
    code = "host_not_allowed"


class ForeignPageError(InvalidRequestError):
    """A request of a page of another origin."""

    status = 403
    code = "origin_not_allowed"


class PermissionDeniedError(InvalidRequestError):
    """A request that its key does not allow."""

    status = 403
    code = "insufficient_permissions"


class GenerationTimeoutError(EngineError):
    """A generation that took longer than the server allows."""

    status = 504
    code = "generation_timeout"


class ShutdownError(EngineUnavailableError):
    """A request that was not answered before the server's drain ended."""

    code = "server_shutdown"

    def __init__(self) -> None:
        super().__init__("The server is shutting down and could not finish this request; please try again.")


class InternalError(EngineError):
    """A fault of the server itself; the details go to the log, not to the client."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server failed to process this request; its log names the cause under the x-request-id.")


class ClientDisconnectedError(Exception):
    """The client is gone."""


def error_response(error: RequestError, dialect: Dialect = OPENAI) -> Response:
    """The response to a request that fails before anything was sent."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    elif error.status == EngineUnavailableError.status:  # also that of a store that cannot be read
        headers["retry-after"] = str(UNAVAILABLE_RETRY_AFTER)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, (PayloadTooLargeError, BodyTimeoutError)):
        headers["connection"] = "close"
    return Response(orjson.dumps(dialect.error_object(error)), error.status, headers, "application/json")
