"""The parser of compute-sanitizer's log, and runs that are resumed."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.sanitizers import run as runs
from tests.sanitizers.record import Seen, function_of, load, store, with_run
from tests.sanitizers.reports import Report, reports_of
from tests.sanitizers.run import Outcome, accounts_of, run, run_rounds, with_variable
from tests.sanitizers.tables import error_of
from tests.support.paths import ROOT

LOG = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at record_tokens_kernel(unsigned int *, const int *, const int *, int, int, int)+0x1d0
=========     by thread (1,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: test_penalties in test_sampling_gpu.py:91
=========
========= Error: Race reported between Write access at void sm90_block_row_kernel<__half, float, Q8_0>(int)+0x3ca0
=========     and Read access at void sm90_block_row_kernel<__half, float, Q8_0>(int)+0x3e60 [168 hazards]
=========
========= Uninitialized __global__ memory read of size 8 bytes
=========     at record_tokens_kernel(unsigned int *, const int *, const int *, int, int, int)+0x1d0
=========
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching _Z14rmsnorm_kernelI6__halfEvPT_
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching _Z14scatter_kernelPiPKiii
========= Host API memory access error at host access to 0x7f7598de8000 of size 65,536 bytes
=========     Uninitialized access to 0x7f7598de8000 on access by cudaMemcpy source
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: download in device.py:173
=========         Host Frame: test_half_of_the_rows in test_rows_gpu.py:228
=========         Host Frame: test_runner in plugin.py:12
=========
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.
========= ERROR SUMMARY: 5 errors
"""


def test_reports_are_counted_by_where_they_come_from() -> None:
    read = "Uninitialized __global__ memory read of size N bytes"
    untracked = "Internal Sanitizer Error: The Sanitizer encountered an error"
    overflow = "Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect."
    copied = "Host API memory access error at host access to N of size N bytes"
    assert reports_of(LOG) == {
        Report(read, "record_tokens_kernel", "test_penalties"): 1,
        Report(read, "record_tokens_kernel", ""): 1,
        Report("Error: Race reported", "sm90_block_row_kernel", ""): 1,
        Report(untracked, "rmsnorm_kernel", ""): 1,
        Report(untracked, "scatter_kernel", ""): 1,
        Report(copied, "", "test_half_of_the_rows"): 1,
        Report(overflow, "", ""): 1,
    }


