"""The parser of compute-sanitizer's log, and runs that are resumed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.sanitizers.__main__ import accounts_of, error_of, run, with_variable
from tests.sanitizers.reports import Report, reports_of
from tests.support.paths import ROOT

pytest_plugins = ["pytester"]

LOG = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at record_tokens_kernel(unsigned int *, const int *, const int *, int, int, int)+0x1d0
=========     by thread (1,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
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
        Report(read, "record_tokens_kernel"): 2,
        Report("Error: Race reported", "sm90_block_row_kernel"): 1,
        Report(untracked, "rmsnorm_kernel"): 1,
        Report(untracked, "scatter_kernel"): 1,
        Report(copied, "test_half_of_the_rows"): 1,
        Report(overflow, ""): 1,
    }


def test_a_log_without_reports_has_none() -> None:
    assert not reports_of("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """What the plugin reads and writes."""
    found = {name: pytester.path / name.lower() for name in ("DONE", "DONE_BEFORE", "FAILURES", "PUT_OFF")}
    for name, file in found.items():
        monkeypatch.setenv(name, str(file))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return found


def test_a_run_goes_on_where_the_last_one_ended(pytester: pytest.Pytester, files: dict[str, Path]) -> None:
    done, failures = files["DONE"], files["FAILURES"]
    pytester.makepyfile(
        textwrap.dedent("""
            import pytest

            @pytest.mark.parametrize("name", ["a", "b"])
            def test_well(name):
                pass

            def test_not_here():
                pytest.skip("no device")

            def test_badly():
                raise MemoryError("no room")
        """)
    )
    plugin = ("-p", "tests.sanitizers.resumed", "-p", "no:cacheprovider")
    pytester.runpytest_subprocess(*plugin).assert_outcomes(passed=2, skipped=1, failed=1)
    assert len(done.read_text().splitlines()) == 3
    shutil.copy(done, files["DONE_BEFORE"])
    again = pytester.runpytest_subprocess(*plugin)
    again.assert_outcomes(failed=1, deselected=3)
    failed = [json.loads(line) for line in failures.read_text().splitlines()]
    assert [error_of(failure["account"]) for failure in failed] == ["MemoryError: no room"] * 2
    with failures.open("a") as file:
        file.write('{"test": "killed mea')
    assert [error_of(account) for account in accounts_of(failures).values()] == ["MemoryError: no room"]


@pytest.mark.parametrize("free", [30, 20, None], ids=["enough", "short", "lost"])
def test_a_process_ends_where_memory_is_short_or_the_device_is_lost(
    free: int | None, pytester: pytest.Pytester, files: dict[str, Path]
) -> None:
    """The test in front of which it ends is no failure; it runs with the next run."""
    pytester.makepyfile(
        textwrap.dedent(f"""
            import pytest
            from tessera.engine.contract.errors import DeviceError

            class Device:
                total_memory = 100

                def empty_cache(self):
                    pass

                def free_memory(self):
                    if {free} is None:
                        raise DeviceError("unspecified launch failure")
                    return {free}

            @pytest.fixture(scope="session")
            def cuda_device():
                return Device()

            def test_1(cuda_device):
                pass

            def test_2():
                pass
        """)
    )

    def run_tests() -> list[str]:
        """The tests that have ended well by now."""
        files["PUT_OFF"].unlink(missing_ok=True)
        shutil.copy(files["DONE"], files["DONE_BEFORE"])
        pytester.runpytest_subprocess("-p", "tests.sanitizers.resumed", "-p", "no:cacheprovider", "-n", "1")
        return [line[-1] for line in files["DONE"].read_text().splitlines()]

    files["DONE"].touch()
    assert run_tests() == (["1", "2"] if free == 30 else ["1"])
    assert run_tests() == ["1", "2"]
    assert not files["FAILURES"].exists()


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
