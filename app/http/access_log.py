"""Request ids, and one log line per request: what was asked, what it cost, how it ended; never its content."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.app.http.counts import OTHER, HttpCounts
from tessera.app.http.dialect import OPENAI, Dialect
from tessera.app.http.errors import InternalError, ShutdownError, error_response
from tessera.engine.contract.errors import RequestError
from tessera.engine.contract.logs import request_context

logger = logging.getLogger("tessera.app")
request_logger = logging.getLogger("tessera.request")

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left before the response began
MAX_PATH_LENGTH = 200
MAX_CLIENT_ID_LENGTH = 512
TASK_PREFIX = "request: "  # of the names of tasks that answer one
LINES_AT_A_TIME = 4  # in one pass of the event loop; each takes about a tenth of a millisecond
QUIET_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/status.json", "/status/history.json"}
)  # polled
QUIET_PREFIX = "/ui/"
TRACE_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class Accounted(Protocol):
    """A generation that reports its cost."""

    def account(self, arrival: float) -> dict[str, Any]:
        """Fields of the log line; times are milliseconds since `arrival`."""


@dataclass(slots=True)
class RequestTrace:
    """A request as far as it is known, for its log line.

    Attributes:
        arrival: `time.monotonic()` of its first byte.
        dialect: of the API that its path belongs to.
        context: fields of all log lines that are written while it is handled: `id`, `client`, `key`, `trace_id`.
        model: the name that it asked for, once checked.
        prompts: its prompts as the model reads them; only with `--log-prompts`.
        error: why it failed.
    """

    arrival: float = field(default_factory=time.monotonic)
    dialect: Dialect = OPENAI
    context: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    stream: bool | None = None
    num_prompt_tokens: int | None = None
    generation: Accounted | None = None
    prompts: list[str] | None = None
    error: RequestError | None = None


def trace_of(scope: MutableMapping[str, Any]) -> RequestTrace:
    """The trace of the request that an ASGI scope belongs to."""
    state = scope.setdefault("state", {})
    trace: RequestTrace | None = state.get("trace")
    if trace is None:
        trace = state["trace"] = RequestTrace()
    return trace


class RequestLog:
    """Writes the lines of finished requests: each at once, or after `delay` seconds.

    A client that has its response may send the next request within a tenth of a millisecond, and its first token does
    not wait for a line that is written while the engine computes.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, write: Callable[[], None]) -> None:
        """To be called in the event loop, if there is a delay."""
        if not self.delay:
            write()
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.delay, self._write_some)
        self._waiting.append(write)

    def flush(self) -> None:
        """Write what waits."""
        while self._waiting:
            self._waiting.popleft()()

    def _write_some(self) -> None:
        try:
            for _ in range(min(len(self._waiting), LINES_AT_A_TIME)):
                self._waiting.popleft()()
        finally:  # the others are written even if one fails
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._write_some)


def name_task(method: str, path: str) -> None:
    """Name the task that runs now after the request that it answers."""
    task = asyncio.current_task()
    if task is not None:
        task.set_name(f"{TASK_PREFIX}{method} {path[:MAX_PATH_LENGTH]}")


def request_of(task: asyncio.Task[Any] | None) -> str | None:
    """The request after which a task is named."""
    name = "" if task is None else task.get_name()
    return name.removeprefix(TASK_PREFIX) if name.startswith(TASK_PREFIX) else None


