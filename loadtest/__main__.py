"""`python -m loadtest`: drive an OpenAI-compatible server and print the field's figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx
import orjson
from rich.console import Console

from loadtest.arrival import Arrival
from loadtest.report import render
from loadtest.run import run
from loadtest.summary import BUSY_CLIENT
from loadtest.workload import RandomWorkload


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="server to drive (%(default)s)")
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests in total (%(default)s)")
    parser.add_argument("--max-concurrency", type=int, default=4, help="requests under way at once (%(default)s)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=500, help="ids are drawn below this (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (%(default)s)")
    parser.add_argument("--no-stream", action="store_true", help="wait for whole answers")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    for name in ("num_prompts", "max_concurrency", "input_len", "output_len"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.vocab_size < 17:
        parser.error("--vocab-size must be at least 17")
    workload = RandomWorkload(
        options.num_prompts, options.input_len, options.output_len, options.vocab_size, options.seed
    )
    try:
        model = options.model or _first_model(options.base_url)
        arrival = Arrival(max_concurrency=options.max_concurrency)
        summary = run(options.base_url, model, workload, arrival, stream=not options.no_stream)
    except httpx.HTTPError as error:
        print(f"cannot reach {options.base_url}: {error}", file=sys.stderr)
        return 1
    Console().print(render(summary))
    for message, count in summary["errors"].items():
        print(f"{count} x {message}", file=sys.stderr)
    if summary["client_cpu_share"] > BUSY_CLIENT:
        print(
            f"a client process used {summary['client_cpu_share']:.0%} of a core: its times may be too long",
            file=sys.stderr,
        )
    if options.output:
        options.output.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    return 1 if summary["failed"] else 0


def _first_model(base_url: str) -> str:
    response = httpx.get(f"{base_url.rstrip('/')}/v1/models", timeout=30)
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


if __name__ == "__main__":
    sys.exit(main())
