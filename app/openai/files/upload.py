"""Reading an upload: multipart/form-data, written to the disk as it comes, within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tessera.app.http.errors import BodyTimeoutError, ClientDisconnectedError, MediaTypeError, PayloadTooLargeError
from tessera.app.http.limits import account_of
from tessera.app.openai.files.files import UPLOAD_PURPOSES, Files
from tessera.app.settings import AppSettings
from tessera.app.store.contents import Contents, IncomingContent
from tessera.engine.contract.errors import InvalidRequestError, QueueFullError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
MAX_FORM_BYTES = 2**16  # of everything but the file
MAX_FILENAME = 255
WRITE_BYTES = 2**20  # written at a time
MAX_UPLOADS = 16  # of one app process at a time
MAX_UPLOADS_OF_ONE = 8  # of them, of one key or address
MIN_LIFETIME, MAX_LIFETIME = 3600, 2592000  # seconds
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")

FORM_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Of at most --max-file-size."},
        "purpose": {"type": "string", "enum": list(UPLOAD_PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFETIME, "maximum": MAX_LIFETIME},
    },
}


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that is on the disk, but not yet stored.

    Attributes:
        lifetime: seconds until it expires; None where the request does not say.
    """

    content: IncomingContent
    filename: str
    purpose: str
    lifetime: int | None


class UploadSlots:
    """Bounds how many uploads one app process takes at a time, as each may be slow for as long as a request may be."""

    taken: ClassVar[Counter[int]] = Counter()  # by account

    @classmethod
    def take(cls, account_id: int) -> None:
        """Raises QueueFullError."""
        if cls.taken[account_id] >= MAX_UPLOADS_OF_ONE:
            raise QueueFullError("Too many of your uploads are in hand; please try again later.")
        if cls.taken.total() >= MAX_UPLOADS:
            raise QueueFullError("The server has too many uploads in hand; please try again later.")
        cls.taken[account_id] += 1

    @classmethod
    def give_back(cls, account_id: int) -> None:
        cls.taken[account_id] -= 1
        if not cls.taken[account_id]:
            del cls.taken[account_id]


@asynccontextmanager
async def read_upload(
    request: Request, files: Files, tenant: str, settings: AppSettings
) -> AsyncGenerator[Upload, None]:
    """The upload, which is discarded at the end of the block unless it was published.

    Raises:
        RequestError: 400 not what is expected, 408 too slow, 413 too large, 415 another media type, 429 too many.
    """
    boundary = _boundary(request)
    limit = files.max_bytes + MAX_FORM_BYTES
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdigit() else 0  # in chunks, it is not known yet
    if size > limit:
        raise _too_large(files.max_bytes)
    await files.check_room(tenant, max(1, size - MAX_FORM_BYTES))
    account_id = account_of(request.scope).id
    UploadSlots.take(account_id)
    try:
        content = await files.store.with_contents(Contents.begin)
        try:
            form = _Form(files.max_bytes)
            await asyncio.wait_for(
                _receive(request, files, form, boundary, content, settings.body_timeout), settings.request_timeout
            )
            yield form.upload(content)
        except asyncio.TimeoutError:
            raise BodyTimeoutError(f"The body did not arrive within {settings.request_timeout:g} seconds.") from None
        finally:
            await files.store.with_contents(lambda _: content.discard())
    finally:
        UploadSlots.give_back(account_id)


async def _receive(
    request: Request, files: Files, form: _Form, boundary: bytes, content: IncomingContent, patience: float
) -> None:
    parser = MultipartParser(boundary, form.callbacks())
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), patience)
        except asyncio.TimeoutError:
            raise BodyTimeoutError(f"Nothing of the body arrived for {patience:g} seconds.") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        try:
            parser.write(message.get("body", b""))
        except FormParserError:
            raise _malformed() from None
        more = message.get("more_body", False)
        data = form.take_file_data(WRITE_BYTES if more else 0)
        if data:
            await files.store.with_contents(partial(_write, content, data))
    if not form.is_whole:
        raise _malformed()


def _write(content: IncomingContent, data: bytes, _: Contents) -> None:
    content.write(data)


