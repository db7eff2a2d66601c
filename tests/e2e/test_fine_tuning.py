"""The whole of fine-tuning with a real engine: upload, train, call by name; the base answers as before, bit for bit."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.servers.server_fixture import DEADLINE, Server, running_server

REPLY = "the train is there"
QUESTION: Any = [{"role": "user", "content": "Say it."}]


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tuning")
    arguments = ["--enable-fine-tuning", "--fine-tuning-share", "1", "--data-dir", str(folder / "data")]
    with running_server(tiny_folder, folder / "log", *arguments) as server:
        yield server


def ask(api: openai.OpenAI, model: str) -> tuple[str | None, list[float]]:
    """The completion, greedy, and its log-probabilities."""
    found = api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=30, logprobs=True
    ).choices[0]
    assert found.logprobs is not None
    return found.message.content, [each.logprob for each in found.logprobs.content or ()]


@pytest.mark.slow
def test_a_model_learns_and_its_base_stays_as_it_was(server: Server) -> None:
    server.until(lambda: server.http.get("/ready").status_code == 200, "readiness")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        ask(api, server.model)  # the next ones find the prompt in the prefix cache
        before = ask(api, server.model)
        assert not str(before[0]).startswith(REPLY)
        chat = {"messages": [*QUESTION, {"role": "assistant", "content": REPLY}]}
        content = (json.dumps(chat) + "\n").encode() * 4
        file = api.files.create(file=("chats.jsonl", content), purpose="fine-tune")
        job = api.fine_tuning.jobs.create(
            model=server.model, training_file=file.id, hyperparameters={"n_epochs": 10, "batch_size": 1}
        )
        end = time.monotonic() + DEADLINE
        while job.status not in ("succeeded", "failed"):
            assert time.monotonic() < end, server.log
            threading.Event().wait(0.1)
            job = api.fine_tuning.jobs.retrieve(job.id)
        assert job.fine_tuned_model is not None, job.error
        assert str(ask(api, job.fine_tuned_model)[0]).startswith(REPLY)
        assert ask(api, server.model) == before


@pytest.mark.slow
def test_a_job_ends_with_its_server(server: Server) -> None:
    """However that ends; this is the last test of the module."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        chat = {"messages": [*QUESTION, {"role": "assistant", "content": REPLY}]}
        file = api.files.create(file=("chats.jsonl", (json.dumps(chat) + "\n").encode() * 50), purpose="fine-tune")
        hyperparameters: Any = {"n_epochs": 50, "batch_size": 1}
        job = api.fine_tuning.jobs.create(model=server.model, training_file=file.id, hyperparameters=hyperparameters)
        (pid,) = server.until(lambda: server.children("tessera.app.training.job_process"), "the job's process")
        server.until(lambda: api.fine_tuning.jobs.retrieve(job.id).status == "running", "its steps")
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    server.process.kill()
    server.process.wait()
    end = time.monotonic() + DEADLINE
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, "the job's process has outlived its server"
        threading.Event().wait(0.05)
