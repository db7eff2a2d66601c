"""API keys: compared as SHA-256 digests in constant time, before any route sees the request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import error_response
from engine.errors import AuthenticationError

# The only paths that answer without a key, compared whole.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})


class AuthMiddleware:
    """Refuses with 401 what carries no known key; puts the key's tenant name into the request's state."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN_PATHS:
            try:
                tenant = self._tenant(scope)
            except AuthenticationError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if given is None:
            raise AuthenticationError("No API key was given: send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        known = sum([hmac.compare_digest(digest, accepted) for accepted in self._digests])
        if scheme.lower() != b"bearer" or not known:
            raise AuthenticationError("The API key is not valid.")
        return hashlib.sha256(b"tenant" + digest).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
