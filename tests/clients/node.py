"""Programs for Node in a folder that has the packages of `package.json`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / "node_modules"
TIMEOUT = 120  # seconds


def environment(home: Path) -> dict[str, str]:
    """For a client that may talk to the loopback alone: its telemetry is off, and other requests go to no proxy."""
    return {
        "PATH": f"{PACKAGES / '.bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "DO_NOT_TRACK": "1",
        "DISABLE_TELEMETRY": "1",
        "OPENAI_API_KEY": "none",
        "AI_SDK_LOG_WARNINGS": "false",
    }


def run_node(program: str, url: str, folder: Path) -> str:
    """What an ES module of this folder prints; `url` is the server's, without /v1."""
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run(
        [node, str(HERE / "programs" / program), url],
        cwd=HERE,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
