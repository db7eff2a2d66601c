"""Requests as clients spell them: paths without /v1 or with a slash at the end, HEAD for GET."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.engine.contract.errors import ConfigError

VERSION = "/v1"


class PathMiddleware:
    """Gives each request the path of its route, before anything else looks at it.

    A slash at the end is dropped. `/chat/completions` becomes `/v1/chat/completions`, as do all paths whose first
    segment occurs only after /v1. HEAD becomes GET; the HTTP server, which knows better, leaves out the body.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[str]) -> None:
        """`routes`: the paths of all routes."""
        self._app = app
        paths = list(routes)
        versioned = {_first_segment(path.removeprefix(VERSION)) for path in paths if path.startswith(f"{VERSION}/")}
        self._versioned = versioned - {_first_segment(path) for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if len(path) > 1 and path.endswith("/"):
                path = path.rstrip("/") or "/"
            if _first_segment(path) in self._versioned:
                path = VERSION + path
            if path != scope["path"]:
                scope["path"], scope["raw_path"] = path, path.encode()
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def check_root_path(root_path: str, routes: Iterable[str]) -> None:
    """Raise ConfigError for a prefix that cannot be told from the beginning of a route."""
    first = _first_segment(root_path)
    taken = {_first_segment(path.removeprefix(prefix)) for path in routes for prefix in ("", VERSION)}
    if first and first in taken:
        raise ConfigError(f"--root-path {root_path}: /{first} begins a path of the API; choose another prefix")


def _first_segment(path: str) -> str:
    return path.split("/", 2)[1] if path.startswith("/") else ""
