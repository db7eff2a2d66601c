"""Attack a server: `python -m tests.attack --requests 100000 --seconds 600 --parts fuzz,raw`.

Ends with 1 if a promise was broken. Without --model a tiny random model is served, which is fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvloop
from rich.console import Console

import tests.support.processes.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tests.attack.campaign import PARTS, Plan, run
from tests.attack.report import show
from tests.attack.target import TRACEBACK, running, serve_command
from tests.support.servers.server_fixture import write_tiny_model

STALL_LIMIT = 0.020  # seconds
DISK = "16m"
NICENESS = 19  # of the attack's processes: clients elsewhere would take none of the server's cores


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="hostile requests in all")
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds of all parts together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--model", help="a folder, or builtin for the demonstration model")
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="processes that attack; a core each")
    parser.add_argument("--stall-limit", type=float, default=STALL_LIMIT, help="seconds")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("--server-log", type=Path, help="a file for a copy of the server's log")
    parser.add_argument("--serve", default="", help="further options of tessera serve")
    given = parser.parse_args()
    unknown = set(given.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return given


@contextlib.contextmanager
def small_disk() -> Iterator[Path | None]:
    """A small disk for the server's temporary files, where this user may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="disk", dir="/tmp"))
    options = ["-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        folder.rmdir()
        yield None
        return
    os.environ["TESSERA_ATTACK_DISK"] = str(folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def main() -> int:
    given = arguments()
    console = Console(width=150)
    parts = given.parts.split(",")
    plan = Plan(parts, given.requests, given.seconds, given.seed, niceness=NICENESS, num_processes=given.workers)
    with tempfile.TemporaryDirectory(prefix="attack") as name, small_disk() as disk:
        folder = Path(name)
        if given.model == "builtin":
            model, model_name = None, "tessera-builtin"
        else:
            model = given.model or str(write_tiny_model(folder / "tiny"))
            model_name = Path(model).name
        options = ["--log-stalls", str(given.stall_limit), "--api-workers", str(given.api_workers)]
        command = serve_command(model, folder, *options, *given.serve.split())
        if disk is None and "faults" in plan.parts:
            console.print("a full disk is left out: no small one can be mounted")
        with running(command, folder, tmpdir=disk) as target:
            console.print(f"seed {plan.seed}, {target.host}:{target.port}")
            findings = uvloop.run(run(target, model_name, plan, console.print))
            console.print(f"a quiet canary: {findings.quiet}")
        all_kept = show(findings, given.stall_limit, console)
        if given.json:
            given.json.write_text(json.dumps(findings, default=vars, indent=1))
        if given.server_log:
            given.server_log.write_text(target.log())
        if not all_kept:
            log = target.log()
            first = log.find(TRACEBACK)
            if first >= 0:
                console.print(log[max(first - 300, 0) : first + 4000], markup=False, highlight=False)
            console.print(log[-3000:], markup=False, highlight=False)
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
