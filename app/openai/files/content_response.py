"""The response with a file's content, or with ranges of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send


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
        with self._file:
            await super().__call__(scope, receive, send)
