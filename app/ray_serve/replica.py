"""A replica: a Tessera server as a child process, reached through a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from tessera import PACKAGE_ROOT
from tessera.app.ray_serve.messages import HttpRequest, ResponseHead

START_POLL = 0.1  # seconds
STOP_TIMEOUT = 40.0  # seconds, beyond the server's own drain
HEALTH_TIMEOUT = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
SAMPLE = re.compile(r"^tessera:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Replica:
    """Serves one model as `tessera serve` does; Serve makes, checks and ends it.

    Args:
        arguments: of `tessera serve`: the model and its options, without those of addresses.
    """

    async def __init__(self, arguments: Sequence[str]) -> None:  # type: ignore[misc]
        """Returns when the server takes requests. Raises RuntimeError where it ends before."""
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-ray-")
        socket_path = str(Path(self._folder.name) / "http")
        command = [sys.executable, "-m", "tessera.app.cli.command", "serve", "--uds", socket_path, *arguments]
        # A replica that is killed takes its server with it: nothing else would end that.
        self._server = subprocess.Popen(command, cwd=PACKAGE_ROOT, preexec_fn=_end_with_parent, start_new_session=True)
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=socket_path, limits=limits)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        while not await self._is_ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"tessera serve ended with exit code {self._server.returncode}; its log says why")
            await asyncio.sleep(START_POLL)

    async def handle(self, request: HttpRequest) -> AsyncIterator[ResponseHead | bytes]:
        """The response's head, then its body as it comes. Ends the request where it is cancelled."""
        headers = [(name, value) for name, value in request.headers if name not in HOP_BY_HOP]
        async with self._http.stream(request.method, request.target, headers=headers, content=request.body) as response:
            kept = ((name, value) for name, value in response.headers.items() if name not in HOP_BY_HOP)
            yield ResponseHead(response.status_code, tuple(kept))
            async for chunk in response.aiter_raw():
                yield chunk

    async def check_health(self) -> None:
        """Raise where the server is gone. It restarts its engine itself, so an ill one is left to it."""
        if self._server.poll() is not None:
            raise RuntimeError(f"tessera serve ended with exit code {self._server.returncode}")
        response = await self._http.get("/version", timeout=HEALTH_TIMEOUT)
        response.raise_for_status()

    async def record_routing_stats(self) -> dict[str, float]:
        """For the router: sequences under way, and tokens that the prefix cache has room for."""
        samples = await self._samples()
        under_way = _total(samples, "num_requests_running") + _total(samples, "num_requests_waiting")
        sizes = [labels for name, labels, _ in samples if name == "cache_config_info"]
        tokens = sum(int(_label(each, "block_size")) * int(_label(each, "num_gpu_blocks")) for each in sizes)
        return {"under_way": under_way, "cache_tokens": float(tokens)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `QueueAndCachePolicy`: the share of KV blocks that requests hold."""
        uses = [value for name, _, value in await self._samples() if name == "kv_cache_usage_perc"]
        return {"cache_use": sum(uses) / len(uses) if uses else 0.0}

    async def __del__(self) -> None:
        """Let the server drain; Serve has stopped sending requests."""
        self._server.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._server.wait), STOP_TIMEOUT)
        self._server.kill()
        await self._http.aclose()
        self._folder.cleanup()

    async def _is_ready(self) -> bool:
        try:
            return (await self._http.get("/ready", timeout=HEALTH_TIMEOUT)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _samples(self) -> list[tuple[str, str, float]]:
        """Name, labels and value of each of the server's metrics."""
        text = (await self._http.get("/metrics", timeout=HEALTH_TIMEOUT)).text
        return [(name, labels, float(value)) for name, labels, value in SAMPLE.findall(text)]


def _total(samples: list[tuple[str, str, float]], name: str) -> float:
    return sum(value for found, _, value in samples if found == name)


def _label(labels: str, name: str) -> str:
    match = re.search(rf'\b{name}="([^"]*)"', labels)
    return match[1] if match is not None else "0"


def _end_with_parent() -> None:
    """Runs in the child: SIGKILL, once the thread that has started it is gone, which is that of the event loop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
