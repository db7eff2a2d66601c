"""Overload: queues without a bound, and work that is done for nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_fixture import Server, async_client, running_server

CAPACITY = 8  # running and waiting
NUM_TOKENS = 40


def test_fault_overload_ten_times_the_load_is_refused_in_time_and_the_rest_is_answered(
    tiny_server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    """Who is accepted gets all of the right tokens, who is not is told when to come back."""
    expected = tiny_server.tokens([5, 6, 7], NUM_TOKENS)
    options = ("--max-num-seqs", "4", "--max-queue-len", str(CAPACITY - 4), "--num-kv-blocks", "64")
    with running_server(tiny_folder, tmp_path / "log", "--max-model-len", "256", *options) as server:

        async def run() -> list[httpx.Response]:
            async with async_client(server) as client:
                body: dict[str, Any] = server.body([5, 6, 7], NUM_TOKENS)
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(10 * CAPACITY)))

        responses = asyncio.run(run())
        assert {response.status_code for response in responses} == {200, 429}
        answered = [response.json()["choices"][0] for response in responses if response.status_code == 200]
        refused = [response for response in responses if response.status_code == 429]
        assert len(answered) >= CAPACITY - 4
        assert all(choice["token_ids"] == expected for choice in answered)
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert {response.json()["error"]["code"] for response in refused} == {"queue_full"}
        assert server.tokens([5, 6, 7], NUM_TOKENS) == expected
        server.until_idle()
