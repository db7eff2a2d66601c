"""`make eval`: exact match on held-out cases of every skill, over HTTP, as a table.

With `--phrasings held-out` the cases are also asked for in phrasings that are kept out of training.

Without --base-url a server with the built-in model, or with --model, is started on a free port of 127.0.0.1, with the
options after --.
The digest of all answers tells whether runs gave the same ones: `--concurrency 1 8 32 -- --batch-invariant` has three
runs, and one digest. --output and --show are of the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tessera.engine.builtin.training.conversation import Conversation, Split
from tessera.engine.builtin.training.corpus import cases, skills_of
from tests.bench.serve import server
from tests.evaluation.judge import SPLITS, is_right, request_of


async def evaluate(
    base_url: str, model: str, split: Split, count: int, concurrency: int
) -> dict[str, list[tuple[Conversation, Any]]]:
    """Each skill's cases in order, each with its answer."""
    gate, skills = asyncio.Semaphore(concurrency), skills_of(split)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        chosen = [case for skill in skills for case in cases(skill, seed=1, count=count, split=split)]
        task = progress.add_task("held-out cases", total=len(chosen))
        async with httpx.AsyncClient(base_url=base_url, timeout=300) as http:

            async def ask(case: Conversation) -> tuple[Conversation, Any]:
                async with gate:
                    response = await http.post("/v1/chat/completions", json=request_of(case, model))
                response.raise_for_status()
                progress.advance(task)
                return case, response.json()["choices"][0]["message"]

            answers = await asyncio.gather(*map(ask, chosen))
    return {skill: [pair for pair in answers if pair[0].skill == skill] for skill in skills}


def digest(answers: list[Any]) -> str:
    """Of messages, without the ids of tool calls, which are random."""
    for answer in answers:
        for call in answer.get("tool_calls") or ():
            call.pop("id")
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()[:16]


def print_shares(title: str, shares: dict[str, float]) -> None:
    table = Table(title=title)
    table.add_column("skill")
    table.add_column("right", justify="right")
    for skill, share in shares.items():
        table.add_row(skill, f"{share:.1%}")
    table.add_row("mean", f"{sum(shares.values()) / len(shares):.1%}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation", description=__doc__)
    parser.add_argument("--base-url", help="a running server (default: start one)")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="of the server that is started (default: built-in)"
    )
    parser.add_argument("--phrasings", choices=SPLITS, default="usual", help="how cases are asked for (%(default)s)")
    parser.add_argument("--count", type=int, default=200, help="cases a skill (%(default)s)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[32],
        help="requests at once; several for as many runs (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="of the server that is started (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the server that is started (%(default)s)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N wrong answers of each skill")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the shares as JSON")
    parser.add_argument("server", nargs="*", help="options of the server that is started, after --")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.base_url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
            arguments = ("--device", options.device, "--dtype", options.dtype, *options.server)
            options.base_url, _ = stack.enter_context(server(options.model, log, *arguments))
        listed = httpx.get(f"{options.base_url}/v1/models", timeout=30).raise_for_status().json()
        model = listed["data"][0]["id"]
        digests = set()
        for concurrency in options.concurrency:
            start = time.perf_counter()
            answered = asyncio.run(
                evaluate(options.base_url, model, SPLITS[options.phrasings], options.count, concurrency)
            )
            title = f"{options.count} held-out cases a skill, {options.phrasings} phrasings, {concurrency} at once"
            wrong = {skill: [pair for pair in pairs if not is_right(*pair)] for skill, pairs in answered.items()}
            shares = {skill: 1 - len(found) / len(answered[skill]) for skill, found in wrong.items()}
            print_shares(f"{model}: exact match on {title} ({time.perf_counter() - start:.0f} s)", shares)
            digests.add(digest([answer for pairs in answered.values() for _, answer in pairs]))
    print("digest of all answers:", *sorted(digests))
    print(json.dumps({"runs": len(options.concurrency), "digests": len(digests)}))
    for skill, found in wrong.items():
        for case, answer in found[: options.show]:
            print(json.dumps({"skill": skill, "messages": case.messages, "answer": answer}, ensure_ascii=False))
    if options.output:
        options.output.write_text(json.dumps(shares, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
