"""Two CPU replicas on Ray Serve, one of them killed under load: `make prove-ray`, in an environment with the extra ray.

Shows that only requests that ran there fail, that the replica comes back, and that turns of a conversation find their
prefix. Exit code 1 if any of it is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from tessera.app.ray_serve.application import build

MODEL = "tessera-builtin"
RUNNING = 6  # most requests under way in a replica, so that others wait in the front
DEADLINE = 600.0  # seconds


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def replica_processes() -> list[int]:
    """Ids of this user's processes that run replicas."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"ServeReplica:tessera-proof:Replica" in title:
                found.append(int(folder.name))
    return sorted(found)


async def until_replicas(number: int, but: int | None = None) -> float:
    """-> seconds until so many run, without the one that was killed."""
    begin = time.monotonic()
    while time.monotonic() - begin < DEADLINE:
        status = serve.status().applications["tessera-proof"].deployments["Replica"]
        processes = replica_processes()
        if status.replica_states.get("RUNNING", 0) == len(processes) == number and but not in processes:
            return time.monotonic() - begin
        await asyncio.sleep(0.25)
    raise AssertionError(f"there were never {number} replicas: {serve.status()}")


async def ask(http: httpx.AsyncClient, number: int, max_tokens: int) -> str:
    """How a streamed completion ended: `done`, or its error's code."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"What is {number} + 468? " + "Think well. " * number}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return str(json.loads(await response.aread())["error"]["code"])
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "done"
            if '"error"' in line:
                return str(json.loads(line.removeprefix("data: "))["error"]["code"])
    return "cut off"


async def converse(http: httpx.AsyncClient, number: int, turns: int) -> tuple[int, int]:
    """-> tokens of the prompts after the first turn that could be cached, and those that were."""
    messages: list[dict[str, str]] = [
        {"role": "system", "content": f"You are assistant {number}. " + "Be exact. " * 40}
    ]
    possible = cached = before = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Add {number} and {turn}. " + "Check it. " * 20})
        body = {"model": MODEL, "messages": messages, "max_tokens": 16}
        answer: dict[str, Any] = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        usage = answer["usage"]
        if turn > 0:
            possible += before // 16 * 16
            cached += min(usage["prompt_tokens_details"]["cached_tokens"], before // 16 * 16)
        before = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    return possible, cached


async def prove(url: str, num_requests: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=limits) as http:
        await until_replicas(2)
        found: dict[str, Any] = {"models": [m["id"] for m in (await http.get("/v1/models")).json()["data"]]}
        conversations = await asyncio.gather(*(converse(http, number, 5) for number in range(8)))
        found["prefix_hits"] = round(sum(each[1] for each in conversations) / sum(each[0] for each in conversations), 4)
        load = [asyncio.create_task(ask(http, number, 64)) for number in range(num_requests)]
        done, _ = await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
        victim = replica_processes()[0]
        os.kill(victim, signal.SIGKILL)
        replaced = asyncio.create_task(until_replicas(2, but=victim))
        found["done_before_the_kill"] = len(done)
        ends = await asyncio.gather(*load)
        found["ends"] = {end: ends.count(end) for end in sorted(set(ends))}
        found["seconds_until_two_replicas"] = round(await replaced, 1)
        again = await asyncio.gather(*(ask(http, number, 8) for number in range(12)))
        found["afterwards"] = {end: again.count(end) for end in sorted(set(again))}
    lost = num_requests - found["ends"].get("done", 0)
    found["holds"] = {
        "only what ran there failed": 0 < lost <= RUNNING and set(found["ends"]) <= {"done", "replica_died"},
        "all is well afterwards": found["afterwards"] == {"done": 12},
        "prefixes are found": found["prefix_hits"] >= 0.9,
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray_serve", description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    given = parser.parse_args()
    port = free_port()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = {
            "serve": "--device cpu --num-kv-blocks 4096",
            "min_replicas": "2",  # text, as from a command line
            "max_replicas": 2,
            "gpus": 0,
            "cpus": 1,
            "max_ongoing_requests": RUNNING,
            "drain": 5,
        }
        serve.run(build(application), name="tessera-proof", route_prefix="/")
        found = asyncio.run(prove(f"http://127.0.0.1:{port}", given.requests))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found, indent=2))
    return int(not all(found["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
