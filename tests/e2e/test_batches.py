"""A batch of a real server, through kill -9 of the engine and of the server itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import openai

from tests.batches.mortal_server import MortalServer
from tests.batches.workload import NUM_PROMPTS, Answers, Part, body

PATIENCE = 60.0
MODEL = "tiny"


def test_fault_kill_9_each_line_of_a_batch_has_one_result(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = (
        "--api-workers",
        "2",
        "--served-model-name",
        MODEL,
        "--batch-concurrency",
        "8",
        "--log-level",
        "warning",
    )
    server = MortalServer(tiny_folder, tmp_path / "data", tmp_path / "log", arguments)
    server.start()
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20, timeout=PATIENCE) as api:
            part, answers = Part(0, 800, MODEL), Answers()
            for prompt in range(0, NUM_PROMPTS, 64):
                answer = api.post("/completions", body=body(part.endpoint, MODEL, prompt), cast_to=dict[str, object])
                answers.learn(part.endpoint, prompt, answer)
            file = api.files.create(file=("in.jsonl", part.input_file()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

            def wait_for(num_lines: int) -> None:
                end = time.monotonic() + PATIENCE
                while True:
                    found = api.batches.retrieve(batch.id)
                    assert found.request_counts is not None
                    assert time.monotonic() < end, found
                    if found.request_counts.completed >= num_lines:
                        return
                    threading.Event().wait(0.05)

            wait_for(1)
            os.kill(server.children("engine")[0], signal.SIGKILL)
            wait_for(300)
            server.kill()
            server.start()
            wait_for(800)
            while (ended := api.batches.retrieve(batch.id)).status != "completed":
                assert ended.status in ("in_progress", "finalizing"), ended
                threading.Event().wait(0.05)
            assert ended.error_file_id is None
            lines = api.files.content(ended.output_file_id or "").text.splitlines()
            assert part.check(lines, answers, only_every=64) == []
    finally:
        server.stop()
