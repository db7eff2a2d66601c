"""Pure ASGI middleware: the server's request id on every answer, its line in the log, and the last catch for faults."""

from __future__ import annotations

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.app.http.access_log import CLIENT_CLOSED_REQUEST, log_request, trace_of
from tessera.app.http.counts import OTHER, HttpCounts
from tessera.app.http.errors import InternalError, error_response, is_anthropic_path

logger = logging.getLogger("tessera.app")

MAX_CLIENT_ID_LENGTH = 512


class RequestIdMiddleware:
    """Names each request `x-request-id`, echoes the client's own id apart, turns faults into a plain 500; when the
    request is over, counts it in `counts` and writes its line of the log."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        trace = trace_of(scope)
        client_id = _echoed_client_id(scope)
        headers = [(b"x-request-id", request_id.encode()), *client_id]
        if is_anthropic_path(scope["path"]):
            headers.append((b"request-id", request_id.encode()))
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            trace.error = InternalError()
            if status is not None:
                raise
            await error_response(trace.error, scope["path"])(scope, receive, send_with_id)
        finally:
            self._counts.add(_endpoint(scope), CLIENT_CLOSED_REQUEST if status is None else status)
            log_request(scope, request_id, client_id[0][1].decode() if client_id else None, status)


def _endpoint(scope: Scope) -> str:
    """The path with its variable parts as names, so that their number is bounded."""
    route = scope.get("route")  # of a request that has come as far as that
    return getattr(route, "path", OTHER)


def _echoed_client_id(scope: Scope) -> list[tuple[bytes, bytes]]:
    for name, value in scope["headers"]:
        if name in (b"x-request-id", b"x-client-request-id"):
            printable = all(0x20 < byte < 0x7F for byte in value)
            if printable and 0 < len(value) <= MAX_CLIENT_ID_LENGTH:
                return [(b"x-client-request-id", value)]
    return []
