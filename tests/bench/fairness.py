"""A light key's time to first token beside heavy ones, under each attack that fair sharing is to stop.

    python -m tests.bench.fairness

serves the demonstration model on the CPU with a key for each client. `--tree` serves another checkout, for figures
before a change. The light key sends short streamed requests, about half of what its share of the engine allows: beyond
its share it would wait, as the others do.

    python -m tests.bench.fairness --engine

runs the engine alone, in this process, and counts its CPU time, which other programs on the machine do not change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tessera.app.cli.hub import builtin_model
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AccountRef, AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tests.support.paths import ROOT

MODULE = "tests.bench.fairness"
NUM_HEAVY = 20
HEAVY_STREAMS = 16  # of each heavy key
LIGHT_ACCOUNT = 99
FAIR_STREAMS = 3  # of each key, where 21 share 64 seats
START_TIMEOUT = 120.0
SETTLE = 3.0  # seconds that the heavy keys have before the light one begins
TOO_LATE = 120.0  # seconds: a first token that did not come by then counts as that late
CONTEXT = 2000  # tokens of a long prompt
PAUSE = 0.1  # seconds
LIGHT_SERVICE = 49  # of a request of the light key: its prompt, and twice its tokens
# Tokens of all keys between two of them, so that the light key uses half its share; each is 2 of service.
SHARED_TOKENS = LIGHT_SERVICE * (NUM_HEAVY + 1)

LIGHT = {"prompt": "Once upon a time there was", "max_tokens": 8, "stream": True, "ignore_eos": True}
HEAVY = {"prompt": "The history of the city begins with", "max_tokens": 200, "ignore_eos": True}


def keys() -> list[str]:
    return ["light", *(f"heavy{number}" for number in range(NUM_HEAVY))]


@contextlib.contextmanager
def served(tree: Path, arguments: list[str]) -> Iterator[str]:
    """The URL of a server that runs the code of `tree`."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tessera", "serve", "--device", "cpu", "--port", "0", *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "TESSERA_API_KEY": ",".join(keys())},
            stdout=log,
            stderr=log,
        )
        try:
            yield _url(process, log.fileno())
        finally:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _url(process: subprocess.Popen[bytes], log: int) -> str:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        found = re.search(rb"Ready on (http://\S+)", os.pread(log, 2**20, 0))
        if found is not None:
            return found[1].decode()
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{os.pread(log, 2**20, 0).decode()}")


class Load:
    """Requests of the heavy keys, each begun again when it ends."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    def keep_sending(self, key: str, body: dict[str, Any]) -> None:
        self._tasks.append(asyncio.create_task(self._send(key, body)))

    async def _send(self, key: str, body: dict[str, Any]) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._client.post("/v1/completions", json=body, headers=bearer(key), timeout=600)
                if answer.status_code >= 400:
                    await asyncio.sleep(0.2)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def time_to_first_token(client: httpx.AsyncClient) -> float:
    """Of the light key, in seconds; refusals are tried again, as clients do."""
    begin = time.monotonic()
    body = {**LIGHT, "prompt": f"{random.random()} {LIGHT['prompt']}"}
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_first_token(client, body), TOO_LATE)
    return time.monotonic() - begin


async def _first_token(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    while True:
        async with client.stream(
            "POST", "/v1/completions", json=body, headers=bearer("light"), timeout=2 * TOO_LATE
        ) as answer:
            async for line in answer.aiter_lines():
                if answer.status_code == 200 and line.startswith("data: {"):
                    return
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def attack(name: str, url: str) -> AsyncIterator[None]:
    """One of `SCENARIOS`, for as long as the block runs; its requests come from another process."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, "--only", name, "--load", url)
    try:
        if SCENARIOS[name]:
            await asyncio.sleep(SETTLE)
        yield
    finally:
        process.kill()
        await process.wait()


async def send_load(name: str, url: str) -> None:
    """The heavy keys' requests, until this process is killed."""
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as client:
        load = Load(client)
        for key, body, streams in SCENARIOS[name]:
            for number in range(streams):
                load.keep_sending(key, {**body, "seed": number})
        await asyncio.Event().wait()


