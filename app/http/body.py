"""JSON bodies: requests are read within bounds (media type, size, time, depth), responses are written by orjson."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tessera.app.http.errors import BodyTimeoutError, ClientDisconnectedError, MediaTypeError, PayloadTooLargeError
from tessera.app.http.json_pieces import PiecesResponse, json_of, json_pieces
from tessera.app.http.json_reader import MAX_JSON_DEPTH, JsonError, parse_in_pieces, release
from tessera.app.http.limits import account_of
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import InvalidRequestError, QueueFullError, RequestError

MAX_LARGE_BODIES = 4  # of the largest size, in hand at a time
MAX_LARGE_BODIES_OF_ONE = 2  # of them, of one key or address
MAX_INLINE_VALUES = 2**12  # of a response that is built on the event loop, in a few milliseconds
LARGE_BODY = 2**16  # bytes; larger ones are parsed and checked in a thread, one after the other
# Objects and lists of a body that is worked on at once, or stored items of a conversation that it names. Each may be a
# message or a tool, which takes up to 30 us in all.
MAX_INLINE_ITEMS = 2**8
BODY_ARRIVED = "body_arrived"  # in a scope's state: whether all of the body had come before the request was begun

P = TypeVar("P")
T = TypeVar("T")

_one_thread = ThreadPoolExecutor(1, thread_name_prefix="body")
_response_thread = ThreadPoolExecutor(1, thread_name_prefix="response")


class LargeBody:
    """One request's share of the memory for large bodies, MAX_LARGE_BODIES times the largest.

    Raises (`grow`): QueueFullError.
    """

    in_hand: ClassVar[Counter[int]] = Counter()  # bytes by account, of all requests of this process

    def __init__(self, largest: int, account_id: int = 0) -> None:
        self._largest = largest
        self._account_id = account_id
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold `size` bytes; a body that is not large counts for nothing, so that it is never refused."""
        if size <= LARGE_BODY:
            return
        in_hand, more = LargeBody.in_hand, size - self._size
        if in_hand[self._account_id] + more > MAX_LARGE_BODIES_OF_ONE * self._largest:
            raise QueueFullError("Too many of your large requests are in hand; please try again later.")
        if in_hand.total() + more > MAX_LARGE_BODIES * self._largest:
            raise QueueFullError("The server has too many large requests in hand; please try again later.")
        in_hand[self._account_id] += more
        self._size = size

    def release(self) -> None:
        LargeBody.in_hand[self._account_id] -= self._size
        if not LargeBody.in_hand[self._account_id]:
            del LargeBody.in_hand[self._account_id]
        self._size = 0


