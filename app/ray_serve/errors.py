"""The front's own error responses, for when no replica answers, in the form of the API that was asked."""

from __future__ import annotations

import orjson

from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.http.description import EVENT_STREAM
from tessera.app.http.dialect import OPENAI, Dialect
from tessera.app.ollama.errors import OLLAMA
from tessera.app.ollama.lines import NDJSON
from tessera.engine.contract.errors import RequestError


class ReplicaDiedError(RequestError):
    """The replica ended while it worked on the request."""

    status = 500
    type = "server_error"
    code = "replica_died"


class ReplicasFullError(RequestError):
    """As many requests wait for a replica as may."""

    status = 503
    type = "server_error"
    code = "replicas_full"


def dialect_of(path: str) -> Dialect:
    return next((dialect for dialect in (ANTHROPIC, OLLAMA) if dialect.paths.match(path)), OPENAI)


def last_of_stream(error: RequestError, path: str, content_type: str) -> bytes | None:
    """The error as the end of a stream that has begun; None where the response is no stream."""
    body = dialect_of(path).error_object(error)
    if content_type.startswith(NDJSON):
        return orjson.dumps(body) + b"\n"
    if not content_type.startswith(EVENT_STREAM):
        return None
    name = b"event: %b\n" % body["type"].encode() if "type" in body else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"
