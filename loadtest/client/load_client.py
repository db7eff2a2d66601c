"""Requests over HTTP, each with its times."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter

import httpx
import msgspec
import orjson

from tessera.loadtest.client.records import Recorder
from tessera.loadtest.client.timed_completion import TimedCompletion
from tessera.loadtest.client.transport import SINK, Transport
from tessera.loadtest.workload.jobs import Job

INTERRUPTED = "interrupted"


_HEADERS = {
    "accept": "*/*",
    "accept-encoding": "identity",
    "content-type": "application/json",
    "user-agent": "tessera-bench",
}


class Target(msgspec.Struct):
    """The endpoint under load.

    Attributes:
        url: of the endpoint.
        headers: sent beside Content-Type.
        stream: whether completions are streamed.
        timeout: most seconds for one request.
        request_id: beginning of the header X-Request-Id, which ends with a number; None: no such header.
        insecure: the server's certificate is not checked.
    """

    url: str
    headers: dict[str, str]
    stream: bool
    timeout: float
    request_id: str | None = None
    insecure: bool = False


class LoadClient:
    """Sends requests and records their results; a failed one is a record too and raises nothing."""

    def __init__(self, target: Target, recorder: Recorder) -> None:
        self._target = target
        self._recorder = recorder
        # Below httpx's client: its merging of URLs and headers, cookies and redirects cost 100 us a request, during
        # which a burst of requests delays the other streams.
        self._transport = Transport(insecure=target.insecure)
        self._url = httpx.URL(target.url)
        self._headers = httpx.Headers({**_HEADERS, **target.headers})
        self.done = 0
        self.failed = 0
        self._sent = 0
        self._received = 0
        self._open: set[TimedCompletion] = set()

    @property
    def output_tokens(self) -> int:
        """Received so far; of unfinished completions one for each event."""
        return self._received + sum(len(completion.token_times) for completion in self._open)

    async def run(self, job: Job) -> None:
        """The job's request, then one more for each further turn of the conversation."""
        body = job.body
        completion = await self._send(body, keep_text=bool(job.turns))
        for turn in job.turns:
            if completion.error is not None:
                return
            message = orjson.loads(body)
            message["messages"] += [
                {"role": "assistant", "content": completion.text},
                {"role": "user", "content": turn},
            ]
            body = orjson.dumps(message)
            completion = await self._send(body, keep_text=True)

    async def connect(self, count: int) -> None:
        """Open connections ahead of the first requests, which report a server that cannot be reached."""
        with contextlib.suppress(httpx.HTTPError):
            await self._transport.connect(self._url, count)

    async def close(self) -> None:
        await self._transport.aclose()

    async def _send(self, body: bytes, *, keep_text: bool) -> TimedCompletion:
        completion = TimedCompletion(keep_text=keep_text)
        self._open.add(completion)
        extensions = {SINK: completion.receive} if self._target.stream else {}
        headers = self._headers
        if self._target.request_id is not None:
            headers = httpx.Headers({**headers, "x-request-id": f"{self._target.request_id}{self._sent}"})
        self._sent += 1
        request = httpx.Request("POST", self._url, content=body, headers=headers, extensions=extensions)
        start = perf_counter()  # only now: the time to build the request is not the server's
        try:
            await asyncio.wait_for(self._exchange(request, completion), self._target.timeout)
        except (TimeoutError, asyncio.TimeoutError):
            completion.fail("timeout", f"no complete response within {self._target.timeout:g} s")
        except asyncio.CancelledError:
            completion.fail(INTERRUPTED, "the load test was stopped")
            raise
        except httpx.ConnectError as error:
            completion.fail("no connection", str(error))
        except httpx.HTTPError as error:
            completion.fail("connection broken", str(error))
        finally:
            self._record(start, completion)
        return completion

    async def _exchange(self, request: httpx.Request, completion: TimedCompletion) -> None:
        response = await self._transport.handle_async_request(request)
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        if response.status_code != 200:
            completion.fail(f"HTTP {response.status_code}", content[:300].decode(errors="replace"))
        elif not self._target.stream:
            completion.read_whole(content)
        elif not completion.finished:
            completion.fail("no [DONE]", "the stream ended without data: [DONE]")

    def _record(self, start: float, completion: TimedCompletion) -> None:
        end = perf_counter()
        self._recorder.record_request(
            start,
            end,
            completion.token_times,
            completion.input_tokens,
            completion.output_tokens,
            completion.error,
            completion.message,
            completion.cached_tokens,
        )
        self._open.discard(completion)
        self._received += completion.output_tokens
        self.done += 1
        self.failed += completion.error is not None
