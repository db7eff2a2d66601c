"""Tests against a mutant, in a child process whose other imports have been made before it was forked."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.mutation.mutants import Mutant

OWN = frozenset({"tests", *(f"tests.mutation{name}" for name in ("", ".mutants", ".trial", ".__main__"))})
POLL = 0.02  # seconds


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a mutant's tree; all others as ever."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        self._module = module
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None
        assert found.origin is not None
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=_TreeLoader(found.origin, self._mutant)
        )


class _TreeLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, path: str, mutant: Mutant) -> None:
        super().__init__("", path)
        self._path = path
        self._mutant = mutant

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree, self._path, "exec"), module.__dict__)  # noqa: S102 (that is its purpose)


def preload() -> None:
    """Import what takes long; the project's own modules are imported by each child, one of them mutated."""
    import tests.conftest  # noqa: F401 (for what it imports)

    for name in [name for name in sys.modules if name.split(".")[0] in ("tessera", "tests") and name not in OWN]:
        del sys.modules[name]


def run_tests(module: str, mutant: Mutant | None, tests: Sequence[str], timeout: float) -> tuple[str, float]:
    """-> `passed`, `failed` or `late`, and the seconds that it took."""
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_in_child(module, mutant, tests)
    while time.monotonic() < begin + timeout:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            passed = os.waitstatus_to_exitcode(status) == 0
            return "passed" if passed else "failed", time.monotonic() - begin
        time.sleep(POLL)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late", time.monotonic() - begin


def _run_in_child(module: str, mutant: Mutant | None, tests: Sequence[str]) -> None:
    import pytest

    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if mutant is not None:
        sys.meta_path.insert(0, MutantFinder(module, mutant))
    code = 1
    with contextlib.suppress(BaseException):
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
    os._exit(code)
