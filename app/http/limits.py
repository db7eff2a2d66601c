"""Limits before any route sees a request: its turn to start, the machine's memory, those of the request's key."""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.app.http.access_log import trace_of
from tessera.app.http.auth import OPEN_PATHS, holder_of_keys
from tessera.app.http.errors import PermissionDeniedError, error_response
from tessera.app.keys.key_ring import KeyHolder, KeyRing, account_of_owner, background_account
from tessera.app.limits.key_use import KeyUse
from tessera.app.limits.lease import Lease
from tessera.app.limits.memory_watermark import MemoryWatermark
from tessera.app.limits.start_queue import StartQueue
from tessera.engine.contract.errors import RequestError
from tessera.engine.contract.messages import NO_ACCOUNT, AccountRef

ADMINISTRATIVE_PATHS = frozenset(  # they act on all keys' requests
    {"/reset_prefix_cache", "/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
KNOWN_ADDRESSES = 4096  # of clients, remembered with the account of each
IPV6_NETWORK = 64  # bits; a client has all addresses of one


class StartMiddleware:
    """Lets a few requests go on in each pass of the event loop, in turn by account, before any of their work is done.

    To be within what finds out the client's address.

    A key counts here before it is checked for access; clients without a known one take turns by their addresses.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing | None = None) -> None:
        self._app = app
        self._ring = ring
        self._queue = StartQueue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace_of(scope)  # the wait is a part of the request's time
        async with self._queue.request(self._account_id(scope)):
            await self._app(scope, receive, send)

    def _account_id(self, scope: Scope) -> int:
        holder = holder_of_keys(scope, self._ring) if self._ring is not None else None
        return (holder.account if holder is not None else account_of(scope)).id


class LimitsMiddleware:
    """Refuses work beyond a limit with 429 or 503, and says in headers what is left of the key's.

    Only POST begins work that is limited, and requests whose key has no entry in the keys file have no limits of their
    own.
    """

    def __init__(self, app: ASGIApp, use: KeyUse, watermark: MemoryWatermark) -> None:
        self._app = app
        self._use = use
        self._watermark = watermark

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        holder = holder_of(scope)
        lease = Lease(holder.key, self._use) if holder is not None and holder.key is not None else None

        async def send_with_limits(message: Message) -> None:
            if lease is not None and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *lease.headers()]}
            await send(message)

        # Each event of a stream would pass through it.
        limited_send = send_with_limits if lease is not None else send

        try:
            self._watermark.check()
            _check_permission(scope["path"], holder)
            if lease is not None:
                lease.begin()
        except RequestError as error:
            trace = trace_of(scope)
            trace.error = error
            await error_response(error, trace.dialect)(scope, receive, limited_send)
            return
        scope.setdefault("state", {})["lease"] = lease
        try:
            await self._app(scope, receive, limited_send)
        finally:
            if lease is not None:
                lease.end()


def holder_of(scope: MutableMapping[str, Any]) -> KeyHolder | None:
    """The holder of the request's key; None on a server without keys."""
    holder: KeyHolder | None = scope.get("state", {}).get("holder")
    return holder


def lease_of(scope: MutableMapping[str, Any]) -> Lease | None:
    """The request's hold on its key's limits; None where it has none."""
    lease: Lease | None = scope.get("state", {}).get("lease")
    return lease


def account_of(scope: MutableMapping[str, Any]) -> AccountRef:
    """The engine's account for a request: its key's, or its client address's on a server without keys.

    Each tenant's work in the background, such as its batches, has one of its own.
    """
    holder = holder_of(scope)
    if holder is not None:
        return holder.account
    state = scope.get("state", {})
    if state.get("in_background"):
        return background_account(state.get("tenant", ""))
    client = scope.get("client")
    return account_of_host(client[0]) if client is not None else NO_ACCOUNT


@lru_cache(KNOWN_ADDRESSES)
def account_of_host(host: str) -> AccountRef:
    """The engine's account for a client address; that of all for what is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return NO_ACCOUNT
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return account_of_owner(str(address.ipv4_mapped))
        return account_of_owner(str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False)))
    return account_of_owner(str(address))


def _check_permission(path: str, holder: KeyHolder | None) -> None:
    if path in ADMINISTRATIVE_PATHS and holder is not None and holder.key is not None and not holder.key.may_administer:
        raise PermissionDeniedError(f"The key {holder.name} may not use {path}: its entry needs may_administer.")
