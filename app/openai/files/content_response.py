"""The response with a file's content, or with ranges of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import BinaryIO, NoReturn

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from tessera.engine.contract.errors import InvalidRequestError


class ContentResponse(FileResponse):
    """Of an open file, so that it comes whole even if the file is deleted meanwhile; it is closed at the end."""

    def __init__(self, file: BinaryIO, headers: Mapping[str, str]) -> None:
        descriptor = file.fileno()
        super().__init__(
            f"/dev/fd/{descriptor}",  # opened anew from there
            headers=headers,
            media_type="application/octet-stream",
            stat_result=os.fstat(descriptor),
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises InvalidRequestError or HTTPException for a range that is none, or is not in the file."""

        async def send_content(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:  # its text is no error object
                _refuse(message["status"], Headers(raw=list(message["headers"])))
            await send(message)

        with self._file:
            await super().__call__(scope, receive, send_content)


def _refuse(status: int, headers: Headers) -> NoReturn:
    if "content-range" in headers:
        raise HTTPException(status, headers={"content-range": headers["content-range"]})
    raise InvalidRequestError("The header Range must have ranges of bytes, such as bytes=0-99.", param="Range")
