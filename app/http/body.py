"""JSON bodies: requests are read within bounds (media type, size, time, depth), responses are written by orjson."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tessera.app.http.errors import BodyTimeoutError, ClientDisconnectedError, MediaTypeError, PayloadTooLargeError
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import InvalidRequestError

MAX_JSON_DEPTH = 64


async def read_json_object(request: Request, settings: AppSettings) -> dict[str, Any]:
    """The body as a dict.

    Raises:
        RequestError: 400 not a JSON object, 408 too slow, 413 too large, 415 another media type.
    """
    # A page of another origin can send a body without a media type, or as text, but not as JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(f"Send the body with 'Content-Type: application/json', not {media_type[:100]!r}.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > settings.max_body_bytes:
        raise _too_large(settings)
    try:
        body = await asyncio.wait_for(_receive_all(request, settings), settings.body_timeout)
    except asyncio.TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {settings.body_timeout:g} seconds.") from None
    return parse_json_object(body)


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: see line {error.lineno}, column {error.colno}"
            " (UTF-8, finite numbers, nested at most 64 deep).",
            code="invalid_json",
        ) from None
    if type(parsed) is not dict:
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    # A body with fewer brackets cannot be nested that deeply: most need no walk.
    if body.count(b"{") + body.count(b"[") > MAX_JSON_DEPTH:
        _check_depth(parsed)
    return parsed


async def _receive_all(request: Request, settings: AppSettings) -> bytes:
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > settings.max_body_bytes:
            raise _too_large(settings)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _too_large(settings: AppSettings) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is larger than the {settings.max_body_bytes} bytes that are accepted.")


def _check_depth(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequestError(
                f"The body is nested more than {MAX_JSON_DEPTH} levels deep.", code="invalid_json"
            )
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