class _Form:
    """Callbacks of the multipart parser."""

    def __init__(self, max_bytes: int) -> None:
        self.is_whole = False
        self._max_bytes = max_bytes
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._file_bytes = self._form_bytes = 0
        self._pending: list[bytes] = []
        self._num_pending = 0
        self._header = self._value = b""
        self._disposition = b""
        self._name: str | None = None  # of the field that is being read; None for the file

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._read_header,
            "on_header_value": self._read_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._read_data,
            "on_end": self._end,
        }

    def take_file_data(self, at_least: int) -> bytes:
        """File data that has not been taken yet, if it is `at_least` so many bytes."""
        if self._num_pending < max(at_least, 1):
            return b""
        data = b"".join(self._pending)
        self._pending.clear()
        self._num_pending = 0
        return data

    def upload(self, content: IncomingContent) -> Upload:
        """Raises InvalidRequestError."""
        if self._filename is None:
            raise InvalidRequestError("'file' is a required property", param="file")
        purpose = self._fields.get("purpose")
        if purpose is None:
            raise InvalidRequestError("'purpose' is a required property", param="purpose")
        if purpose not in UPLOAD_PURPOSES:
            raise InvalidRequestError(
                f"{purpose[:100]!r} is not one of {list(UPLOAD_PURPOSES)} - 'purpose'", param="purpose"
            )
        if self._file_bytes == 0:
            raise InvalidRequestError("The file is empty.", param="file", code="empty_file")
        return Upload(content, self._filename, purpose, _lifetime(self._fields))

    def _begin_part(self) -> None:
        self._header = self._value = self._disposition = b""

    def _read_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _read_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._count_form(len(self._header) + len(self._value))
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _malformed()
        name = options[b"name"].decode("utf-8", "replace")
        if name == "file":
            if self._filename is not None:
                raise InvalidRequestError("There is more than one file.", param="file")
            self._filename = _clean_name(options.get(b"filename", b"").decode("utf-8", "replace"))
            self._name = None
            return
        if len(self._fields) >= MAX_FIELDS:
            raise InvalidRequestError(f"The form has more than {MAX_FIELDS} fields.")
        self._name = name
        self._fields[name] = ""

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._file_bytes += end - start
            if self._file_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._pending.append(data[start:end])
            self._num_pending += end - start
            return
        self._count_form(end - start)
        self._fields[self._name] += data[start:end].decode("utf-8", "replace")
        if len(self._fields[self._name]) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"{self._name[:100]} may have at most {MAX_FIELD_BYTES} bytes.", param=self._name[:100]
            )

    def _end(self) -> None:
        self.is_whole = True

    def _count_form(self, num_bytes: int) -> None:
        self._form_bytes += num_bytes
        if self._form_bytes > MAX_FORM_BYTES:
            raise InvalidRequestError(f"The form has more than {MAX_FORM_BYTES} bytes beside the file.")


def _boundary(request: Request) -> bytes:
    media_type, options = parse_options_header(request.headers.get("content-type"))
    if media_type != b"multipart/form-data":
        shown = media_type.decode("latin-1")[:100]
        raise MediaTypeError(f"Send the file with 'Content-Type: multipart/form-data', not {shown!r}.")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:  # RFC 2046
        raise _malformed()
    return boundary


def _lifetime(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequestError("expires_after[anchor] must be 'created_at'.", param="expires_after[anchor]")
    if not (seconds and seconds.isascii() and seconds.isdigit() and len(seconds) <= 9):
        raise InvalidRequestError("expires_after[seconds] must be an integer.", param="expires_after[seconds]")
    if not MIN_LIFETIME <= int(seconds) <= MAX_LIFETIME:
        raise InvalidRequestError(
            f"expires_after[seconds] must be from {MIN_LIFETIME} to {MAX_LIFETIME}.", param="expires_after[seconds]"
        )
    return int(seconds)


def _clean_name(name: str) -> str:
    """Without folders and control characters."""
    name = CONTROL_CHARACTERS.sub("", PurePosixPath(name.replace("\\", "/")).name)
    return name[-MAX_FILENAME:] or "file"


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("The body is not valid multipart/form-data.", code="invalid_multipart")


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The file is larger than the {max_bytes} bytes that are accepted.", param="file")