def test_a_log_without_reports_has_none() -> None:
    assert not reports_of("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a file of tests by `run_rounds`, with tools that do nothing."""
    for name, script in {
        "compute-sanitizer": f'while [ "$1" != {sys.executable} ]; do shift; done; exec "$@"',
        "nvidia-smi": "echo GPU 0",
    }.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setattr(runs, "KERNELS", "tests.sanitizers.tables")  # which does nothing
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds in each process
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin -p pytest_timeout")

    def run(source: str, skipped: Iterable[str] = (), seconds: float = 60.0) -> Outcome:
        file = tmp_path / "test_cases.py"
        file.write_text("import pytest\n\npytestmark = pytest.mark.gpu\n" + textwrap.dedent(source))
        return run_rounds("memcheck", [str(file)], set(skipped), 1, seconds, tmp_path)

    return run


def names(tests: Iterable[str]) -> list[str]:
    return sorted(test.rpartition("::")[2] for test in tests)


CASES = """
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_well(name):
        pass

    def test_not_here():
        pytest.skip("no device")

    def test_badly():
        raise MemoryError("no room")
"""


def test_a_run_leaves_out_what_is_skipped(run_file: Callable[..., Outcome]) -> None:
    whole = run_file(CASES)
    assert names(whole.collected) == ["test_badly", "test_not_here", "test_well[a]", "test_well[b]"]
    assert names(whole.done) == ["test_not_here", "test_well[a]", "test_well[b]"]
    assert [error_of(account) for account in whole.accounts.values()] == ["MemoryError: no room"]
    assert not whole.passed
    assert set(whole.seconds) == {function_of(test) for test in whole.collected}
    rest = run_file(CASES, {function_of(test) for test in whole.collected if "well" in test})
    assert rest.collected == whole.collected
    assert names(rest.done) == ["test_not_here"]


def test_a_run_without_tests_has_not_passed_unless_all_are_skipped(run_file: Callable[..., Outcome]) -> None:
    none = run_file("def test_elsewhere(): pass\n\ndel pytestmark\n")
    assert not none.collected
    assert not none.passed
    source = "def test_seen(): pass"
    assert run_file(source, run_file(source).collected).passed


def test_an_account_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "failures"
    file.write_text(json.dumps({"test": "test_a", "account": "E  no room"}) + '\n{"test": "killed mea')
    assert accounts_of(file) == {"test_a": "E  no room"}


FIXTURES = {"short": "return Device(20)", "lost": "return Device(None)", "none": "raise MemoryError('no room')"}


@pytest.mark.parametrize("device", FIXTURES)
def test_a_process_ends_where_memory_is_short_or_the_device_is_lost(
    device: str, run_file: Callable[..., Outcome], tmp_path: Path
) -> None:
    """The test in front of which it ends is no failure; it runs with the next round."""
    outcome = run_file(f"""
        from tessera.engine.contract.errors import DeviceError

        class Device:
            total_memory = 100

            def __init__(self, free):
                self.free = free

            def empty_cache(self):
                pass

            def free_memory(self):
                if self.free is None:
                    raise DeviceError("unspecified launch failure")
                return self.free

        @pytest.fixture(scope="session")
        def cuda_device():
            {FIXTURES[device]}

        def test_1(cuda_device):
            pass

        def test_2():
            pass
    """)
    failed = ["test_1"] if device == "none" else []
    assert outcome.passed == (not failed)
    assert names(outcome.done) == [name for name in ("test_1", "test_2") if name not in failed]
    assert names(outcome.accounts) == failed
    assert (tmp_path / "memcheck-tests-2.log").exists()


def test_tests_that_ended_well_without_a_report_are_recorded(tmp_path: Path) -> None:
    tests = ["f.py::test_a[1]", "f.py::test_a[2]", "f.py::test_b[1]", "f.py::test_b[2]", "f.py::test_c"]
    first, second = ({"commit": commit, "date": "2026-11-29"} for commit in ("abc", "bcd"))
    done = {*tests} - {"f.py::test_b[2]"}
    seen = with_run({}, tests, done, Counter(), **first)
    of_b = {"f.py::test_b[1]": Seen(1, **first)}
    others = {"f.py::test_a": Seen(2, **first), "f.py::test_c": Seen(1, **first)}
    assert seen == others | of_b
    named = Counter({Report("Race", "a_kernel", "test_a"): 1})
    assert with_run({}, tests, done, named, **first) == {"f.py::test_c": Seen(1, **first)} | of_b
    assert not with_run({}, tests, done, Counter({Report("Race", "a_kernel", ""): 1}), **first)
    store(tmp_path / "record.json", {"memcheck": seen})
    assert load(tmp_path / "record.json") == {"memcheck": seen}

    whole = with_run(seen, tests, {"f.py::test_b[2]"}, Counter(), **second)
    assert whole == others | {"f.py::test_b": Seen(2, **second)}, "the cases are the function now"
    assert with_run(whole, tests, {"f.py::test_a[1]"}, Counter(), **second) == whole
    assert with_run(whole, tests[:2], {*tests[:2]}, Counter(), **second) == whole | {"f.py::test_a": Seen(2, **second)}


def test_a_run_says_which_tests_had_not_ended_and_where_they_stand(
    run_file: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "SLOW_SECONDS", 0.5)
    outcome = run_file(
        """
        import signal

        def test_well():
            pass

        def test_hangs():
            signal.pause()
        """,
        seconds=12.0,
    )
    assert outcome.code is None
    assert not outcome.passed
    assert names(outcome.done) == ["test_well"]
    ((test, seconds),) = outcome.running.items()
    assert names([test]) == ["test_hangs"]
    assert 0.5 < seconds < 12.0
    assert "in test_hangs" in (tmp_path / "memcheck-tests-1.log").read_text()


@pytest.mark.parametrize("ends", [True, False])
def test_no_process_outlives_a_run(ends: bool, tmp_path: Path) -> None:
    """Not even one in a session of its own, as servers are."""
    begins = "import signal, subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    variables = {**os.environ, "FAILURES": str(tmp_path / "failures")}
    marked = ("FAILURES", variables["FAILURES"])
    log = tmp_path / "log"
    script, seconds = (begins, 60.0) if ends else (f"{begins}; signal.pause()", 2.0)
    assert run([sys.executable, "-c", script], variables, seconds, log) == (0 if ends else None)
    assert log.read_text().strip().isdigit()
    end = time.monotonic() + 20.0
    while with_variable(*marked):
        assert time.monotonic() < end, "a process goes on"


def test_what_is_recorded_is_there() -> None:
    recorded = load(ROOT / "docs" / "figures" / "sanitizers.json")
    assert recorded
    for name in sorted({name for functions in recorded.values() for name in functions}):
        file, _, function = name.partition("::")
        assert f"def {function_of(function).rpartition('::')[2]}(" in (ROOT / file).read_text(), name