async def read_json_object(request: Request, settings: AppSettings, *, any_media_type: bool = False) -> dict[str, Any]:
    """The body as a dict; `any_media_type` reads JSON under whatever name.

    Raises:
        RequestError: 400 not a JSON object, 408 too slow, 413 too large, 415 another media type or compressed.
    """
    kept: dict[str, Any] | None = request.scope.setdefault("state", {}).pop("json_body", None)
    if kept is not None:
        return kept
    # A page of another origin can send a body without a media type, or as text, but not as JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json") and not any_media_type:
        raise MediaTypeError(f"Send the body with 'Content-Type: application/json', not {media_type[:100]!r}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise MediaTypeError(f"Send the body as it is, not with 'Content-Encoding: {encoding[:100]}'.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > settings.max_body_bytes:
        raise _too_large(settings)
    large = LargeBody(settings.max_body_bytes, account_of(request.scope).id)
    try:
        reading = _receive_all(request, settings, large)
        if not request.scope["state"].get(BODY_ARRIVED):  # a clock takes longer than to read what has come
            reading = _within(settings.body_timeout, reading)
        chunks = await reading
        return await parse_in_turn(request, chunks)
    except asyncio.TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {settings.body_timeout:g} seconds.") from None
    finally:
        large.release()


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at the end of the time or with its caller.

    Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes together with the result.

    Raises:
        asyncio.TimeoutError: no result within `seconds`.
    """
    if sys.version_info >= (3, 11):  # without a task, so that a body that is there already waits for nothing else
        async with asyncio.timeout(seconds):
            return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def parse_in_turn(request: Request, chunks: list[bytes]) -> dict[str, Any]:
    """The object of a request's body, whose chunks are given up; from now on the request has a large body or none."""
    request.scope["state"]["body_is_large"] = _is_large(chunks)
    return await run_in_turn(request, _parse_chunks, chunks)


def _is_large(chunks: Sequence[bytes]) -> bool:
    """Whether a body is long or has many parts: 64 KiB of messages can take 40 ms to become a chat."""
    size = sum(map(len, chunks))
    if size > LARGE_BODY:
        return True
    # Each part has two brackets.
    return size > 2 * MAX_INLINE_ITEMS and sum(_num_containers(chunk) for chunk in chunks) > MAX_INLINE_ITEMS


def _num_containers(text: bytes) -> int:
    """Objects and lists, or more where a string has brackets."""
    return text.count(b"{") + text.count(b"[")


async def run_in_turn(request: Request, function: Callable[[P], T], argument: P, *, num_items: int = 0) -> T:
    """Work on a request's body: at once for a small one, in the thread of large ones otherwise.

    There it takes turns with the event loop, and only one large body is worked on at a time.

    Args:
        num_items: that the work has beside the body, such as those of a stored conversation.
    """
    if not request.scope["state"].get("body_is_large") and num_items <= MAX_INLINE_ITEMS:
        return function(argument)
    return await asyncio.get_running_loop().run_in_executor(_one_thread, _worked_on, function, argument)


def _worked_on(function: Callable[[P], T], argument: P) -> T:
    """The function's result. A body that is refused is freed here and not by the event loop, with the traceback."""
    try:
        return function(argument)
    except RequestError:
        if type(argument) is dict:
            release(argument)
        raise


def keep_for_reading(request: Request, body: dict[str, Any]) -> None:
    """Let the next `read_json_object` return a body that has been read already."""
    request.scope.setdefault("state", {})["json_body"] = body


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def built(num_values: int, build: Callable[[], T]) -> T:
    """The result of `build`; for many values it runs in a thread, beside the event loop."""
    if num_values <= MAX_INLINE_VALUES:
        return build()
    return await asyncio.get_running_loop().run_in_executor(_response_thread, build)


async def built_json(num_values: int, build: Callable[[], dict[str, Any]]) -> Response:
    """The JSON of what `build` returns; if large, it is built and encoded in a thread, in pieces."""
    if num_values <= MAX_INLINE_VALUES:
        return Response(json_of(build()), media_type="application/json")
    return await built(num_values, lambda: PiecesResponse(json_pieces(build())))


def parse_json(text: bytes) -> Any:
    """Parse JSON as orjson does; a large or perhaps deep text in pieces.

    Raises:
        JsonError: it is not JSON.
        InvalidRequestError: it is nested too deeply or has too many parts.
    """
    if len(text) > LARGE_BODY or _num_containers(text) > MAX_JSON_DEPTH:
        return parse_in_pieces(text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise JsonError(text, len(error.doc[: error.pos].encode())) from None


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = parse_json(body)
    except JsonError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: see line {error.line}, column {error.column}"
            f" (UTF-8, finite numbers, nested at most {MAX_JSON_DEPTH} deep).",
            code="invalid_json",
        ) from None
    if type(parsed) is not dict:
        if type(parsed) is list:
            release(parsed)
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    return parsed


def _parse_chunks(chunks: list[bytes]) -> dict[str, Any]:
    body = b"".join(chunks)
    chunks.clear()
    return parse_json_object(body)


async def _receive_all(request: Request, settings: AppSettings, large: LargeBody) -> list[bytes]:
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
        large.grow(size)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return chunks


def _too_large(settings: AppSettings) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is larger than the {settings.max_body_bytes} bytes that are accepted.")
