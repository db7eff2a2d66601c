"""The front: takes HTTP requests, passes each to a replica, and streams what comes back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tessera.app.http.errors import error_response
from tessera.app.ray_serve.errors import ReplicaDiedError, ReplicasFullError, dialect_of, last_of_stream
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
        path = request.url.path
        target = path + (f"?{request.url.query}" if request.url.query else "")
        passed = HttpRequest(request.method, target, tuple(request.headers.items()), await request.body())
        parts = self._handle.remote(passed)
        try:
            head = await anext(parts)
        except BackPressureError:
            return error_response(ReplicasFullError(FULL), dialect_of(path))
        except RayError as error:
            logger.warning("a replica ended before its response: %s", type(error).__name__)
            return error_response(ReplicaDiedError(DIED), dialect_of(path))
        assert isinstance(head, ResponseHead)
        headers = dict(head.headers)
        end = last_of_stream(ReplicaDiedError(DIED), path, headers.get("content-type", ""))
        return StreamingResponse(_body(parts, end), head.status, headers)


async def _body(parts: AsyncIterator[Any], end: bytes | None) -> AsyncIterator[bytes]:
    """The rest of a response; `end` is the last event of a stream whose replica ends."""
    try:
        async for chunk in parts:
            yield chunk
    except RayError as error:
        logger.warning("a replica ended in the midst of a response: %s", type(error).__name__)
        if end is None:
            raise
        yield end
