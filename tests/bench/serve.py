"""Loads over real HTTP against a server that this benchmark starts: what a user would see."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.arrival import Arrival
from loadtest.random_workload import RandomWorkload
from loadtest.run import run
from tests.bench.models import decode_bytes, write_model

READ_BANDWIDTH = 4.3e12  # bytes per second, measured on one H200; see PERF.md
START_LIMIT = 300.0


@dataclass(frozen=True)
class Load:
    """One line of the table: `concurrency` streams of `input_len` tokens in and `output_len` out."""

    concurrency: int
    input_len: int
    output_len: int
    num_prompts: int


BASE_LINE = (Load(1, 128, 256, 4), Load(16, 512, 256, 32), Load(64, 512, 256, 128), Load(1, 8000, 2, 3))


@contextlib.contextmanager
def server(folder: Path | None, log: Path, *arguments: str) -> Iterator[tuple[str, float]]:
    """Start `tessera serve` (the built-in model without a folder); -> its URL and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = [str(folder)] if folder else []
    command = [sys.executable, "-m", "app.cli", "serve", *model, "--port", str(port), *arguments]
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log, start + START_LIMIT)
            yield url, time.perf_counter() - start
        finally:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    with httpx.Client(timeout=5) as http:
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}:\n{log.read_text()[-4000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{url}/ready").status_code == 200:
                    return
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready in time:\n{log.read_text()[-4000:]}")


def measure(name: str, loads: tuple[Load, ...], work: Path, log_folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Serve benchmark model `name` with dummy weights and run each load after one short warm-up."""
    folder = write_model(work, name)
    rows = []
    log = log_folder / f"serve-{name}.log"
    with server(folder, log, "--load-format", "dummy", "--max-model-len", "9000", *arguments) as (url, ready_seconds):
        for load in loads:
            warm_up = RandomWorkload(load.concurrency, load.input_len, min(load.output_len, 8), 100_000, seed=1)
            arrival = Arrival(max_concurrency=load.concurrency)
            run(url, name, warm_up, arrival, stream=True)
            workload = RandomWorkload(load.num_prompts, load.input_len, load.output_len, 100_000, seed=2)
            summary = run(url, name, workload, arrival, stream=True)
            floor = decode_bytes(name) / READ_BANDWIDTH
            share = floor * 1e3 / summary["median_tpot_ms"] if summary["median_tpot_ms"] else 0.0
            rows.append(
                {
                    "model": name,
                    "concurrency": load.concurrency,
                    "input_len": load.input_len,
                    "output_len": load.output_len,
                    "ready_seconds": ready_seconds,
                    "weight_read_share": share,
                    **summary,
                }
            )
    return rows