class RequestIdMiddleware:
    """Names each request in `x-request-id`, echoes the client's own id, and turns faults into a plain 500.

    At the end it counts the request in `counts` and gives `log` its line.
    """

    def __init__(
        self, app: ASGIApp, counts: HttpCounts, dialects: Sequence[Dialect] = (), log: RequestLog | None = None
    ) -> None:
        self._app = app
        self._counts = counts
        self._dialects = dialects
        self._log = log if log is not None else RequestLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(16)}"
        trace = trace_of(scope)
        path = scope["path"]
        trace.context = {"id": request_id, **_caller(scope), **trace.context}
        name_task(scope["method"], path)
        request_context.set(trace.context)  # to the end of the request's task: uvicorn may have something to add
        trace.dialect = next((dialect for dialect in self._dialects if dialect.paths.match(path)), OPENAI)
        client_id = _echoed_client_id(scope)
        headers = [(b"x-request-id", request_id.encode()), *client_id]
        if trace.dialect.request_id_header is not None:
            headers.append((trace.dialect.request_id_header, request_id.encode()))
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the time for the drain is over
            trace.error = ShutdownError()
            if status is not None:
                raise
            await error_response(trace.error, trace.dialect)(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s %s failed", scope["method"], path[:MAX_PATH_LENGTH])
            trace.error = InternalError()
            if status is not None:
                raise
            await error_response(trace.error, trace.dialect)(scope, receive, send_with_id)
        finally:
            self._counts.count_response(_endpoint(scope), CLIENT_CLOSED_REQUEST if status is None else status)
            cost = trace.generation.account(trace.arrival) if trace.generation is not None else {}
            if trace.model is not None:
                prompt = cost.get("prompt_tokens", trace.num_prompt_tokens)
                self._counts.count_use(trace.model, prompt or 0, cost.get("output_tokens", 0))
            given_id = client_id[0][1].decode() if client_id else None
            self._log.add(partial(log_request, scope, given_id, status, cost, time.monotonic()))
            if trace.error is not None:
                _drop_frames(trace.error)


def _drop_frames(error: RequestError) -> None:
    """Its frames have the scope, which has the trace, which has the error: garbage that only a collection finds."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def log_request(
    scope: MutableMapping[str, Any], client_id: str | None, status: int | None, cost: Mapping[str, Any], finished: float
) -> None:
    """Write the line of a request that had `finished`, by `time.monotonic()`, with what its generation cost.

    `status` is None if the client left before the response began.
    """
    path = scope["path"]
    quiet = path in QUIET_PATHS or path.startswith(QUIET_PREFIX)
    if status is None:
        status = CLIENT_CLOSED_REQUEST
    level = logging.DEBUG if quiet else logging.WARNING if status >= 500 else logging.INFO
    if not request_logger.isEnabledFor(level):
        return
    trace = trace_of(scope)
    fields: dict[str, Any] = {
        **trace.context,
        "client_id": client_id,
        "method": scope["method"],
        "endpoint": path[:MAX_PATH_LENGTH],
        "status": status,
        "model": trace.model,
        "stream": trace.stream,
        "prompt_tokens": trace.num_prompt_tokens,
        **cost,
        "total_ms": milliseconds(finished - trace.arrival),
        **(_failure(trace.error) if trace.error is not None else {}),
    }
    if trace.error is not None and trace.generation is not None:
        fields["finish_reason"] = "error"
    if trace.prompts is not None:
        fields["prompt"] = trace.prompts[0] if len(trace.prompts) == 1 else trace.prompts
    known = {name: value for name, value in fields.items() if value is not None}
    request_logger.log(level, "request", extra={"fields": known})


def milliseconds(seconds: float | None) -> float | None:
    return round(1000 * seconds, 2) if seconds is not None else None


def _endpoint(scope: Scope) -> str:
    """The route's path with its parameters as names, so that there are only so many."""
    route = scope.get("route")  # set once the request has been routed
    return getattr(route, "path", OTHER)


def _caller(scope: Scope) -> dict[str, str]:
    """The client's address, and the trace that its `traceparent` names (W3C Trace Context, 3.2)."""
    found = {"client": str(scope["client"][0])} if scope.get("client") else {}
    parents = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(parents) == 1 and (parent := TRACE_PARENT.fullmatch(parents[0])):
        found["trace_id"] = parent[1].decode()
    return found


def _echoed_client_id(scope: Scope) -> list[tuple[bytes, bytes]]:
    for name, value in scope["headers"]:
        if name in (b"x-request-id", b"x-client-request-id"):
            printable = all(0x20 < byte < 0x7F for byte in value)
            if printable and 0 < len(value) <= MAX_CLIENT_ID_LENGTH:
                return [(b"x-client-request-id", value)]
    return []


def _failure(error: RequestError) -> dict[str, Any]:
    # Not the message, which may quote from the request.
    return {"error": error.code or error.type, "param": error.param}
