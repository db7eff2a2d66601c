"""The server's own processes: one that is stopped goes unnoticed, and each inherits secrets that it has no use for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tessera.app.server import worker_pool
from tessera.app.server.worker_pool import WorkerLaunch, WorkerPool
from tessera.engine.ipc.supervisor import make_run_dir
from tests.support.fakes.virtual_time import VirtualTimeLoop
from tests.support.servers.http_fixtures import settings_for, write_model_folder
from tests.support.servers.server_fixture import DEADLINE, Server, running_server

SECRETS = {"TESSERA_API_KEY": "sk-in-the-environment", "HF_TOKEN": "hf-in-the-environment"}


def descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        for child in children.read_text().split():
            yield int(child)
            yield from descendants(int(child))


def catches_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1)


def test_fault_processes_a_stopped_app_process_is_replaced(tmp_path: Path) -> None:
    """The others have other work meanwhile, and its own start is not taken for silence."""
    listener = socket.create_server(("127.0.0.1", 0))
    run_dir = make_run_dir()
    settings = settings_for(write_model_folder(tmp_path), num_app_processes=2)
    launch = WorkerLaunch(str(run_dir), listener.fileno(), 1, settings)

    async def until_one_serves(other_than: int = 0) -> int:
        while True:
            for process in pool._processes:
                # A handler of SIGTERM is set when all is ready, after the first heartbeat.
                if process.pid != other_than and catches_sigterm(process.pid):
                    return process.pid
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        pool.start()
        stopped = await until_one_serves()
        os.kill(stopped, signal.SIGSTOP)
        assert await until_one_serves(stopped) != stopped
        assert not Path(f"/proc/{stopped}").exists()
        pool.terminate()
        await pool.join()

    pool = WorkerPool(1, launch, silent_intervals=2)
    with listener:
        asyncio.run(asyncio.wait_for(scenario(), DEADLINE))
    run_dir.rmdir()


def test_fault_processes_a_crash_loop_backs_off_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On virtual time: app processes that end at once, and one that lasted."""
    begins: list[float] = []

    async def run_once(pool: WorkerPool, app_process: int) -> int:
        begins.append(loop.time())
        if len(begins) == 8:
            await asyncio.sleep(2 * worker_pool.HEALTHY_AFTER)
        if len(begins) == 10:
            pool.terminate()
        return 1

    monkeypatch.setattr(WorkerPool, "_run_once", run_once)
    loop = VirtualTimeLoop(asyncio.Protocol)
    monkeypatch.setattr("tessera.app.server.worker_pool.time.monotonic", loop.time)
    try:
        launch = WorkerLaunch("", 0, 1, settings_for(tmp_path))
        loop.run_until_complete(WorkerPool(1, launch)._keep_running(1))
    finally:
        loop.close()
    pauses = [round(later - earlier) for earlier, later in pairwise(begins)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 121, 2]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "an app process ended with exit code 1; it is restarted in 1.0 s"
    assert lines[2] == "an app process ended with exit code 1, for the 3. time in a row; it is restarted in 4.0 s"


def test_fault_processes_the_server_ends_where_an_app_process_has_just_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()
        pool = WorkerPool(1, WorkerLaunch("", 0, 1, settings_for(tmp_path)))
        pool._processes.add(process)  # as long as its task has not come to remove it
        pool.terminate()
        await pool.join()

    asyncio.run(scenario())


def test_fault_processes_none_inherits_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    keys = tmp_path / "keys"
    keys.write_text(SECRETS["TESSERA_API_KEY"])
    with running_server(None, tmp_path / "log", "--api-key-file", str(keys), "--api-workers", "2") as server:
        server.http.headers["authorization"] = f"Bearer {SECRETS['TESSERA_API_KEY']}"
        ask_with_a_grammar(server)
        found = list(descendants(server.process.pid))
        commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in found)
        for module in ("app.server.worker", "engine.ipc.process", "engine.grammar.probe", "app.text.renderer"):
            assert f"tessera.{module}" in commands
        for pid in found:
            environment = Path(f"/proc/{pid}/environ").read_text()
            assert not [value for value in SECRETS.values() if value in environment]


def ask_with_a_grammar(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "guided_regex": "[a-z]+"}
    server.post({"model": server.model, **body}, "/v1/chat/completions")