def _scenarios() -> dict[str, list[tuple[str, dict[str, Any], int]]]:
    """Keys, bodies, and how many of them at a time."""
    heavy = keys()[1:]
    long_prompts = [[(7 * row + place) % 200 + 10 for place in range(CONTEXT)] for row in range(128)]
    words = [" ".join(f"{(row * 61 + place) % 997}" for place in range(60)) for row in range(128)]
    many = {**HEAVY, "prompt": [f"{row} {HEAVY['prompt']}" for row in range(4)], "n": 128}
    wide = {**HEAVY, "prompt": [f"{row} {HEAVY['prompt']}" for row in range(8)], "n": 128, "max_tokens": 16}
    return {
        "alone": [],
        "a fair share: 20 keys, 3 streams each": [(key, HEAVY, FAIR_STREAMS) for key in heavy],
        "20 heavy keys, 16 streams each": [(key, HEAVY, HEAVY_STREAMS) for key in heavy],
        "D7: 4 prompts, n=128": [(heavy[0], many, 1)],
        "D7: 64 streams of priority -2^31": [(heavy[0], {**HEAVY, "max_tokens": 400, "priority": -(2**31)}, 128)],
        "D7: prompt_logprobs, 128 x 2000 tokens": [
            (heavy[0], {"prompt": long_prompts, "max_tokens": 1, "prompt_logprobs": 1}, 1)
        ],
        "D6: bad_words, 8 prompts, n=128": [(heavy[0], {**wide, "bad_words": words}, 1)],
    }


SCENARIOS = _scenarios()


async def measure(name: str, url: str, count: int, seconds: float) -> list[float]:
    """Times to first token: `count` of them, or as many as come within `seconds`."""
    found: list[float] = []
    async with attack(name, url), httpx.AsyncClient(base_url=url) as light:
        end = time.monotonic() + seconds
        while len(found) < count and (not found or time.monotonic() < end):
            found.append(await time_to_first_token(light))
            before = await num_tokens(light)
            await asyncio.sleep(PAUSE)
            while SCENARIOS[name] and await num_tokens(light) < before + SHARED_TOKENS and time.monotonic() < end:
                await asyncio.sleep(PAUSE)
    return sorted(found)


async def num_tokens(client: httpx.AsyncClient) -> float:
    """Tokens that the server has generated for all keys, as of the last second."""
    text = (await client.get("/metrics", headers=bearer("light"))).text
    found = re.search(r"^tessera:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def measure_engine(streams: int, count: int) -> list[float]:
    """The light key's CPU seconds to first token beside NUM_HEAVY keys of `streams` streams each, `count` of them."""
    config = EngineConfig(model=str(builtin_model().path), device="cpu")
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    core._clock = time.process_time
    rng = random.Random(7)
    numbers = itertools.count()
    running: dict[str, int] = {}

    def start(account_id: int, length: int, max_tokens: int) -> str:
        name = f"r{next(numbers)}"
        prompt = array("i", [rng.randrange(10, 200) for _ in range(length)])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        core.add_request(AddRequest(name, prompt, params, time.process_time(), account=AccountRef(account_id)), b"c")
        running[name] = account_id
        return name

    def step() -> set[str]:
        """-> the requests that got a token; heavy ones that end are followed by others."""
        got = set()
        for output in core.step().get(b"c", []):
            got.add(output.request_id)
            if output.finish_reason is not None and (account_id := running.pop(output.request_id)) != LIGHT_ACCOUNT:
                start(account_id, 12, 200)
        return got

    for account_id in range(1, NUM_HEAVY + 1):
        for _ in range(streams):
            start(account_id, 12, rng.randint(20, 200))
    for _ in range(40 if streams else 0):
        step()
    found = []
    for _ in range(count):
        begin = time.process_time()
        name = start(LIGHT_ACCOUNT, 12, 8)
        while name not in step():
            pass
        found.append(time.process_time() - begin)
        while name in running:
            step()
    return sorted(found)


def percentile(values: list[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fairness", description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to serve")
    parser.add_argument("--count", type=int, default=100, help="requests of the light key in each scenario")
    parser.add_argument("--seconds", type=float, default=45, help="most time for each scenario")
    parser.add_argument("--only", action="append", choices=tuple(SCENARIOS), help="scenario (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file for the times")
    parser.add_argument("--engine", action="store_true", help="the engine alone, in CPU time")
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(send_load(options.only[0], options.load))
    times: dict[str, list[float]] = {}
    if options.engine:
        for streams in (0, FAIR_STREAMS, HEAVY_STREAMS):
            times[f"{NUM_HEAVY} keys, {streams} streams each"] = measure_engine(streams, options.count)
    for name in () if options.engine else options.only or SCENARIOS:
        with served(options.tree.resolve(), ["--max-num-seqs", "64"]) as url:
            times[name] = asyncio.run(measure(name, url, options.count, options.seconds))
        print(f"{name}: {len(times[name])} requests", file=sys.stderr)
    table = Table("scenario", "requests", "median s", "P99 s", title="Time to first token of the light key")
    for name, found in times.items():
        table.add_row(name, str(len(found)), f"{percentile(found, 0.5):.3f}", f"{percentile(found, 0.99):.3f}")
    Console().print(table)
    if options.output is not None:
        options.output.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
