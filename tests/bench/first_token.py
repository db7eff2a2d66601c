"""First tokens over HTTP beside a device that computes nothing: what the host's way costs, measured without a GPU.

    python -m tests.bench.first_token --base FOLDER-OF-ANOTHER-COMMIT --rounds 20

One client sends prompts of 128 token ids, each once it has read the answer before. The servers stay up, those of this
checkout with one app process and with two, and are measured in turn, so that a slow drift falls on all. Each graph of
kernels takes `--step-ms`. What a real driver's calls take is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from tests.bench.host import MODEL
from tests.bench.models import write_model
from tests.bench.null_device.sitecustomize import STEP_SECONDS
from tests.bench.serve import server
from tests.support.paths import ROOT

PROMPT_LEN = 128
OUTPUT_LEN = 4
TIMEOUT = 20.0  # seconds for an answer
END = b"0\r\n\r\n"  # of a chunked body


@contextlib.contextmanager
def null_server(checkout: Path, folder: Path, log: Path, step_seconds: float, *options: str) -> Iterator[str]:
    """The URL of a server of `folder` whose engine has a device that computes nothing."""
    path = os.pathsep.join([str(Path(__file__).parent / "null_device"), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ("--device", "cuda", "--load-format", "dummy", "--max-model-len", "1024", *options)
    with contextlib.ExitStack() as stack:
        with mock.patch.dict(os.environ, {"PYTHONPATH": path, STEP_SECONDS: str(step_seconds)}):
            url, _ = stack.enter_context(server(folder, log, *options, checkout=checkout))
        yield url


def first_tokens(url: str, count: int, rng: random.Random) -> list[float]:
    """Seconds from each request to its first event, on one connection. Raises RuntimeError for a wrong answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    found = []
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        for _ in range(count):
            prompt = [rng.randrange(3, 2000) for _ in range(PROMPT_LEN)]
            fields = {"model": "llama-8b", "prompt": prompt, "max_tokens": OUTPUT_LEN, "stream": True}
            body = json.dumps({**fields, "ignore_eos": True, "temperature": 0}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            begin = time.perf_counter()
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer, first = b"", None
            while not answer.endswith(END):
                received = connection.recv(2**16)
                answer += received
                if first is None and b"data:" in answer:
                    first = time.perf_counter() - begin
                if not received or not answer.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"{url} answered {answer[:300]!r}")
            assert first is not None, "an answer without an event"
            found.append(first)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.first_token", description=__doc__)
    parser.add_argument("--base", type=Path, help="folder of another checkout, measured as well")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=80, help="of a round (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=1.5, help="of a step on the device (%(default)s)")
    options = parser.parse_args()
    sides: dict[str, tuple[Path, tuple[str, ...]]] = {}
    if options.base is not None:
        sides["base"] = options.base.resolve(), ()
    sides |= {f"own, {count}": (ROOT, ("--api-workers", str(count))) for count in (1, 2)}
    rng = random.Random(1)
    medians: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as servers:
        folder = write_model(Path(work), "llama-8b", MODEL)
        urls = {
            name: servers.enter_context(
                null_server(checkout, folder, Path(work) / f"{name}.log", options.step_ms / 1000, *arguments)
            )
            for name, (checkout, arguments) in sides.items()
        }
        for number in range(1 + options.rounds):  # the first one warms up
            for name in urls if number % 2 else reversed(urls):
                found = first_tokens(urls[name], options.requests, rng)
                if number:
                    medians[name].append(1e6 * statistics.median(found))
    table = Table("server, app processes", "first token us", "error us", title="Mean of the rounds' medians")
    for name, values in medians.items():
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        table.add_row(name, f"{statistics.mean(values):.0f}", f"{error:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
