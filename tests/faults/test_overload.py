"""Overload: queues without a bound, and work that is done for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.text.workers import TextWorkers
from tests.faults.raw_http import HEAD, connect, read_to_the_end, responses
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve, settings_for, write_model_folder
from tests.support.servers.server_fixture import DEADLINE, Server, async_client, running_server

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


NUM_CUT = 40


@pytest.mark.parametrize("stream", [False, True])
def test_fault_overload_and_drain_what_is_cut_off_gets_an_error_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A status of 503, or a last event in a stream that has begun; the log does not repeat itself."""
    client = FakeClient(always(play(ids("hello"), finish=None)), hang=True)
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": stream}).encode()
    with contextlib.ExitStack() as stack:
        with serve(client, settings_for(write_model_folder(tmp_path)), drain_timeout=1) as url:
            connections = [stack.enter_context(connect(url)) for _ in range(NUM_CUT)]
            for number, connection in enumerate(connections):
                client.submitted.clear()
                connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
                if stream:
                    assert connection.recv(1), "the answer began"
                else:
                    assert client.submitted.wait(DEADLINE), number
        for connection in connections:
            received = read_to_the_end(connection)
            if stream:
                assert b'"code":"server_shutdown"' in received
                assert received.endswith(b"0\r\n\r\n"), "the response is whole"
            else:
                ((status, answer),) = responses(received)
                assert (status, answer["error"]["code"]) == (503, "server_shutdown")
                assert b"retry-after: " in received
    assert all(submission.aborted.is_set() for submission in client.submissions)
    assert "Traceback" not in caplog.text
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_fault_overload_a_text_job_that_raises_gives_its_place_back() -> None:
    """Bad prompts, say, after which every chat would be told that too many are waiting."""

    def fails() -> None:
        raise ValueError("a bad prompt")

    async def scenario() -> None:
        workers = TextWorkers(num_threads=1, max_jobs=2)
        for _ in range(5):
            with pytest.raises(ValueError, match="a bad prompt"):
                await workers.run(fails, timeout=DEADLINE)
        assert await workers.run(lambda: "fine", timeout=DEADLINE) == "fine"
        workers.close()

    asyncio.run(scenario())
