"""Requests that come through a proxy: the client's own address, the public scheme and host, the path's prefix.

`X-Forwarded-*` counts only from the proxies that the operator names. From anywhere else it would let a client choose
the address that limits and logs know it by.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"

UNIX = "unix"  # in the place of an address: connections over the Unix socket, which have none
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
MAX_HOPS = 32  # addresses of one chain that are looked at


class TrustedProxies:
    """The proxies whose `X-Forwarded-*` counts.

    Args:
        allowed: addresses, networks in CIDR form, or `unix`.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        names = tuple(allowed)
        self._unix = UNIX in names
        self._networks: tuple[Network, ...] = tuple(ipaddress.ip_network(name) for name in names if name != UNIX)

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def trusts_peer(self, peer: Sequence[Any] | None) -> bool:
        """Whether the connection's other end, as in ASGI's `client`, is one of them."""
        if peer is None:
            return self._unix
        address = parse_address(str(peer[0]))
        return address is not None and self.trusts(address)

    def trusts(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)

    def client_of(self, chain: Sequence[str]) -> str | None:
        """The client's address in `X-Forwarded-For`: the last that no trusted proxy has; None where there is none.

        Each proxy appends the address that it was called from, so what stands before the first address that is not
        trusted may be the client's invention.
        """
        found: str | None = None
        for hop in list(reversed(chain))[:MAX_HOPS]:
            address = parse_address(hop)
            if address is None:
                break
            found = str(address)
            if not self.trusts(address):
                break
        return found


class ForwardedMiddleware:
    """Gives a request its client's address, scheme and host, and takes the prefix off its path.

    Args:
        proxies: whose headers count.
        root_path: below which a proxy serves this server, such as `/llm`; empty for none. A path that still begins
            with it loses it; a trusted `X-Forwarded-Prefix` says that the proxy has taken it off.
    """

    def __init__(self, app: ASGIApp, proxies: TrustedProxies, root_path: str) -> None:
        self._app = app
        self._proxies = proxies
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            prefix = self._apply_headers(scope) if self._proxies.trusts_peer(scope.get("client")) else None
            if prefix is None:
                prefix = self._root_path
                path = scope["path"]
                if prefix and (path == prefix or path.startswith(prefix + "/")):
                    scope["path"] = path[len(prefix) :] or "/"
                    scope["raw_path"] = scope["path"].encode()
            if prefix:
                scope.setdefault("state", {})["root_path"] = prefix
        await self._app(scope, receive, send)

    def _apply_headers(self, scope: Scope) -> str | None:
        """-> the prefix that the proxy names; None where it names none."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        client = self._proxies.client_of(_values(headers, b"x-forwarded-for"))
        if client is not None:
            scope["client"] = (client, 0)
        scheme = _last(headers, b"x-forwarded-proto").lower()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme
        host = _last(headers, b"x-forwarded-host")
        if HOST.fullmatch(host):
            scope["headers"] = [(b"host", host.encode()), *(field for field in headers if field[0] != b"host")]
        prefix = _last(headers, b"x-forwarded-prefix")
        return prefix.rstrip("/") if prefix and PREFIX.fullmatch(prefix) else None


def root_path_of(scope: MutableMapping[str, Any]) -> str:
    """The prefix below which the request's client sees this server, without a slash at the end; empty for none."""
    root_path: str = scope.get("state", {}).get("root_path", "")
    return root_path


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, with or without brackets and a port; IPv4 in IPv6 as IPv4; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _values(headers: list[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    """The items of a field's comma-separated lists, in their order."""
    joined = b",".join(value for name, value in headers if name == wanted).decode("latin-1")
    return [item.strip() for item in joined.split(",") if item.strip()]


def _last(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str:
    """The item that the nearest proxy has set; empty where there is none."""
    return next(reversed(_values(headers, wanted)), "")
