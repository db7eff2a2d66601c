"""A server with known delays for the load test: every answer's tokens come at fixed times after its request.

It notes when each request arrived and each token left, on the clock that the client uses: no request is sent after it
arrives, no token arrives before it left.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast


@dataclass(frozen=True)
class Manner:
    """How a request is answered: seconds to the first token, seconds between tokens, and what goes wrong, if anything.

    Faults: busy (status 429), reset (the connection breaks after two tokens), cut (the stream ends without [DONE]),
    event (an error in the stream), garbage (a line that is not JSON), silent (no answer at all).
    """

    ttft: float = 0.0
    tpot: float = 0.0
    fault: str | None = None


@dataclass
class Exchange:
    """A request, when it came (`time.perf_counter()`), and when each of its tokens was sent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    received: float
    sent: list[float] = field(default_factory=list)
    closed: bool = False


class StubServer:
    """Runs in a thread of its own; `manner(index, body)` decides on each request."""

    def __init__(self, manner: Callable[[int, dict[str, Any]], Manner] = lambda _index, _body: Manner()) -> None:
        self.manner = manner
        self.exchanges: list[Exchange] = []
        self.changed = threading.Condition()
        self.running = 0
        self.most_running = 0
        self.cached_tokens: int | None = None  # that usage tells of each prompt
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> StubServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)

    def protocol(self) -> asyncio.Protocol:
        """One connection's end of the server, for a loop that is not the server's own."""
        return _Connection(self)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await self._loop.create_server(self.protocol, "127.0.0.1", 0, backlog=256)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, server: StubServer) -> None:
        self._server = server
        self._buffer = b""
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None:
            self._exchange.closed = True
            self._end()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if len(rest) < int(headers.get("content-length", 0)):
            return
        self._buffer = b""
        method, path, _ = first.split(" ")
        if method == "GET":
            self._write_whole(200, {"data": [{"id": "stub"}]})
            return
        self._answer(Exchange(path, headers, json.loads(rest), now))

    def _answer(self, exchange: Exchange) -> None:
        server = self._server
        self._exchange = exchange
        with server.changed:
            self._manner = server.manner(len(server.exchanges), exchange.body)
            server.exchanges.append(exchange)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
            server.changed.notify_all()
        body = exchange.body
        if "input" in body:
            num_words = sum(len(text.split()) for text in body["input"])
            self._write_whole(200, {"data": [{"embedding": [0.0]}], "usage": {"prompt_tokens": num_words}})
            return
        self._num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._manner.ttft
        if self._manner.fault == "busy":
            self._write_whole(429, {"error": {"message": "too many requests", "type": "rate_limit_error"}})
        elif self._manner.fault == "silent":
            pass
        elif body["stream"]:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            if "messages" in body:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            loop.call_at(self._due, self._token)
        else:
            loop.call_at(self._due + self._manner.tpot * (self._num_tokens - 1), self._whole)

    def _token(self) -> None:
        exchange, fault = self._exchange, self._manner.fault
        if exchange is None:
            return
        number = len(exchange.sent)
        if number == 2 and fault == "reset":
            self._transport.abort()
            return
        if number == 2 and fault == "event":
            self._event({"error": {"message": "the engine broke", "type": "server_error"}})
            self._finish()
            return
        chat = "messages" in exchange.body
        choice = {"delta": {"content": f"t{number} "}} if chat else {"text": f"t{number} "}
        exchange.sent.append(time.perf_counter())
        with self._server.changed:
            self._server.changed.notify_all()
        self._event({"choices": [{"index": 0, **choice, "finish_reason": None}]})
        if number + 1 < self._num_tokens:
            asyncio.get_running_loop().call_at(self._due + self._manner.tpot * (number + 1), self._token)
            return
        if fault == "garbage":
            self._chunk(b"data: {not json}\n\n")
        self._event({"choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]})
        self._event({"choices": [], "usage": self._usage()})
        if fault != "cut":
            self._chunk(b"data: [DONE]\n\n")
        self._finish()

    def _whole(self) -> None:
        if self._exchange is not None:
            self._exchange.sent.append(time.perf_counter())
            self._write_whole(200, {"choices": [{"index": 0, "text": "whole"}], "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        assert self._exchange is not None
        body = self._exchange.body
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        num_prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        usage: dict[str, Any] = {"prompt_tokens": num_prompt_tokens, "completion_tokens": self._num_tokens}
        if self._server.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._server.cached_tokens}
        return usage

    def _write_whole(self, status: int, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        self._transport.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(content), content))
        self._end()

    def _event(self, message: dict[str, Any]) -> None:
        self._chunk(b"data: %s\n\n" % json.dumps(message).encode())

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _finish(self) -> None:
        self._transport.write(b"0\r\n\r\n")
        self._end()

    def _end(self) -> None:
        if self._exchange is not None:
            self._exchange = None
            with self._server.changed:
                self._server.running -= 1
                self._server.changed.notify_all()
