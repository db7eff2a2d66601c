"""A server for the page alone: its real files, figures of a busy server, and answers as a test has written them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tessera.app.ops.page_files import FILES, PAGE, page_file

PREFIX = "/below/a/prefix"
MODELS = ["Qwen3-8B", "Qwen3-0.6B"]


@dataclass
class Reply:
    """An answer to the user's message of a name.

    Attributes:
        deltas: of the chunks; a text stands for its content.
        per_second: how many chunks are sent a second; None: all at once.
        hold: nothing after the first chunk is sent until it is set.
        failure: an error at the end of the stream.
        refusal: an error with status 503 in its place.
    """

    deltas: Sequence[str | dict[str, Any]]
    per_second: float | None = None
    hold: threading.Event | None = None
    failure: str | None = None
    refusal: str | None = None


@dataclass
class Upstream:
    """The server's state.

    Attributes:
        replies: by the last message's text, which is repeated where there is none.
        bodies: of the requests.
        closed: texts of requests that the page left before their end.
        default_names: of the models that are served.
        asked: paths of figures, and the model named in each query.
    """

    url: str = ""
    replies: dict[str, Reply] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    default_names: list[str] = field(default_factory=lambda: MODELS[:1])
    asked: set[tuple[str, str | None]] = field(default_factory=set)
    end: threading.Event = field(default_factory=threading.Event)

    async def show_file(self, request: Request) -> Response:
        return page_file(request.url.path.removeprefix(PREFIX), request.headers.get("if-none-match"))

    async def show_status(self, request: Request) -> Response:
        chosen = request.query_params.get("model")
        self.asked.add((request.url.path, chosen))
        is_loaded = chosen is None or chosen in MODELS
        status = status_of_a_busy_server() if is_loaded else status_of_an_unloaded_model(chosen or "")
        return JSONResponse({**status, "default_names": self.default_names})

    async def show_history(self, request: Request) -> Response:
        self.asked.add((request.url.path, request.query_params.get("model")))
        return JSONResponse(an_hour())

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        reply = self.replies.get(text, Reply([text]))
        if reply.refusal is not None:
            return JSONResponse({"error": {"message": reply.refusal}}, 503)
        return StreamingResponse(self._stream(text, reply), media_type="text/event-stream")

    async def _stream(self, text: str, reply: Reply) -> AsyncIterator[bytes]:
        whole = False
        try:
            begin = time.monotonic()
            for number, delta in enumerate(reply.deltas):
                if number == 1 and reply.hold is not None:
                    while not reply.hold.is_set() and not self.end.is_set():
                        await asyncio.sleep(0.005)
                if reply.per_second is not None:
                    await asyncio.sleep(max(0.0, begin + number / reply.per_second - time.monotonic()))
                yield _event(
                    {"choices": [{"index": 0, "delta": {"content": delta} if isinstance(delta, str) else delta}]}
                )
            if reply.failure is not None:
                yield _event({"error": {"message": reply.failure}})
            usage = {"prompt_tokens": 12, "completion_tokens": len(reply.deltas)}
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            whole = True
        finally:
            if not whole:
                self.closed.append(text)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextlib.contextmanager
def running_upstream() -> Iterator[Upstream]:
    """On a free port of the loopback, at / and below PREFIX."""
    upstream = Upstream()
    routes = [
        *(Route(path, upstream.show_file) for path in FILES if path != PAGE),
        Route(PAGE, upstream.show_file),
        Route("/status.json", upstream.show_status),
        Route("/status/history.json", upstream.show_history),
        Route("/v1/chat/completions", upstream.complete, methods=["POST"]),
    ]
    app = Starlette(routes=[Mount(PREFIX, routes=routes), *routes])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    upstream.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield upstream
    finally:
        upstream.end.set()
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()


def status_of_a_busy_server() -> dict[str, Any]:
    """/status.json with a figure in each of its fields."""
    latency = {"p50": 0.031, "p99": 0.18}
    history = [
        {"age": 120 - 2 * n, "running": 40 + 12 * math.sin(n / 5), "generation_tokens": 6500 + 1500 * math.sin(n / 4)}
        for n in range(61)
    ]
    names = ["research", "support", "batch"]
    return {
        "version": "0.2.0",
        "state": {"ready": True, "reason": "the engine is ready"},
        "models": [*MODELS, "bge-small"],
        "generating_models": MODELS,
        "chat": True,
        "engine": {
            "device": "cuda:0",
            "device_name": "NVIDIA H200",
            "dtype": "bfloat16",
            "architecture": "Qwen3ForCausalLM",
            "num_parameters": 8_190_735_360,
            "weight_bytes": 16_381_470_720,
            "max_model_len": 40960,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "block_size": 16,
            "num_kv_blocks": 46000,
            "kv_cache_bytes": 108_527_616_000,
            "generates": True,
        },
        "now": {"running": 48, "waiting": 3, "blocks_used": 11800, "blocks_cached": 16300, "blocks_free": 17900},
        "rates": {"prompt_tokens": 21840.2, "generation_tokens": 7204.8, "requests": 14.2},
        "latency": {"ttft": latency, "itl": {"p50": 0.0061, "p99": 0.0143}, "e2e": {"p50": 1.62, "p99": 6.4}},
        "totals": {
            "prompt_tokens": 61_204_118,
            "generation_tokens": 18_442_907,
            "finished": {"stop": 40112, "length": 2310, "abort": 411, "error": 2},
            "preemptions": 7,
            "prefix_queries": 61_204_118,
            "prefix_hits": 24_481_647,
            "draft_tokens": 11_068_236,
            "accepted_draft_tokens": 8_301_177,
        },
        "history": history,
        "gpu": {"memory_used": 128_849_018_880, "memory_total": 150_754_820_096, "utilization": 0.93},
        "use": {
            "models": [
                {
                    "name": name,
                    "requests": 40000 // n,
                    "prompt_tokens": 60_000_000 // n,
                    "generation_tokens": 18_000_000 // n,
                }
                for n, name in enumerate([*MODELS, "bge-small"], 1)
            ],
            "keys": [
                {
                    "name": name,
                    "requests": 21000 // n,
                    "requests_under_way": 24 // n,
                    "refused": 3 * (n - 1),
                    "prompt_tokens": 31_000_000 // n,
                    "generation_tokens": 9_000_000 // n,
                    "tokens_last_minute": 820_000 // n,
                }
                for n, name in enumerate(names, 1)
            ],
        },
        "fine_tuning": [
            {
                "id": "ftjob-1",
                "model": MODELS[1],
                "status": "running",
                "step": 120,
                "num_steps": 400,
                "losses": [[step, 2.5 * math.exp(-step / 60) + 0.4] for step in range(1, 121)],
                "validation_loss": 0.81,
            },
            {
                "id": "ftjob-2",
                "model": MODELS[1],
                "status": "queued",
                "step": 0,
                "num_steps": 0,
                "losses": [],
                "validation_loss": None,
            },
        ],
    }


def status_of_an_unloaded_model(name: str) -> dict[str, Any]:
    """/status.json of a model that is loaded on demand, among others."""
    busy = status_of_a_busy_server()
    unknown = dict.fromkeys(("engine", "now", "rates", "latency", "totals", "gpu"))
    return {**busy, **unknown, "history": [], "models": [name, *(each for each in busy["models"] if each != name)]}


def an_hour() -> dict[str, Any]:
    """/status/history.json of a load that comes and goes."""
    points = []
    for number in range(240):
        load = max(0.05, 0.5 - 0.6 * math.cos(number / 27) + 0.2 * math.sin(number / 5) + 0.08 * math.sin(number * 1.7))
        points.append(
            {
                "age": 3585 - 15 * number,
                "prompt_tokens": 24000 * load,
                "generation_tokens": 7800 * load,
                "requests": 15 * load,
                "running": round(52 * load),
                "waiting": max(0, round(20 * load - 17)),
                "kv_usage": min(1.0, 0.1 + 0.5 * load),
                "ttft": 0.02 + 0.03 * load if load > 0.06 else None,
                "itl": 0.004 + 0.004 * load if load > 0.06 else None,
            }
        )
    return {"seconds": 3600.0, "points": points}
