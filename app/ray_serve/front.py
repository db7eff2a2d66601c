"""The front: takes HTTP requests, passes each to a replica, and streams what comes back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tessera.app.ray_serve.messages import HttpRequest, ResponseHead

logger = logging.getLogger("tessera.ray")

DIED = "the replica ended while it worked on this request"
FULL = "too many requests wait for a replica; please try again later"


class Front:
    """Passes requests on whole: replicas speak the APIs, and check keys and limits.

    Args:
        replicas: the handle of the deployment of `Replica`.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._handle = replicas.options(stream=True).handle

    async def __call__(self, request: Request) -> Response:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        passed = HttpRequest(request.method, target, tuple(request.headers.items()), await request.body())
        parts = self._handle.remote(passed)
        try:
            head = await anext(parts)
        except BackPressureError:
            return _error(503, FULL, "replicas_full", {"retry-after": "1"})
        except RayError as error:
            logger.warning("a replica ended before its response: %s", type(error).__name__)
            return _error(500, DIED, "replica_died")
        assert isinstance(head, ResponseHead)
        headers = dict(head.headers)
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        return StreamingResponse(_body(parts, is_stream=is_stream), head.status, headers)


async def _body(parts: AsyncIterator[Any], *, is_stream: bool) -> AsyncIterator[bytes]:
    """The rest of a response; a stream whose replica ends has an error as its last event."""
    try:
        async for chunk in parts:
            yield chunk
    except RayError as error:
        logger.warning("a replica ended in the midst of a response: %s", type(error).__name__)
        if not is_stream:
            raise
        yield b"data: " + _error_body(DIED, "replica_died") + b"\n\n"


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    return Response(_error_body(message, code), status, headers, "application/json")


def _error_body(message: str, code: str) -> bytes:
    """An error in OpenAI's form."""
    return orjson.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}})
