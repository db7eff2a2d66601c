"""The GPU tests under a tool: processes that end and are replaced, in rounds until every test has run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sanitizers.record import function_of
from tests.sanitizers.reports import Report, reports_of
from tests.support.paths import ROOT

OF_BARRIERS = ("racecheck", "synccheck")
MOST_BARRIERS = 128  # of a block; `sm90_block_row_kernel` has 25 with a long ring
MACROS = {"racecheck": "EVERY_LANE_ARRIVES", "synccheck": "FREE_SLOTS_ONCE"}  # that kernels are compiled with
MOST_PROCESSES = 1024  # that a tool is connected to; those beyond, by default beyond ten, stand in cuInit
MOST_LAUNCHES = 8  # whose memory a tool holds at a time
TEST_SECONDS = 600
KERNELS = "tests.sanitizers.kernels"  # a program, and a plugin
SLOW_SECONDS = 100  # after which the log says where a test stands
DECODE = "tests/gpu/attention/test_attention_decode_gpu.py"
UNSUITABLE = {  # tests of what a tool prevents
    "tests/gpu/test_device.py::TestCopies::test_small_copies_go_past_large_ones": "a tool's copies go one by one",
    f"{DECODE}::test_as_many_blocks_have_room_as_divisions_count_on": "a tool's code takes registers",
}


@dataclass(frozen=True)
class Outcome:
    """`code`: pytest's exit code of the last round, None if there was no more time. `collected`: all tests that there
    are. `done`: those that have ended well. `accounts`: pytest's of each failed one. `found`: what the tool reported.
    `seconds`: that the cases of a function took. `running`: tests that had begun when the time was over, and how long
    ago.
    """

    code: int | None
    collected: list[str]
    done: set[str]
    accounts: dict[str, str]
    found: Counter[Report]
    seconds: dict[str, float]
    running: dict[str, float]

    @property
    def passed(self) -> bool:
        has_nothing_left = self.code == pytest.ExitCode.NO_TESTS_COLLECTED and bool(self.collected)
        ran = self.code == pytest.ExitCode.OK or has_nothing_left
        return ran and not self.accounts and not self.found


def run_rounds(tool: str, tests: list[str], skipped: set[str], workers: int, seconds: float, logs: Path) -> Outcome:
    """Tests in front of which a process has ended, for want of the device's memory, run in the next round.

    `skipped`: tests, and functions all of whose cases are meant. `logs`: a folder.
    """
    names = ("COLLECTED", "DONE", "DONE_BEFORE", "FAILURES", "PUT_OFF", "SECONDS", "STARTED")
    files = {name: logs.absolute() / f"{tool}-{name.lower()}.txt" for name in names}
    for file in files.values():
        file.unlink(missing_ok=True)
    variables = _environment(tool, files)
    end = time.monotonic() + seconds
    run([sys.executable, "-m", KERNELS], variables, seconds, logs.absolute() / f"{tool}-kernels.log")
    found: Counter[Report] = Counter()
    done: set[str] = set()
    accounts: dict[str, str] = {}
    for turn in itertools.count(1):
        ended = done | accounts.keys()
        files["DONE_BEFORE"].write_text("".join(f"{name}\n" for name in sorted(skipped | ended)))
        for name in ("PUT_OFF", "STARTED"):
            files[name].unlink(missing_ok=True)
        log, report = (logs.absolute() / f"{tool}-{name}-{turn}.log" for name in ("tests", "tool"))
        code = run(_command(tool, workers, report, tests), variables, end - time.monotonic(), log)
        found += reports_of(report.read_text(errors="replace") if report.exists() else "")
        done, accounts = set(_lines(files["DONE"])), accounts_of(files["FAILURES"])
        if code is None or not files["PUT_OFF"].exists() or ended == done | accounts.keys():
            break
    running = {}
    if code is None:
        ended = done | accounts.keys() | set(_lines(files["PUT_OFF"]))
        begun = [line.partition(" ") for line in _lines(files["STARTED"])]
        running = {test: time.time() - float(at) for at, _, test in begun if test not in ended}
    return Outcome(code, _lines(files["COLLECTED"]), done, accounts, found, _seconds_of(files["SECONDS"]), running)


def _command(tool: str, workers: int, log: Path, tests: list[str]) -> list[str]:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--log-file", str(log)]
    # API errors are what some tests are about.
    sanitizer += ["--report-api-errors", "no", "--print-limit", "1000"]
    sanitizer += ["--force-synchronization-limit", str(MOST_LAUNCHES), "--max-connections", str(MOST_PROCESSES)]
    if tool in OF_BARRIERS:
        sanitizer += ["--num-cuda-barriers", str(MOST_BARRIERS)]
    options = ["-m", "pytest", "-m", "gpu", "-v", "-p", "tests.sanitizers.resumed", "-p", KERNELS]
    options += ["--timeout", str(TEST_SECONDS), "-o", f"faulthandler_timeout={SLOW_SECONDS}"]
    options += [part for name in UNSUITABLE for part in ("--deselect", name)]
    # A few tests at a time, in their order, so that functions are soon done.
    options += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "2", "--max-worker-restart", "1000"]
    return [*sanitizer, sys.executable, *options, *tests]


def _environment(tool: str, files: dict[str, Path]) -> dict[str, str]:
    """Each of pytest-xdist's processes takes another GPU first, where this names all."""
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "TESSERA_REQUIRE_GPU": "1"}
    variables |= {"SERVER_DEADLINE": str(TEST_SECONDS - 50), **{name: str(file) for name, file in files.items()}}
    return {**variables, "KERNEL_MACRO": MACROS[tool]} if tool in MACROS else variables


def run(arguments: list[str], variables: dict[str, str], seconds: float, log: Path) -> int | None:
    """-> the exit code; None if it took longer."""
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


def accounts_of(failures: Path) -> dict[str, str]:
    """pytest's account of each failed test. A last line that a kill cut off is skipped."""
    lines = failures.read_text().split("\n")[:-1] if failures.exists() else []
    failed = [json.loads(line) for line in lines]
    return {failure["test"]: failure["account"] for failure in failed}


def _seconds_of(file: Path) -> dict[str, float]:
    """By function; the lines are of tests."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in _lines(file):
        seconds, _, test = line.partition(" ")
        found[function_of(test)] += float(seconds)
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
