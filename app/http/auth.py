"""API keys: compared as SHA-256 digests in constant time, before any route sees the request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.app.http.access_log import trace_of
from tessera.app.http.errors import error_response
from tessera.engine.contract.errors import AuthenticationError

# The only paths that need no key, compared whole. The status page's files are the same everywhere: the page asks for
# the key and sends it with its own requests.
PAGE_PATHS = ("/", "/ui/status.css", "/ui/status.js", "/ui/chat.js", "/ui/key.js", "/ui/icon.svg")
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", *PAGE_PATHS})


class AcceptedKeys:
    """The digests of the keys that are accepted at the moment."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self.replace(api_keys)

    def replace(self, api_keys: Sequence[str]) -> None:
        """Accept these from now on; requests under way go on."""
        assert api_keys, "no keys would leave every route open"
        self.digests = tuple(_digest(key.encode()) for key in api_keys)


class AuthMiddleware:
    """Refuses requests without a known key with 401; puts the tenant of the key into the request's state."""

    def __init__(self, app: ASGIApp, accepted: AcceptedKeys) -> None:
        self._app = app
        self._accepted = accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                tenant = self._tenant(scope)
            except AuthenticationError as error:
                trace = trace_of(scope)
                trace.error = error
                await error_response(error, trace.dialect)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        given = _given_keys(scope)
        if not given:
            raise AuthenticationError("No API key was given: send it as 'Authorization: Bearer KEY'.")
        for key in given:
            digest = _digest(key)
            if sum([hmac.compare_digest(digest, accepted) for accepted in self._accepted.digests]):
                return hashlib.sha256(b"tenant" + digest).hexdigest()
        raise AuthenticationError("The API key is not valid.")


def _given_keys(scope: Scope) -> list[bytes]:
    """From the first `Authorization: Bearer KEY` and the first `x-api-key: KEY`, which Anthropic's clients send."""
    headers = dict(reversed(scope["headers"]))
    keys = [headers[b"x-api-key"]] if b"x-api-key" in headers else []
    if b"authorization" in headers:
        scheme, _, key = headers[b"authorization"].partition(b" ")
        keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
