"""Anthropic's dialect: its error object and its header for request ids."""

from __future__ import annotations

import re
from typing import Any

from tessera.app.anthropic.objects import MessageErrorObject
from tessera.app.http.dialect import Dialect
from tessera.engine.contract.errors import RequestError

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

NO_THREADS = "thread_unsupported_request"  # upon which Anthropic's SDK sends the whole conversation


def message_error_object(error: RequestError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    found: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == NO_THREADS:
        found["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": found}


ANTHROPIC = Dialect(re.compile(r"/v1/messages(?:/|\Z)"), message_error_object, MessageErrorObject, b"request-id")
