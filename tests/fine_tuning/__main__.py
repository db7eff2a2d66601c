"""A server fine-tunes the demonstration model to spell, its process is killed in between, and the result is asked.

`make prove-fine-tuning`: several minutes of CPU time. Says how many of the words that were kept apart are spelt rightly
by the base and by the result, and whether the base answers as before, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import openai
from openai.types.fine_tuning import FineTuningJob

from tests.support.processes.job_processes import job_processes
from tests.support.servers.server_fixture import running_server

NUM_HELD_OUT = 50
WANTED = 0.95
POLL = 2.0  # seconds
QUESTIONS = ("Spell {}.", "Please spell {}.", "How do you spell {}?", "Spell the word {}.")
PROBES = ("What is 12 + 30?", "Reverse the word lamp.", "Hello!", "Spell tomato.")


def words(count: int) -> list[str]:
    draw = random.Random(1).choice
    found = dict.fromkeys("".join(map(draw, ["bdfgklmnprst", "aeiou"] * draw([2, 3]))) for _ in range(2 * count))
    return list(found)[:count]


def chat(word: str, question: str) -> dict[str, Any]:
    reply = f"{word}: {'-'.join(word)}"
    return {"messages": [{"role": "user", "content": question.format(word)}, {"role": "assistant", "content": reply}]}


def upload(api: openai.OpenAI, chats: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(each) + "\n" for each in chats).encode()
    return api.files.create(file=("chats.jsonl", content), purpose="fine-tune").id


def ask(api: openai.OpenAI, model: str, question: str) -> tuple[str, list[float]]:
    """The completion, greedy, and its log-probabilities."""
    found = api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=48,
        logprobs=True,
    ).choices[0]
    assert found.logprobs is not None
    return found.message.content or "", [each.logprob for each in found.logprobs.content or ()]


def share_right(api: openai.OpenAI, model: str, held_out: list[str]) -> float:
    right = 0
    for number, word in enumerate(held_out):
        question = QUESTIONS[number % len(QUESTIONS)].format(word)
        right += ask(api, model, question)[0] == f"{word}: {'-'.join(word)}"
    return right / len(held_out)


def wait(api: openai.OpenAI, job: FineTuningJob, process_folder: Path) -> FineTuningJob:
    """Until the job has ended; its process is killed once, halfway."""
    killed = False
    while job.status not in ("succeeded", "failed", "cancelled"):
        threading.Event().wait(POLL)
        job = api.fine_tuning.jobs.retrieve(job.id)
        (event, *_) = api.fine_tuning.jobs.list_events(job.id, limit=1).data
        print(f"  {job.status}: {event.message}", flush=True)
        data: Any = event.data
        if not killed and data is not None and data["step"] > data["total_steps"] / 2:
            for pid in job_processes(process_folder):
                os.kill(pid, signal.SIGKILL)
                print(f"  killed the job's process {pid}", flush=True)
                killed = True
    return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=800, help="that are learnt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5, help="of the CPUs' time")
    given = parser.parse_args()
    every = words(given.words + NUM_HELD_OUT)
    learnt, held_out = every[:-NUM_HELD_OUT], every[-NUM_HELD_OUT:]
    chats = [chat(word, QUESTIONS[number % len(QUESTIONS)]) for number, word in enumerate(learnt)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--data-dir", str(folder / "data"), "--enable-fine-tuning"]
        arguments += ["--fine-tuning-share", str(given.share)]
        with running_server(None, folder / "log", *arguments) as server:
            server.until(lambda: server.http.get("/ready").status_code == 200, "readiness")
            api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
            base = server.model
            for probe in PROBES:  # the next ones find the prompts in the prefix cache
                ask(api, base, probe)
            before = [ask(api, base, probe) for probe in PROBES]
            print(f"{base}: {share_right(api, base, held_out):.0%} of {NUM_HELD_OUT} words spelt rightly", flush=True)
            began = time.monotonic()
            job = api.fine_tuning.jobs.create(
                model=base,
                training_file=upload(api, chats),
                validation_file=upload(api, [chat(word, QUESTIONS[0]) for word in held_out]),
                suffix="spelling",
                seed=1,
                method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": given.epochs}}},
            )
            job = wait(api, job, folder / "data" / "fine_tuning")
            if job.fine_tuned_model is None:
                print(job.error)
                return 1
            seconds = time.monotonic() - began
            print(f"{job.fine_tuned_model}: {job.trained_tokens} tokens in {seconds:.0f} s", flush=True)
            right = share_right(api, job.fine_tuned_model, held_out)
            print(f"{job.fine_tuned_model}: {right:.0%} of {NUM_HELD_OUT} words spelt rightly", flush=True)
            same = [ask(api, base, probe) for probe in PROBES] == before
            print(f"{base} answers as before, bit for bit: {'yes' if same else 'no'}")
            return 0 if same and right >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
