"""The outputs of a request, from the connection that receives them to the task that reads them."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Protocol

from tessera.engine.contract.errors import (
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from tessera.engine.contract.messages import PromptScores, RequestOutput


class StreamOwner(Protocol):
    """Aborts requests whose streams were dropped."""

    def abandon(self, request_id: str) -> None: ...
    def abandon_from_anywhere(self, request_id: str) -> None:
        """From any thread."""


class RequestStream:
    """The outputs of one request: an async iterator that ends after the one with a finish_reason.

    Outputs that arrive while the consumer is busy come as one. Raises the RequestError that ended the
    request, if one did. When the consumer is cancelled while waiting, calls `abort`, or drops the
    stream before its end, the engine is told to stop the request.
    """

    def __init__(self, client: StreamOwner, request_id: str, inbox: Inbox) -> None:
        self.request_id = request_id
        self._client = client
        self._inbox = inbox

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        inbox = self._inbox
        while True:
            if inbox.output is not None:
                output, inbox.output = inbox.output, None
                return output
            if inbox.error is not None:
                error, inbox.error = inbox.error, None
                raise error
            if inbox.ended:
                raise StopAsyncIteration
            # As `Inbox.wait`, whose coroutine would cost each output more.
            waiter = inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            except asyncio.CancelledError:
                await self.abort()
                raise
            finally:
                if inbox.waiter is waiter:
                    inbox.waiter = None

    async def wait_accepted(self, seconds: float = math.inf) -> None:
        """Wait until the engine has queued the request or has sent its first output, for at most `seconds`.

        Raises:
            RequestError: the engine refused it.
        """
        inbox = self._inbox
        if not inbox.accepted and inbox.output is None and not inbox.ended:
            await inbox.wait_accepted(seconds)
        if inbox.error is not None:
            error, inbox.error = inbox.error, None
            raise error

    async def abort(self) -> None:
        """Stop the request if it still runs; iteration ends. Calling it again does nothing."""
        self._inbox.output = None
        if not self._inbox.ended:
            self._inbox.end()
            self._client.abandon(self.request_id)

    aclose = abort

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.abort()

    def __del__(self) -> None:
        if not self._inbox.ended:
            self._inbox.ended = True
            self._client.abandon_from_anywhere(self.request_id)


class Inbox:
    """A request's outputs until their consumer takes them, merged into one.

    Attributes:
        account_id: of the account whose turn it is when the consumer is woken.
    """

    __slots__ = ("_scores", "accepted", "account_id", "ended", "error", "output", "waiter")

    def __init__(self, account_id: int = 0) -> None:
        self.account_id = account_id
        self.output: RequestOutput | None = None
        self.error: RequestError | None = None
        self.accepted = False
        self.ended = False
        self.waiter: asyncio.Future[None] | None = None
        self._scores: list[PromptScores] = []  # that have come ahead of the first token

    async def wait(self) -> None:
        waiter = self.waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self.waiter is waiter:  # else another task waits now, since this one was cancelled
                self.waiter = None

    async def wait_accepted(self, seconds: float) -> None:
        """The request counts as accepted after `seconds`."""
        # A timer costs each request less than a task for the wait.
        timer = asyncio.get_running_loop().call_later(seconds, self.accept) if seconds < math.inf else None
        try:
            while not self.accepted and self.output is None and not self.ended:
                await self.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def deliver(self, output: RequestOutput) -> None:
        """Keep an output; `wake` is to be called afterwards."""
        if self.ended:
            return
        if output.finish_reason == "error":
            self.fail(error_of(output))
            return
        if output.prompt_logprobs is not None:
            self._scores += output.prompt_logprobs
            if not output.token_ids:
                self.accepted = True
                return
            output.prompt_logprobs, self._scores = self._scores, []
        if self.output is None:
            self.output = output
        else:
            _merge(self.output, output)
        if output.finish_reason is not None:
            self.ended = True

    def accept(self) -> None:
        self.accepted = True
        self.wake()

    def fail(self, error: RequestError) -> None:
        """End with an error; `wake` is to be called afterwards."""
        if not self.ended:
            self.error = error
            self.ended = True

    def end(self) -> None:
        self.ended = True
        self.wake()

    def wake(self) -> bool:
        """Let the consumer go on; False if none waits."""
        if self.waiter is None or self.waiter.done():
            return False
        self.waiter.set_result(None)
        return True


def error_of(output: RequestOutput) -> RequestError:
    """The exception that an output with finish_reason "error" carries."""
    message = output.error or "the engine failed this request"
    error: RequestError
    if output.error_status == QueueFullError.status:
        error = QueueFullError(message, retry_after=output.retry_after or 1)
    elif output.error_status == EngineUnavailableError.status:
        error = EngineUnavailableError(message)
    elif output.error_code == ContextLengthError.code:
        error = ContextLengthError(message, param=output.error_param)
    elif output.error_status < 500:
        error = InvalidRequestError(message, param=output.error_param)
    else:
        error = EngineError(message, param=output.error_param)
    error.status = output.error_status
    error.code = output.error_code
    error.type = output.error_type or error.type
    return error


def _merge(earlier: RequestOutput, later: RequestOutput) -> None:
    """Append `later` to `earlier`, which alone may be a request's first output and have what only that has."""
    earlier.token_ids += later.token_ids
    if earlier.logprobs is not None and later.logprobs is not None:
        earlier.logprobs += later.logprobs
    earlier.finish_reason = later.finish_reason
    earlier.stop_token_id = later.stop_token_id
    earlier.decode_time = later.decode_time
    earlier.num_accepted_draft_tokens = later.num_accepted_draft_tokens
    earlier.num_rejected_draft_tokens = later.num_rejected_draft_tokens
