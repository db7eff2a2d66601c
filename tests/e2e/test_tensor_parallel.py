"""A server whose model is shared by ranks."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from tests.support.models.tiny_models import prompt
from tests.support.servers.server_fixture import HEALTH_DEADLINE, Server, running_server

PROMPT = prompt()[:12]


def test_ranks_serve_as_one_and_die_and_come_back_together(
    tiny_server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    expected = tiny_server.tokens(PROMPT, 16)
    with running_server(
        tiny_folder, tmp_path / "log", "--num-kv-blocks", "1024", "--tensor-parallel-size", "2"
    ) as server:
        assert server.tokens(PROMPT, 16) == expected
        assert "2 share the model" in server.log
        text = server.http.get("/metrics").text
        for name in ("weight_bytes", "kv_cache_bytes", "steps_total", "wait_seconds_total"):
            for rank in range(2):
                sample = f'tessera:rank_{name}{{model_name="tiny",rank="{rank}"}} '
                assert [
                    float(line.removeprefix(sample)) > 0 for line in text.splitlines() if line.startswith(sample)
                ] == [True]
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        server.until(lambda: server.http.get("/health").status_code == 503, "an unhealthy server", HEALTH_DEADLINE)
        server.until(lambda: server.http.get("/health").status_code == 200, "the ranks' return")
        assert server.tokens(PROMPT, 16) == expected


def test_engines_of_two_ranks_each_serve_as_one(tiny_server: Server, tiny_folder: Path, tmp_path: Path) -> None:
    prompts = [[number, *PROMPT] for number in range(20, 26)]
    expected = [tiny_server.tokens(prompt, 12) for prompt in prompts]
    sizes = ("--tensor-parallel-size", "2", "--data-parallel-size", "2")
    with running_server(tiny_folder, tmp_path / "log", "--num-kv-blocks", "256", *sizes) as server:
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(lambda prompt: server.tokens(prompt, 12), prompts)) == expected
        steps = {name: value for name, value in server.metrics().items() if name.startswith("rank_steps_total")}
        for rank, engine in product(range(2), range(2)):
            (found,) = (value for name, value in steps.items() if f'rank="{rank}",engine="{engine}"' in name)
            assert found > 0, steps
