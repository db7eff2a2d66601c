"""Loads over real HTTP against a server that this benchmark starts: what a user would see."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tessera.loadtest.run.load_run import run_load
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tests.bench.fp8_models import FP8_MODELS, fp8_decode_bytes, write_fp8_model
from tests.bench.gguf_models import gguf_decode_bytes, write_gguf_model
from tests.bench.models import decode_bytes, write_model
from tests.support.paths import ROOT

READ_BANDWIDTH = 4.3e12  # bytes per second, measured on one H200; see docs/performance.md
START_LIMIT = 300.0
SETTLING_SECONDS = 3.0  # of idleness after a start, in which an engine captures the graphs that it has left
GGUF = ".gguf"


@dataclass(frozen=True)
class Load:
    """One line of the table: `concurrency` streams of `input_len` tokens in and `output_len` out."""

    concurrency: int
    input_len: int
    output_len: int
    num_prompts: int
    stream: bool = True


LOADS = (
    Load(1, 128, 256, 6),
    Load(16, 512, 256, 64),
    Load(64, 512, 256, 256),
    Load(256, 512, 256, 768),
    Load(256, 512, 256, 768, stream=False),
    Load(1, 8000, 2, 5),
)
LONG_PROMPTS = (Load(32, 6000, 256, 96),)
# How cost grows: streams at a usual length, then prompt lengths at one stream.
SWEEP = (
    *(Load(streams, 512, 128, max(3 * streams, 4)) for streams in (1, 4, 16, 64, 256, 512)),
    *(Load(1, length, 16, 4) for length in (128, 512, 2048, 8192, 32768)),
)


def of_streams(loads: tuple[Load, ...], streams: list[int]) -> tuple[Load, ...]:
    """Those of `loads` with so many streams, and one of the usual length for a number that none has."""
    found = tuple(load for load in loads if load.concurrency in streams)
    others = set(streams) - {load.concurrency for load in loads}
    return (*found, *(Load(number, 512, 256, 3 * number) for number in sorted(others)))


@dataclass(frozen=True)
class Interference:
    """Streams that decode while a long prompt arrives every second."""

    streams: int = 16
    output_len: int = 1024
    prompt_len: int = 8000
    num_prompts: int = 8


@contextlib.contextmanager
def server(
    folder: Path | None, log: Path, *arguments: str, cache_dir: str | None = None, checkout: Path = ROOT
) -> Iterator[tuple[str, float]]:
    """Start `tessera serve` (the built-in model without a folder); -> its URL and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = [str(folder)] if folder else []
    module = "tessera" if (checkout / "tessera").is_dir() else "app.cli"  # before the rooms were one package
    command = [sys.executable, "-m", module, "serve", *model, "--port", str(port), *arguments]
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **({"TESSERA_CACHE_DIR": cache_dir} if cache_dir else {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users' servers find their modules compiled
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=subprocess.STDOUT, env=environment)
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


def prepare(name: str, work: Path) -> tuple[Path, tuple[str, ...]]:
    """The model with dummy weights, or a file or folder of quantised ones; options to serve it with."""
    if name in FP8_MODELS:
        folder = work / name
        return folder if folder.exists() else write_fp8_model(work, name), ("--served-model-name", name)
    if not name.endswith(GGUF):
        return write_model(work, name), ("--load-format", "dummy")
    path = work / name
    return path if path.exists() else write_gguf_model(path, name.removesuffix(GGUF)), ("--served-model-name", name)


def step_bytes(name: str, streams: int, quantization: str | None = None) -> int:
    """Of weights that one decode step must read; `quantization` as the server's option says."""
    if name in FP8_MODELS:
        return fp8_decode_bytes(name)
    if name.endswith(GGUF):
        return gguf_decode_bytes(name.removesuffix(GGUF))
    return decode_bytes(name, streams, quantization)


def option_of(arguments: Sequence[str], option: str) -> str | None:
    """The value of a server's option, if it is given."""
    values = [value for name, value in pairwise(arguments) if name == option]
    values += [name.partition("=")[2] for name in arguments if name.startswith(f"{option}=")]
    return values[-1] if values else None


def floor_seconds(name: str, streams: int, arguments: Sequence[str]) -> float:
    """In which the weights of one decode step can be read, by all GPUs that share the model."""
    num_gpus = int(option_of(arguments, "--tensor-parallel-size") or 1)
    return step_bytes(name, streams, option_of(arguments, "--quantization")) / (READ_BANDWIDTH * num_gpus)


def measure(
    name: str, loads: tuple[Load, ...], work: Path, log_folder: Path, *arguments: str, checkout: Path = ROOT
) -> list[dict[str, Any]]:
    """Serve benchmark model `name` with dummy weights and run each load after one short warm-up.

    `checkout`: of the server; the client is this one's.
    """
    log = log_folder / f"serve-{name}.log"
    with model_server(name, loads, work, log, *arguments, checkout=checkout) as (url, ready_seconds):
        return [
            {"ready_seconds": ready_seconds, **measure_load(url, name, load, number, arguments)}
            for number, load in enumerate(loads)
        ]


@contextlib.contextmanager
def model_server(
    name: str, loads: tuple[Load, ...], work: Path, log: Path, *arguments: str, checkout: Path = ROOT
) -> Iterator[tuple[str, float]]:
    """A server of benchmark model `name` with room for each of `loads`, which has had time to capture its graphs."""
    max_model_len = str(max(load.input_len + load.output_len for load in loads) + 64)
    folder, options = prepare(name, work)
    options += ("--max-model-len", max_model_len, *arguments)
    with server(folder, log, *options, checkout=checkout) as found:
        time.sleep(SETTLING_SECONDS)
        yield found


def measure_load(url: str, name: str, load: Load, number: int, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a load after one short warm-up. `number`: of those that a server is given; `arguments`: the server's."""
    # Seeds of their own: what one load has left in the prefix cache must not serve the next.
    seeds = 2 * number, 2 * number + 1
    warm_up = RandomWorkload(load.concurrency, load.input_len, min(load.output_len, 8), 100_000, seed=seeds[0])
    arrival = Arrival(max_concurrency=load.concurrency)
    run_load(url, name, warm_up, arrival, stream=load.stream)
    workload = RandomWorkload(load.num_prompts, load.input_len, load.output_len, 100_000, seed=seeds[1])
    summary = run_load(url, name, workload, arrival, stream=load.stream)
    floor = floor_seconds(name, load.concurrency, arguments)
    return {
        "model": name,
        "concurrency": load.concurrency,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "stream": load.stream,
        "weight_read_share": floor * 1e3 / summary["median_tpot_ms"] if summary["median_tpot_ms"] else 0.0,
        **summary,
    }


def measure_start(
    name: str, work: Path, log_folder: Path, *, cached_starts: int = 1, checkout: Path = ROOT
) -> list[dict[str, Any]]:
    """Seconds from the command to readiness and to the first token: once with no kernel cached, then with all."""
    folder, options = prepare(name, work)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1 + cached_starts):
            log = log_folder / f"start-{name}.log"
            start = time.perf_counter()
            arguments = (*options, "--max-model-len", "9000")
            with server(folder, log, *arguments, cache_dir=cache, checkout=checkout) as (url, ready_seconds):
                body = {"model": name, "prompt": [5] * 16, "max_tokens": 1, "ignore_eos": True}
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
                first_token = time.perf_counter() - start
            rows.append({"model": name, "cached": number > 0, "ready_s": ready_seconds, "first_token_s": first_token})
    return rows


def measure_interference(name: str, work: Path, log_folder: Path) -> dict[str, Any]:
    """What streams that decode notice of long prompts: their median and P99 inter-token latency in ms."""
    case = Interference()
    folder, options = prepare(name, work)
    log = log_folder / f"interference-{name}.log"
    with (
        server(folder, log, *options, "--max-model-len", "9000") as (url, _),
        ThreadPoolExecutor(2) as threads,
    ):
        for lengths in ((case.streams, 128, 64), (2, case.prompt_len, 2)):  # all shapes, and the pace of prompts
            warm_up = RandomWorkload(*lengths, 100_000, seed=1)
            run_load(url, name, warm_up, Arrival(max_concurrency=case.streams), stream=True)
        rounds = 8 if step_bytes(name, case.streams) < 4e9 else 2  # several seconds
        decodes = RandomWorkload(case.streams * rounds, 128, case.output_len, 100_000, seed=2)
        prompts = RandomWorkload(case.num_prompts, case.prompt_len, 2, 100_000, seed=3)
        held = Arrival(max_concurrency=case.streams)
        steady = threads.submit(run_load, url, name, decodes, held, stream=True)
        rate = Arrival(request_rate=1.0, burstiness=math.inf)
        disturbing = threads.submit(run_load, url, name, prompts, rate, stream=True)
        seen, long = steady.result(), disturbing.result()
    return {
        "model": name,
        "median_itl_ms": seen["median_itl_ms"],
        "p99_itl_ms": seen["p99_itl_ms"],
        "ratio": seen["p99_itl_ms"] / seen["median_itl_ms"],
        "long_prompt_ttft_ms": long["median_ttft_ms"],
    }
