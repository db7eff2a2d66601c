"""Pure ASGI middleware: the server's request id on every answer, and the last catch for faults."""

from __future__ import annotations

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import InternalError, error_response, is_anthropic_path

logger = logging.getLogger("tessera.app")

MAX_CLIENT_ID_LENGTH = 512


class RequestIdMiddleware:
    """Names each request `x-request-id`, echoes the client's own id apart, turns faults into a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        headers = [(b"x-request-id", request_id.encode()), *_echoed_client_id(scope)]
        if is_anthropic_path(scope["path"]):
            headers.append((b"request-id", request_id.encode()))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:
                raise
            await error_response(InternalError(), scope["path"])(scope, receive, send_with_id)


def _echoed_client_id(scope: Scope) -> list[tuple[bytes, bytes]]:
    for name, value in scope["headers"]:
        if name in (b"x-request-id", b"x-client-request-id"):
            printable = all(0x20 < byte < 0x7F for byte in value)
            if printable and 0 < len(value) <= MAX_CLIENT_ID_LENGTH:
                return [(b"x-client-request-id", value)]
    return []
