"""A million batch lines, with kill -9 of server, engine and app workers all along; then every line is checked.

`python -m tests.batches.million` takes most of an hour on two cores; `--lines 20000` a minute. It ends with a line of
JSON, and with exit code 1 unless each line has exactly one result with the right custom_id and the right answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.batches.mortal_server import MortalServer
from tests.batches.workload import ENDPOINTS, NUM_PROMPTS, Answers, Part, body
from tests.support.servers.server_fixture import write_tiny_model

MODEL = "tiny"
PATIENCE = 600.0  # seconds of one request, retries included
REPORT_INTERVAL = 30.0
MAX_REPORTED = 20
ACTIVE = ("validating", "in_progress", "finalizing")

T = TypeVar("T")


class Api:
    """Requests to a server that may be gone at any moment: they are sent again until there is a response."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._run = secrets.token_hex(4)
        self.num_retries = 0

    def json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        def send() -> dict[str, Any]:
            response = self._http.request(method, path, **options)
            if response.status_code >= 500 or response.status_code == 429:
                raise httpx.TransportError(f"{response.status_code}")
            assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text}"
            found: dict[str, Any] = response.json()
            return found

        return self._until_answered(send)

    def create(self, part: Part) -> str:
        """-> the batch's id. A creation whose response was lost is not repeated."""
        files = {"file": (f"part{part.number}.jsonl", part.input_file())}
        file_id = self.json("POST", "/v1/files", files=files, data={"purpose": "batch"})["id"]
        metadata = {"run": self._run, "part": str(part.number)}

        def send() -> str:
            for batch in self.json("GET", "/v1/batches", params={"limit": 100})["data"]:
                if batch["metadata"] == metadata:
                    return str(batch["id"])
            request = {"input_file_id": file_id, "endpoint": part.endpoint, "completion_window": "24h"}
            response = self._http.post("/v1/batches", json={**request, "metadata": metadata})
            if response.status_code >= 500:
                raise httpx.TransportError(f"{response.status_code}")
            return str(response.json()["id"])

        batch_id = self._until_answered(send)
        self.json("DELETE", f"/v1/files/{file_id}")
        return batch_id

    def check(self, part: Part, file_id: str, answers: Answers) -> list[str]:
        def read() -> list[str]:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
                if response.status_code != 200:
                    raise httpx.TransportError(f"{response.status_code}")
                return part.check(response.iter_lines(), answers)

        return self._until_answered(read)

    def _until_answered(self, send: Callable[[], T]) -> T:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return send()
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                self.num_retries += 1
                time.sleep(0.5)


class Proof:
    def __init__(self, api: Api, server: MortalServer, parts: list[Part], num_at_once: int) -> None:
        self._api = api
        self._server = server
        self._waiting = parts[::-1]
        self._num_at_once = num_at_once
        self._running: dict[str, Part] = {}
        self._counts: dict[str, int] = {}
        self._begun = time.monotonic()
        self.answers = Answers()
        self.wrong: list[str] = []
        self.num_checked = 0

    def learn(self) -> None:
        """Ask for every answer once, in the ordinary way."""
        for endpoint in ENDPOINTS:
            for prompt in range(NUM_PROMPTS):
                self.answers.learn(
                    endpoint, prompt, self._api.json("POST", endpoint, json=body(endpoint, MODEL, prompt))
                )

    def run(self) -> None:
        reported_at = self._begun = time.monotonic()
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._num_at_once:
                part = self._waiting.pop()
                self._running[self._api.create(part)] = part
            for batch_id in list(self._running):
                self._look_at(batch_id)
            if time.monotonic() - reported_at > REPORT_INTERVAL:
                reported_at = time.monotonic()
                self.report()
            time.sleep(1)
        self.report()

    def report(self) -> None:
        seconds = time.monotonic() - self._begun
        num_done = sum(self._counts.values())
        kills = ", ".join(f"{count} of {name}" for name, count in sorted(self._server.kills.items())) or "none"
        print(
            f"{seconds:6.0f} s: {num_done} lines done ({num_done / max(seconds, 1):.0f}/s), {self.num_checked} checked,"
            f" {len(self.wrong)} wrong; kills: {kills}; {self._api.num_retries} requests sent again",
            flush=True,
        )

    def _look_at(self, batch_id: str) -> None:
        batch = self._api.json("GET", f"/v1/batches/{batch_id}")
        counts, part = batch["request_counts"], self._running[batch_id]
        self._counts[batch_id] = counts["completed"] + counts["failed"]
        if batch["status"] in ACTIVE:
            return
        if batch["status"] != "completed" or counts != {
            "total": part.num_lines,
            "completed": part.num_lines,
            "failed": 0,
        }:
            self.wrong.append(f"part {part.number}: {batch['status']} {counts} {batch['errors']}")
        if batch["error_file_id"] is not None:
            self.wrong.append(f"part {part.number} has an error file")
        if batch["output_file_id"] is not None:
            self.wrong += self._api.check(part, batch["output_file_id"], self.answers)
            self._api.json("DELETE", f"/v1/files/{batch['output_file_id']}")
        self.num_checked += part.num_lines
        del self._running[batch_id]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.batches.million", description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument("--lines-per-batch", type=int, default=50_000, help="default: 50000")
    parser.add_argument("--at-once", type=int, default=2, help="batches under way at a time; default: 2")
    parser.add_argument("--workers", type=int, default=2, help="app processes; default: 2")
    parser.add_argument("--seed", type=int, default=17, help="of the kills; default: 17")
    parser.add_argument(
        "--pause", type=float, nargs=2, default=(10.0, 90.0), help="seconds between kills; default: 10 90"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.lines} lines", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="million-"))
    arguments = ("--api-workers", str(options.workers), "--log-level", "warning")
    server = MortalServer(write_tiny_model(folder / MODEL), folder / "data", folder / "server.log", arguments)
    starts = range(0, options.lines, options.lines_per_batch)
    parts = [
        Part(number, min(options.lines_per_batch, options.lines - start), MODEL) for number, start in enumerate(starts)
    ]
    begun = time.monotonic()
    proof = None
    try:
        server.start()
        proof = Proof(Api(server.url), server, parts, options.at_once)
        proof.learn()
        distinct = {endpoint: proof.answers.num_distinct(endpoint) for endpoint in ENDPOINTS}
        print(f"distinct answers to {NUM_PROMPTS} prompts: {distinct}; log and data in {folder}", flush=True)
        server.begin_killing(options.seed, *options.pause)
        proof.run()
    finally:
        server.stop()
    seconds = time.monotonic() - begun
    for wrong in proof.wrong[:MAX_REPORTED]:
        print(wrong)
    summary = {
        "lines": options.lines,
        "checked": proof.num_checked,
        "wrong": len(proof.wrong),
        "kills": dict(server.kills),
        "seed": options.seed,
        "seconds": round(seconds),
        "lines_per_second": round(options.lines / seconds),
    }
    print(json.dumps(summary), flush=True)
    if proof.wrong:
        return 1
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
