"""Counts the files that one streamed chat request passes through: `python -m tests.structure.request_path`.

The app runs here, without sockets, and the engine in a process of its own; both on the CPU with the built-in model. A
file counts if one of its functions runs between the request's first byte and the last byte of the response. The process
that renders chat templates is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tessera.app.engines.engines import Engines
from tessera.app.server.application import create_app
from tessera.app.settings import AppSettings
from tessera.engine.contract.config import EngineConfig
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.process import serve
from tessera.engine.ipc.supervisor import EngineSupervisor, make_run_dir
from tests.support.paths import ROOT

MODEL = ROOT / "engine" / "builtin"
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 357 + 468?"}],
    "max_tokens": 16,
}
REPORT = "request-path.json"  # the engine's files, in its run folder
TIMEOUT = 60.0


class FileRecorder:
    """The project's files whose functions are called, in the threads where this is the profile function."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.names.add(frame.f_code.co_filename)

    def project_files(self, *rooms: str) -> list[str]:
        """Paths below the repository's root, of the given rooms."""
        paths = {Path(os.path.relpath(os.path.realpath(name), ROOT)).as_posix() for name in self.names}
        return sorted(path for path in paths if path.startswith(tuple(f"{room}/" for room in rooms)))


async def recorded(work: Awaitable[Any]) -> FileRecorder:
    """The files that run while `work` is awaited, in this thread and in those that it starts."""
    recorder = FileRecorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        await work
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder


async def app_files(client: Any, settings: AppSettings, body: dict[str, Any]) -> list[str]:
    """The files of app/ and engine/ that run in the app process for one chat request."""
    app = create_app(Engines.of_clients(client), settings)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://tessera", timeout=TIMEOUT) as http,
    ):
        await app.state.batch_runner.close()  # runs beside requests, not for them

        async def send() -> None:
            response = await http.post("/v1/chat/completions", json={**body, "stream": True})
            assert response.status_code == 200, response.text

        return (await recorded(send())).project_files("app", "engine")


async def count() -> tuple[list[str], list[str]]:
    """The files that run in the app process, and those in the engine process."""
    run_dir = make_run_dir()
    config = EngineConfig(model=str(MODEL), device="cpu", max_model_len=256)
    supervisor = EngineSupervisor(config, run_dir, module=__name__ if __name__ != "__main__" else __spec__.name)
    client = EngineClient(run_dir)
    try:
        supervisor.start()
        await client.start()
        await supervisor.wait_started()
        await client.wait_first_ready()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGUSR1)
        settings = AppSettings(model_folder=str(MODEL), served_model_names=("demo",))
        found = await app_files(client, settings, BODY)
        os.kill(supervisor.pid, signal.SIGUSR2)
        report = run_dir / REPORT
        async with asyncio.timeout(TIMEOUT):
            while not report.is_file():
                await asyncio.sleep(0.01)
        return found, json.loads(report.read_text())
    finally:
        await client.close()
        await supervisor.stop()


def serve_engine(run_dir: Path) -> int:
    """The engine process: records from SIGUSR1 on and reports at SIGUSR2."""
    recorder = FileRecorder()

    def report(signum: int, frame: FrameType | None) -> None:
        sys.setprofile(None)
        path = run_dir / REPORT
        path.with_suffix(".part").write_text(json.dumps(recorder.project_files("engine")))
        path.with_suffix(".part").rename(path)

    signal.signal(signal.SIGUSR1, lambda signum, frame: sys.setprofile(recorder))
    signal.signal(signal.SIGUSR2, report)
    return serve(load_engine)


def main() -> None:
    app, engine = asyncio.run(count())
    for title, files in (("app process", app), ("engine process", engine)):
        print(f"{title}: {len(files)} files", *files, sep="\n  ")
    own = [path for path in app if path.startswith("app/")]
    print(f"app/: {len(own)}, engine/: {len({*app, *engine} - {*own})}, all: {len({*app, *engine})}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(serve_engine(Path(sys.argv[1])))
    main()
