"""Requests over HTTP, each with the times of what arrived."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from time import perf_counter

import httpx
import msgspec
import orjson

from tessera.loadtest.client.answer import Answer
from tessera.loadtest.client.records import Recorder
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
    """Where requests go and how.

    Attributes:
        url: of the endpoint.
        headers: sent beside Content-Type.
        stream: whether answers come in pieces.
        timeout: most seconds for one answer.
    """

    url: str
    headers: dict[str, str]
    stream: bool
    timeout: float


class Client:
    """Sends requests and records what came of them; a failed one is a record too and raises nothing."""

    def __init__(self, target: Target, recorder: Recorder) -> None:
        self._target = target
        self._recorder = recorder
        # Below httpx's client: its merging of URLs and headers, cookies and redirects cost 100 us a request, during
        # which a burst of requests keeps other streams waiting.
        self._transport = Transport()
        self._url = httpx.URL(target.url)
        self._headers = httpx.Headers({**_HEADERS, **target.headers})
        self.done = 0
        self.failed = 0
        self._received = 0
        self._open: set[Answer] = set()

    @property
    def output_tokens(self) -> int:
        """Received so far, those of unfinished answers by their events."""
        return self._received + sum(len(answer.token_times) for answer in self._open)

    async def run(self, job: Job) -> None:
        """The job's request, then one more for each further turn of the conversation."""
        body = job.body
        answer = await self._send(body, keep_text=bool(job.turns))
        for turn in job.turns:
            if answer.error is not None:
                return
            message = orjson.loads(body)
            message["messages"] += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": turn},
            ]
            body = orjson.dumps(message)
            answer = await self._send(body, keep_text=True)

    async def connect(self, count: int) -> None:
        """Open connections ahead of the first requests; a server that cannot be reached shows with these."""
        with contextlib.suppress(httpx.HTTPError):
            await self._transport.connect(self._url, count)

    async def close(self) -> None:
        await self._transport.aclose()

    async def _send(self, body: bytes, *, keep_text: bool) -> Answer:
        answer = Answer(keep_text=keep_text)
        self._open.add(answer)
        extensions = {SINK: answer.feed} if self._target.stream else {}
        request = httpx.Request("POST", self._url, content=body, headers=self._headers, extensions=extensions)
        start = perf_counter()  # the request is ready: what it took to make is not the server's
        try:
            await asyncio.wait_for(self._exchange(request, answer), self._target.timeout)
        except (TimeoutError, asyncio.TimeoutError):
            answer.fail("timeout", f"no complete answer within {self._target.timeout:g} s")
        except asyncio.CancelledError:
            answer.fail(INTERRUPTED, "the load test was stopped")
            raise
        except httpx.ConnectError as error:
            answer.fail("no connection", str(error))
        except httpx.HTTPError as error:
            answer.fail("connection broken", str(error))
        finally:
            self._record(start, answer)
        return answer

    async def _exchange(self, request: httpx.Request, answer: Answer) -> None:
        response = await self._transport.handle_async_request(request)
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        if response.status_code != 200:
            answer.fail(f"HTTP {response.status_code}", content[:300].decode(errors="replace"))
        elif not self._target.stream:
            answer.read_whole(content)
        elif not answer.finished:
            answer.fail("no [DONE]", "the stream ended without data: [DONE]")

    def _record(self, start: float, answer: Answer) -> None:
        end = perf_counter()
        times: array[float] = answer.token_times
        self._recorder.add(start, end, times, answer.input_tokens, answer.output_tokens, answer.error, answer.message)
        self._open.discard(answer)
        self._received += answer.output_tokens
        self.done += 1
        self.failed += answer.error is not None
