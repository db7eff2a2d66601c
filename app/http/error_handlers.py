"""Exception handlers: every failure of a route becomes an error response and is noted in the request's trace."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tessera.app.http.access_log import CLIENT_CLOSED_REQUEST, trace_of
from tessera.app.http.errors import ClientDisconnectedError, error_response
from tessera.engine.contract.errors import RequestError


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    trace = trace_of(request.scope)
    trace.error = error
    return error_response(error, trace.dialect)


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
    trace = trace_of(request.scope)
    trace.error = failure
    response = error_response(failure, trace.dialect)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # never read
