"""A server of chat completions whose answers are given beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = ("one", "two")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


@dataclass
class ChatRequest:
    """A request as it came; headers in lower case."""

    body: dict[str, Any]
    headers: dict[str, str]


class ChatStub:
    """A context manager. `gone` is set once a client has left an answer that hangs."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.gone = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.stub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.status = 200
        self.events: list[Any] = []
        self.hang = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, texts: Sequence[str], reasoning: Sequence[str] = (), *, hang: bool = False) -> None:
        """The next answer; with `hang` it never ends."""
        deltas = [{"reasoning_content": text} for text in reasoning] + [{"content": text} for text in texts]
        self.status, self.hang = 200, hang
        self.events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        self.events.append({"choices": [], "usage": USAGE})

    def fail(self, status: int, body: Any) -> None:
        """The next answer: an error, or a stream of this one event."""
        self.status, self.hang, self.events = status, False, [body]

    def __enter__(self) -> ChatStub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": name} for name in MODELS]}).encode())

    def do_POST(self) -> None:
        stub: ChatStub = self.server.stub  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stub.requests.append(ChatRequest(body, {name.lower(): value for name, value in self.headers.items()}))
        if stub.status != 200:
            self._send(stub.status, json.dumps(stub.events[0]).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in stub.events:
            self._event(json.dumps(event))
        while stub.hang:
            try:
                self._event(json.dumps({"choices": []}))
            except OSError:
                stub.gone.set()
                return
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
