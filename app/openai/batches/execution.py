"""Running one line of a batch: the endpoint's own function, called in this process at a low priority."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message

from tessera.app.generate.generation import Generation
from tessera.app.generate.served_models import ServedModels, model_for
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import keep_for_reading, parse_in_turn, parse_json_object
from tessera.app.http.dialect import error_object
from tessera.app.http.errors import InternalError
from tessera.app.http.json_pieces import body_of
from tessera.app.openai.batches.input_file import InputLine
from tessera.app.openai.batches.tables import LineResult, TokenUsage
from tessera.app.openai.chat.routes import create_chat_completion
from tessera.app.openai.completions.routes import create_completion
from tessera.app.openai.embeddings.routes import create_embeddings
from tessera.app.openai.responses.routes import create_response
from tessera.engine.contract.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)

logger = logging.getLogger("tessera.app")

ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/embeddings": create_embeddings,
    "/v1/responses": create_response,
}
ENGINE_DIED = "engine_died"
MAX_DEATHS = 3  # of engines while they work on a line, until it is suspected
RETRY_DELAY = 0.25  # seconds; the engine's queue is full, or it is being restarted
JSON_HEADERS = [(b"content-type", b"application/json")]


class SuspectLineError(Exception):
    """The engine has died several times while it worked on the line, among others."""


class LineExecutor:
    """Runs lines of one app's batches."""

    def __init__(self, app: FastAPI, models: ServedModels) -> None:
        self._app = app
        self._models = models

    async def run(
        self, line: InputLine, endpoint: str, tenant: str, slots: asyncio.Semaphore, *, is_alone: bool = False
    ) -> LineResult:
        """The line's result. It is tried again while there is no engine to run it.

        Args:
            slots: of all lines that run at a time, whichever model they are for; the line has none while it waits for
                its model, or for an engine.
            is_alone: no other line runs, so the one that engines die of is this one: it fails.

        Raises:
            SuspectLineError: the engine has died too often, and `is_alone` is false.
        """
        scope = self._scope(endpoint, tenant)
        request = await parse_in_turn(Request(scope), [line.text])
        is_large = scope["state"]["body_is_large"]
        body = request["body"]
        num_deaths = 0
        while True:
            scope = self._scope(endpoint, tenant)
            scope["state"]["body_is_large"] = is_large
            http_request = Request(scope, _never)
            keep_for_reading(http_request, body)
            try:
                _check_body(body)
                await model_for(http_request, body.get("model"))  # it may have to wait for room
                async with slots:
                    response = await ROUTES[endpoint](http_request)
                found = body_of(response)
                return _result(line.number, request["custom_id"], response.status_code, found, _usage(scope))
            except QueueFullError:
                await asyncio.sleep(RETRY_DELAY)
            except EngineUnavailableError:
                await self._wait_for_engine(str(body.get("model") or ""))
            except EngineError as error:
                if error.code != ENGINE_DIED:
                    return _failure(line.number, request["custom_id"], error)
                num_deaths += 1
                if num_deaths >= MAX_DEATHS:
                    if is_alone:
                        return _failure(line.number, request["custom_id"], error)
                    raise SuspectLineError from None
            except RequestError as error:
                return _failure(line.number, request["custom_id"], error)
            except Exception:
                logger.exception("line %d of a batch failed", line.number)
                return _failure(line.number, request["custom_id"], InternalError())
            finally:
                self._models.release(scope)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of the model that lines of batches name."""
        return self._models.default.adapter_names

    async def _wait_for_engine(self, name: str) -> None:
        engine = (self._models.find(name) or self._models.default).engine
        await asyncio.sleep(RETRY_DELAY)
        while engine.status.state == "asleep" or not engine.health()[0]:
            await asyncio.sleep(RETRY_DELAY)

    def _scope(self, endpoint: str, tenant: str) -> dict[str, Any]:
        return {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": JSON_HEADERS,
            "app": self._app,
            "state": {"tenant": tenant, "in_background": True},
        }


async def _never() -> Message:
    """Waits for a client that never leaves."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


def _check_body(body: dict[str, Any]) -> None:
    for name in ("stream", "background"):
        if body.get(name):
            raise InvalidRequestError(f"{name} is not supported in a batch.", param=name)


def _usage(scope: dict[str, Any]) -> TokenUsage:
    trace = trace_of(scope)
    if not isinstance(trace.generation, Generation):
        return TokenUsage(input_tokens=trace.num_prompt_tokens or 0)
    usage = trace.generation.usage()
    return TokenUsage(
        usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens, usage.num_reasoning_tokens
    )


def _failure(number: int, custom_id: str, error: RequestError) -> LineResult:
    return _result(number, custom_id, error.status, orjson.dumps(error_object(error)), TokenUsage())


def _result(number: int, custom_id: str, status: int, body: bytes, usage: TokenUsage) -> LineResult:
    """In OpenAI's form; the response's body as it is."""
    data = (
        b'{"id":"batch_req_%s","custom_id":%s,"response":{"status_code":%d,"request_id":"req_%s","body":%s},"error":null}\n'
        % (
            secrets.token_hex(12).encode(),
            orjson.dumps(custom_id),
            status,
            secrets.token_hex(16).encode(),
            body,
        )
    )
    return LineResult(number, status >= 400, data, usage)


def unexecuted(line: InputLine, code: str, message: str) -> bytes:
    """The line of the error file for a request that was not run."""
    try:
        custom_id = parse_json_object(line.text).get("custom_id")
    except InvalidRequestError:
        custom_id = None
    result = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return orjson.dumps(result) + b"\n"
