"""Access, decided before any route sees the request: API keys, and the pages in a user's browser.

A page of any site can send requests to a server on the user's machine. It cannot read the response, but the work is
done. By DNS rebinding, a name of the page's own site leads to the server's address; then it reads the response as well.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.app.http.access_log import trace_of
from tessera.app.http.errors import ForeignPageError, HostError, error_response
from tessera.app.keys.key_ring import KeyHolder, KeyRing
from tessera.engine.contract.errors import AuthenticationError, RequestError

# The only paths that need no key, beside those of the page's files; compared whole.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version", "/metrics"})


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES = frozenset({b"same-origin", b"none"})  # of Sec-Fetch-Site; none: not begun by a page
ANY = "*"
HOLDER_OF_KEYS = "holder_of_keys"  # in a scope's state
KNOWN_HOSTS = 64  # of the Host field, remembered with the decision about each


class AuthMiddleware:
    """Refuses requests without a known key with 401; puts the key's holder and tenant into the request's state.

    `page_paths` need no key either: the page is the same everywhere, and sends the key with its own requests.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, page_paths: Collection[str] = ()) -> None:
        self._app = app
        self._ring = ring
        self._open_paths = OPEN_PATHS.union(page_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            trace = trace_of(scope)
            try:
                holder = self._holder(scope)
            except AuthenticationError as error:
                trace.error = error
                await error_response(error, trace.dialect)(scope, receive, send)
                return
            trace.context["key"] = holder.name
            scope.setdefault("state", {}).update(holder=holder, tenant=holder.tenant)
        await self._app(scope, receive, send)

    def _holder(self, scope: Scope) -> KeyHolder:
        holder = holder_of_keys(scope, self._ring)
        if holder is not None:
            return holder
        if not _given_keys(scope):
            raise AuthenticationError("No API key was given: send it as 'Authorization: Bearer KEY'.")
        raise AuthenticationError("The API key is not valid.")


def holder_of_keys(scope: Scope, ring: KeyRing) -> KeyHolder | None:
    """The holder of the first key in the headers that is known; looked for once in a request."""
    state = scope.setdefault("state", {})
    if HOLDER_OF_KEYS not in state:
        state[HOLDER_OF_KEYS] = next(filter(None, map(ring.find, _given_keys(scope))), None)
    found: KeyHolder | None = state[HOLDER_OF_KEYS]
    return found


def _given_keys(scope: Scope) -> list[bytes]:
    """From the first `Authorization: Bearer KEY` and the first `x-api-key: KEY`, which Anthropic's clients send."""
    headers = dict(reversed(scope["headers"]))
    keys = [headers[b"x-api-key"]] if b"x-api-key" in headers else []
    if b"authorization" in headers:
        scheme, _, key = headers[b"authorization"].partition(b" ")
        keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys


class OriginMiddleware:
    """Refuses requests of other sites' pages, and those to a name that is not the server's, with 403.

    Args:
        allowed_hosts: names that Host may have, beside addresses and localhost; `*` allows all.
        cors_origins: origins whose pages may call the server; `*` allows all.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str], cors_origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._is_own = lru_cache(KNOWN_HOSTS)(self._names_server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                trace = trace_of(scope)
                trace.error = error
                await error_response(error, trace.dialect)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if ANY not in self._hosts and not self._is_own(host):
            raise HostError(f"This server is not called {host[:100]!r}: see --allowed-host.")
        if scope["method"] in SAFE_METHODS or ANY.encode() in self._origins:
            return
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if origin in self._origins or site in OWN_SITES or (site is None and origin is None):
            return
        if site is None and origin is not None and _authority(origin.decode("latin-1")) == host.lower():
            return  # a browser of before 2023
        raise ForeignPageError("Pages of other origins may not call this server: see --cors-origin.")

    def _names_server(self, host: str) -> bool:
        """An address cannot be rebound, so any will do."""
        name = _hostname(host)
        if name is None:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _hostname(host: str) -> str | None:
    """Without the port; None for what is no host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
