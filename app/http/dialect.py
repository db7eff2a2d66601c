"""Dialects: how an API writes its errors and names its request ids. Paths tell which API a request belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.app.http.description import ApiObject
from tessera.engine.contract.errors import RequestError


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's form of errors and request ids, those of the HTTP layer included.

    Attributes:
        paths: matches the paths of the API from their beginning.
        error_object: the body of an error.
        error_model: describes that body.
        request_id_header: a second header for the request's id, or None.
    """

    paths: re.Pattern[str]
    error_object: Callable[[RequestError], dict[str, Any]]
    error_model: type[ApiObject]
    request_id_header: bytes | None = None


class ErrorFields(ApiObject):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(ApiObject):
    """Any failure, in OpenAI's form."""

    error: ErrorFields


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


OPENAI = Dialect(re.compile(""), error_object, ErrorObject)
