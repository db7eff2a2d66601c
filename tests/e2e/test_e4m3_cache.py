"""A server on the CPU whose KV cache is FP8: what it answers does not depend on batches, chunks or the prefix cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.server_fixture import Server, running_server, write_tiny_model

PROMPTS = [list(range(5, 5 + length)) for length in (40, 70, 41)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fp8")
    model = write_tiny_model(folder / "model")
    options = ("--kv-cache-dtype", "fp8", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")
    with running_server(model, folder / "log", *options) as started:
        yield started


def test_completions_are_the_same_alone_together_and_from_the_prefix_cache(server: Server) -> None:
    alone = [server.tokens(prompt, 12) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = list(threads.map(lambda prompt: server.tokens(prompt, 12), PROMPTS))
    assert together == alone
    assert server.metrics()["prefix_cache_hits_total"] > 0
    assert server.streamed(PROMPTS[0], 12).token_ids == alone[0]


def test_the_log_and_the_metrics_name_it(server: Server) -> None:
    assert re.search(r"KV cache +\d+ blocks of .* in fp8", server.log)
    assert 'cache_dtype="fp8"' in server.http.get("/metrics").text
