"""The GPU tests under NVIDIA's compute-sanitizer, several at a time, on all GPUs:

    python -m tests.sanitizers memcheck --workers 12 --seconds 500 --done memcheck.txt

A run that has ended too soon goes on where it was when it is started again with the same file of --done. Tests in front
of which a process has ended, for want of the device's memory, run in a next round. Ends with 1 where a test failed, has
not run, or the tool has found something.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.sanitizers.reports import Report, reports_of
from tests.support.paths import ROOT

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OF_BARRIERS = ("racecheck", "synccheck")
MOST_BARRIERS = 128  # of a block; `sm90_block_row_kernel` has 25 with a long ring
MOST_LAUNCHES = 8  # whose memory the tool holds at a time
TEST_SECONDS = 600
UNSUITABLE = {  # tests of what a tool prevents
    "tests/gpu/test_device.py::TestCopies::test_small_copies_go_past_large_ones": "a tool's copies go one by one",
}


def command(tool: str, workers: int, log: Path, tests: list[str]) -> list[str]:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--log-file", str(log)]
    # API errors are what some tests are about.
    sanitizer += ["--report-api-errors", "no", "--print-limit", "1000"]
    sanitizer += ["--force-synchronization-limit", str(MOST_LAUNCHES)]
    if tool in OF_BARRIERS:
        sanitizer += ["--num-cuda-barriers", str(MOST_BARRIERS)]
    sanitizer.append(sys.executable)
    options = ["-m", "pytest", "-m", "gpu", "-v", "-p", "tests.sanitizers.resumed", "--timeout", str(TEST_SECONDS)]
    options += [part for name in UNSUITABLE for part in ("--deselect", name)]
    workers_of = ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "1000"]
    return [*sanitizer, *options, *workers_of, *tests]


def environment(tool: str, files: dict[str, Path]) -> dict[str, str]:
    """Each of pytest-xdist's processes takes another GPU first, where this names all."""
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "TESSERA_REQUIRE_GPU": "1"}
    variables |= {"SERVER_DEADLINE": str(TEST_SECONDS - 50), **{name: str(file) for name, file in files.items()}}
    return {**variables, "EVERY_LANE_ARRIVES": "1"} if tool == "racecheck" else variables


def run(arguments: list[str], variables: dict[str, str], seconds: float, log: Path) -> int | None:
    """-> pytest's exit code; None if it took longer."""
    with log.open("w") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for pid in with_variable("FAILURES", variables["FAILURES"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def with_variable(name: str, value: str) -> list[int]:
    """Processes with the variable in their environment. They include servers that tests start in sessions of their
    own, which would keep a share of the GPU's memory."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def count_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def accounts_of(failures: Path) -> dict[str, str]:
    """pytest's account of each failed test. A last line that a kill cut off is skipped."""
    lines = failures.read_text().split("\n")[:-1] if failures.exists() else []
    failed = [json.loads(line) for line in lines]
    return {failure["test"]: failure["account"] for failure in failed}


def found_table(found: Counter[Report]) -> Table:
    return table("Found", ("what", "where", "times"), [(*report, str(count)) for report, count in found.most_common()])


def failed_table(accounts: dict[str, str]) -> Table:
    """Tests together that have failed for the same reason."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for test, account in accounts.items():
        tests[error_of(account)].append(test)
    rows = sorted(tests.items(), key=lambda item: -len(item[1]))
    return table("Failed", ("reason", "the first", "tests"), [(why, names[0], str(len(names))) for why, names in rows])


def table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """The last column is a number."""
    shown = Table(title=title, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="right" if name == columns[-1] else "left")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def error_of(account: str) -> str:
    """The line of pytest's account of a failure that names the error, or the last one."""
    lines = [line for line in account.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[:1] or lines[-1:] or [""])[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("tests", nargs="*", default=["tests/gpu"])
    parser.add_argument("--workers", type=int, default=8, help="processes; each needs a few GiB of a GPU's memory")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--done", type=Path, help="a file of tests that have ended well, read and written")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of tests and tool")
    given = parser.parse_args()
    for name in given.tests:
        if not (ROOT / name.partition("::")[0]).exists():
            parser.error(f"there is no {name}")
    with tempfile.TemporaryDirectory() as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        done = (given.done or Path(folder) / "done").absolute()
        before = count_lines(done)
        failures, put_off = (logs.absolute() / f"{given.tool}-{name}" for name in ("failures.jsonl", "put-off.txt"))
        failures.unlink(missing_ok=True)
        done_before = Path(folder) / "done-before"  # as it was, for processes that begin later
        files = {"DONE": done, "DONE_BEFORE": done_before, "FAILURES": failures, "PUT_OFF": put_off}
        variables = environment(given.tool, files)
        end = time.monotonic() + given.seconds
        found: Counter[Report] = Counter()
        for turn in itertools.count(1):
            put_off.unlink(missing_ok=True)
            done.touch()
            shutil.copy(done, done_before)
            tests, tool = (logs.absolute() / f"{given.tool}-{name}-{turn}.log" for name in ("tests", "tool"))
            arguments = command(given.tool, given.workers, tool, given.tests)
            code = run(arguments, variables, end - time.monotonic(), tests)
            found += reports_of(tool.read_text(errors="replace") if tool.exists() else "")
            if code is None or not put_off.exists() or count_lines(done) == count_lines(done_before):
                break
        accounts = accounts_of(failures)
        after = count_lines(done)
    console = Console(width=150)
    console.print(
        f"{given.tool}: {after - before} tests ended well, {after} with earlier runs; {len(accounts)} failed; "
        + (f"killed after {given.seconds:.0f} s" if code is None else f"pytest's exit code is {code}")
    )
    if accounts:
        console.print(failed_table(accounts))
    if found:
        console.print(found_table(found))
    passed = code == pytest.ExitCode.OK or (code == pytest.ExitCode.NO_TESTS_COLLECTED and before > 0)
    return 0 if passed and not found else 1


if __name__ == "__main__":
    sys.exit(main())
