"""Two engines of one model behind one server: the same tokens, prefixes that stay together, an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tessera.app.engines.engines import Engines
from tessera.app.engines.replicated_client import ReplicatedClient
from tessera.app.routing.block_keys import block_keys
from tests.support.cases.token_ids import token_ids
from tests.support.servers.server_fixture import DEADLINE, Server, running_server

PROMPT = list(range(10, 90)) * 4


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("dp") / "log"
    with running_server(tiny_folder, log, "--data-parallel-size", "2", "--num-kv-blocks", "256") as server:
        yield server


def by_engine(server: Server, name: str) -> list[float]:
    """A metric's value of each engine; 0 where it has none."""
    found = [0.0, 0.0]
    for sample, value in server.metrics().items():
        for engine in range(2):
            if sample.startswith(name) and f'engine="{engine}"' in sample:
                found[engine] += value
    return found


def engines_at_work(server: Server) -> list[int]:
    return server.children("tessera.engine.ipc.process")


def test_both_engines_work_and_give_the_tokens_of_one(server: Server, tiny_server: Server) -> None:
    prompts = [[number, *PROMPT[:20]] for number in range(10, 22)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda prompt: server.tokens(prompt, 24), prompts))
    assert found == [tiny_server.tokens(prompt, 24) for prompt in prompts]
    assert min(by_engine(server, "request_success_total")) >= 2
    assert "engines" in server.log, "the start report says how many there are"


def test_a_conversation_stays_where_its_prefix_is(server: Server) -> None:
    before = sum(by_engine(server, "prefix_cache_hits_total"))
    prompt = [7, *PROMPT]
    for turn in range(1, 5):
        prompt += [*server.tokens(prompt, 8), turn]
    hits = sum(by_engine(server, "prefix_cache_hits_total")) - before
    assert hits >= 3 * (len(PROMPT) // 16) * 16, "every turn but the first finds the one before"


def test_other_app_processes_hear_of_it(server: Server) -> None:
    """A client of its own stands for another app process, which sent none of the requests."""
    (pid, _) = engines_at_work(server)
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    run_dir = Path(os.fsdecode(argv[argv.index(b"tessera.engine.ipc.process") + 1])).parent

    async def listen() -> None:
        engines = Engines.of_run_dir(run_dir, {"tiny": 2}, is_static=True)
        client = engines[0].client
        assert isinstance(client, ReplicatedClient)
        await client.start()
        try:
            await asyncio.wait_for(client.wait_first_ready(), DEADLINE)
            client._choose(token_ids([1]), 1, "")  # the index has its size from now on
            prompt = token_ids([77, *PROMPT])
            info = client.info
            assert info is not None
            keys = block_keys(prompt, 1, "", info)
            async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as http:
                (await http.post("/v1/completions", json=server.body(list(prompt), 1))).raise_for_status()
            end = time.monotonic() + DEADLINE
            while max(depth for depth, _ in client._index.matches(keys, 0b11)) < len(keys):
                assert time.monotonic() < end, "no engine has reported the prompt"
                await asyncio.sleep(0.01)
        finally:
            await client.close()

    asyncio.run(listen())


def test_an_engine_that_dies_takes_only_its_own_requests(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(server.stream(server.body([number, 5, 6], 4000))) for number in range(30, 34)]
        for stream in streams:
            next(stream)
        victim = engines_at_work(server)[0]
        os.kill(victim, signal.SIGKILL)
        server.until(lambda: server.http.get("/health").json()["reason"] != "all 2 engines are ready", "the news")
        health = server.http.get("/health")
        assert health.status_code == 200, "the other engine serves"
        assert re.fullmatch("engine [01]: the engine (process ended|is starting).*", health.json()["reason"])
        assert server.tokens(PROMPT, 4)
        errors = [frame["error"]["code"] for stream in streams for frame in islice(stream, 500) if "error" in frame]
    assert errors == ["engine_died", "engine_died"], "of four requests two ran there"
    server.until(lambda: server.http.get("/health").json()["reason"] == "all 2 engines are ready", "both engines")
    assert victim not in engines_at_work(server)


def test_sleep_ends_both_engines_and_sigterm_the_server(server: Server) -> None:
    assert server.http.post("/sleep").json() == {"is_sleeping": True}
    server.until(lambda: not engines_at_work(server), "the engines' end")
    assert server.http.post("/v1/completions", json=server.body(PROMPT, 4)).json()["error"]["code"] == "model_asleep"
    assert server.http.get("/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
