"""One line of the log for each request: what was asked, what it cost and how it ended, and nothing that was said."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tessera.engine.contract.errors import RequestError

logger = logging.getLogger("tessera.request")

CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left before its answer began
MAX_PATH_LENGTH = 200
QUIET_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/status.json"})  # asked again and again
QUIET_PREFIX = "/ui/"


class Accounted(Protocol):
    """A generation that says what it cost."""

    def account(self, arrival: float) -> dict[str, Any]:
        """Fields of the log line; times are milliseconds, counted from `arrival`."""


@dataclass(slots=True)
class RequestTrace:
    """What the routes leave of a request for its line, as far as it came.

    Attributes:
        arrival: `time.monotonic()` of its first byte.
        model: the name that it asked for, once it is known to be one.
        prompts: its prompts as the model reads them; only with `--log-prompts`.
        error: why it failed.
    """

    arrival: float = field(default_factory=time.monotonic)
    model: str | None = None
    stream: bool | None = None
    num_prompt_tokens: int | None = None
    generation: Accounted | None = None
    prompts: list[str] | None = None
    error: RequestError | None = None


def trace_of(scope: MutableMapping[str, Any]) -> RequestTrace:
    """The trace of the request that an ASGI scope belongs to."""
    trace: RequestTrace = scope.setdefault("state", {}).setdefault("trace", RequestTrace())
    return trace


def log_request(scope: MutableMapping[str, Any], request_id: str, client_id: str | None, status: int | None) -> None:
    """Write the line of a request that is over. `status` is None where the client left before there was one."""
    path = scope["path"]
    quiet = path in QUIET_PATHS or path.startswith(QUIET_PREFIX)
    if status is None:
        status = CLIENT_CLOSED_REQUEST
    level = logging.DEBUG if quiet else logging.WARNING if status >= 500 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    trace = trace_of(scope)
    fields: dict[str, Any] = {
        "id": request_id,
        "client_id": client_id,
        "method": scope["method"],
        "endpoint": path[:MAX_PATH_LENGTH],
        "status": status,
        "model": trace.model,
        "stream": trace.stream,
        "prompt_tokens": trace.num_prompt_tokens,
        **(trace.generation.account(trace.arrival) if trace.generation is not None else {}),
        "total_ms": milliseconds(time.monotonic() - trace.arrival),
        **(_failure(trace.error) if trace.error is not None else {}),
    }
    if trace.error is not None and trace.generation is not None:
        fields["finish_reason"] = "error"
    if trace.prompts is not None:
        fields["prompt"] = trace.prompts[0] if len(trace.prompts) == 1 else trace.prompts
    logger.log(level, "request", extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def _failure(error: RequestError) -> dict[str, Any]:
    # Not the message, which may quote from the request.
    return {"error": error.code or error.type, "param": error.param}


def milliseconds(seconds: float | None) -> float | None:
    return round(1000 * seconds, 2) if seconds is not None else None
