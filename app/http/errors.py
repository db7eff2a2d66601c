"""Every failure as OpenAI's error object: `{"error": {message, type, param, code}}`, all four present."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tessera.app.http.access_log import CLIENT_CLOSED_REQUEST, trace_of
from tessera.engine.contract.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)

UNAVAILABLE_RETRY_AFTER = 2  # seconds
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class PayloadTooLargeError(InvalidRequestError):
    """A request body beyond the limit."""

    status = 413
    code = "request_too_large"


class BodyTimeoutError(InvalidRequestError):
    """A request body that did not arrive in time."""

    status = 408
    code = "request_timeout"


class MediaTypeError(InvalidRequestError):
    """A request body that is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class GenerationTimeoutError(EngineError):
    """An answer that took longer than the server allows."""

    status = 504
    code = "generation_timeout"


class InternalError(EngineError):
    """A fault of the server itself; the log has the details, the client gets none."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server failed to process this request; its log names the cause under the x-request-id.")


class ClientDisconnectedError(Exception):
    """The client is gone, nobody reads an answer."""


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error_object(error: RequestError) -> dict[str, Any]:
    """Anthropic's form, which its clients expect on its paths."""
    kind = ANTHROPIC_ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def is_anthropic_path(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def error_response(error: RequestError, path: str = "") -> Response:
    """The answer to a request that fails before anything was sent, in the form of the API that `path` is of."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    elif isinstance(error, EngineUnavailableError):
        headers["retry-after"] = str(UNAVAILABLE_RETRY_AFTER)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, (PayloadTooLargeError, BodyTimeoutError)):
        headers["connection"] = "close"
    content = anthropic_error_object(error) if is_anthropic_path(path) else error_object(error)
    return Response(orjson.dumps(content), error.status, headers, "application/json")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    trace_of(request.scope).error = error
    return error_response(error, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failure = RequestError(f"There is no {request.method} {request.url.path[:200]} here.", code="unknown_url")
    elif error.status_code == 405:
        failure = RequestError(
            f"{request.url.path[:200]} does not accept the method {request.method}.", code="method_not_allowed"
        )
    else:
        failure = RequestError(HTTPStatus(error.status_code).phrase)
    failure.status = error.status_code
    trace_of(request.scope).error = failure
    response = error_response(failure, request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
