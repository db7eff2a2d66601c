"""One completion over HTTP, with the time of everything that arrived."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


@dataclass
class RequestRecord:
    """Times are `time.perf_counter()` seconds.

    Attributes:
        start: when the request was sent.
        chunk_times: arrival of each chunk that brought text.
        end: when the answer was complete.
        input_tokens, output_tokens: as the server's usage says.
        error: what went wrong, or None.
    """

    start: float
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return (self.chunk_times[0] if self.chunk_times else self.end) - self.start

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.end - self.start

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: times between chunks."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


async def complete(
    http: httpx.AsyncClient, url: str, model: str, prompt: list[int], output_len: int, *, stream: bool = True
) -> RequestRecord:
    """POST one greedy completion of exactly `output_len` tokens; never raises for a failed request."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    record = RequestRecord(start=time.perf_counter())
    try:
        async with http.stream("POST", url, content=orjson.dumps(body), headers=_JSON) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                record.error = f"HTTP {response.status_code}: {text[:200]}"
            elif stream:
                await _read_stream(response, record)
            else:
                _take_usage(orjson.loads(await response.aread()), record)
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    record.end = time.perf_counter()
    return record


_JSON = {"content-type": "application/json"}


async def _read_stream(response: httpx.Response, record: RequestRecord) -> None:
    finished = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            finished = True
            continue
        chunk = orjson.loads(line[6:])
        if "error" in chunk:
            record.error = str(chunk["error"].get("message"))
        elif chunk["choices"]:
            record.chunk_times.append(time.perf_counter())
        _take_usage(chunk, record)
    if not finished and record.error is None:
        record.error = "the stream ended without [DONE]"


def _take_usage(message: dict[str, Any], record: RequestRecord) -> None:
    usage = message.get("usage")
    if usage:
        record.input_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
