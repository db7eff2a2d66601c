"""Large JSON, written piece by piece: orjson holds the interpreter's lock for as long as one call takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MAX_PIECE_VALUES = 2**14  # in about a millisecond
CHARS_OF_A_VALUE = 64


class PiecesResponse(Response):
    """JSON that was written in pieces, and is never copied into one to be sent. Its `body` is empty: see `body_of`."""

    def __init__(self, pieces: list[bytes]) -> None:
        length = {"content-length": str(sum(map(len, pieces)))}
        super().__init__(b"", headers=length, media_type="application/json")
        self.pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_of(response: Response) -> bytes:
    """The body of a response that is kept instead of sent; not of a stream."""
    return b"".join(response.pieces) if isinstance(response, PiecesResponse) else bytes(response.body)


def json_pieces(value: Any) -> list[bytes]:
    """The JSON of dicts with strings for keys, lists, NumPy's arrays and what else orjson writes."""
    return list(_pieces(value))


def json_in_pieces(value: Any) -> bytes:
    """The JSON, which may be large, at last as one."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if type(value) is dict and _size(value) > MAX_PIECE_VALUES:
        keys = [orjson.dumps(key) + b":" for key in value]
        yield from _joined(b"{", b"}", keys, value.values(), lambda first, group: _members(keys, first, group))
    elif type(value) is list and _size(value) > MAX_PIECE_VALUES:
        yield from _joined(b"[", b"]", None, value, lambda first, group: json_of(group)[1:-1])
    else:
        yield json_of(value)


def _joined(
    begin: bytes, end: bytes, keys: list[bytes] | None, values: Iterable[Any], write: Callable[[int, list[Any]], bytes]
) -> Iterator[bytes]:
    """The values of a list or, with `keys`, of an object. Small ones go together, and are written by `write`."""
    before = begin
    group: list[Any] = []
    size = 0
    for index, value in enumerate(values):
        value_size = _size(value)
        if group and size + value_size > MAX_PIECE_VALUES:
            yield before + write(index - len(group), group)
            before, group, size = b",", [], 0
        if value_size > MAX_PIECE_VALUES:
            yield before if keys is None else before + keys[index]
            yield from _pieces(value)
            before = b","
        else:
            group.append(value)
            size += value_size
    if group:
        yield before + write(index + 1 - len(group), group)
    yield end


def _members(keys: list[bytes], first: int, values: list[Any]) -> bytes:
    return b",".join([key + json_of(value) for key, value in zip(keys[first:], values, strict=False)])


def json_of(value: Any) -> bytes:
    """As one piece; NumPy's float32 numbers are in their shortest form."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _size(value: Any) -> int:
    """Values in it; where they are more than a piece may have, any number beyond that."""
    if type(value) is str:
        return 1 + len(value) // CHARS_OF_A_VALUE
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return getattr(value, "size", 1)
    total = 1
    for each in value:
        total += _size(each) if type(each) in (dict, list, str) else getattr(each, "size", 1)
        if total > MAX_PIECE_VALUES:
            break
    return total
