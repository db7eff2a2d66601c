"""Tests against a mutant, in a child process whose other imports have been made before it was forked."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.mutation.mutants import Mutant

OWN = frozenset({"tests", *(f"tests.mutation{name}" for name in ("", ".mutants", ".trial", ".__main__"))})
POLL = 0.02  # seconds
OPTIONS = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # plugins that preload has imported
)


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


def preload(module: str, tests: Sequence[str]) -> None:
    """Import all that the tests do, except what imports the module: each child imports that anew, from its mutant."""
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    for path in ("tests/conftest.py", *tests):
        if path.startswith("tests/") and path.endswith(".py"):
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for name in _importers(module):
        del sys.modules[name]
        package, _, attribute = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(attribute, None)


def _importers(module: str) -> set[str]:
    """The module, those that import it, directly or through others, and all of the tests."""
    own = {name: found for name, found in sys.modules.items() if name.split(".")[0] in ("tessera", "tests")}
    imports = {name: _imports_of(found) for name, found in own.items()}
    found = {module, *(name for name in own if name.split(".")[0] == "tests")} & own.keys() - OWN
    while more := {name for name in own.keys() - found - OWN if imports[name] & found}:
        found |= more
    return found


def _imports_of(module: ModuleType) -> set[str]:
    """Names of modules, and of what is taken from them, which may be modules."""
    if module.__file__ is None:
        return set()
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@dataclass(frozen=True)
class Seconds:
    """What tests take, or may take: wall time in which a processor was free for them, and processor time.

    Both of their own process: on a busy machine, tests that pass take long, and do not hang.
    """

    wall: float
    cpu: float


def run_tests(module: str, mutant: Mutant | None, tests: Sequence[str], limit: Seconds) -> tuple[str, Seconds]:
    """-> `passed`, `failed` or `late`, and what it took."""
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_in_child(module, mutant, tests, math.ceil(limit.cpu))
    wall = 0.0
    while wall < limit.wall:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            took = Seconds(wall, usage.ru_utime + usage.ru_stime)
            code = os.waitstatus_to_exitcode(status)
            return ("passed" if code == 0 else "late" if code == -signal.SIGXCPU else "failed"), took
        time.sleep(POLL)
        wall = max(wall, time.monotonic() - begin - seconds_without_processor(pid))
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late", Seconds(wall, 0.0)


def seconds_without_processor(pid: int) -> float:
    """For how long the process's threads could have run, and others did: of the one that waited longest."""
    waited = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited = max(waited, int(stat.read_text().split()[1]))
    return waited / 1e9


def _run_in_child(module: str, mutant: Mutant | None, tests: Sequence[str], cpu_seconds: int) -> None:
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # for mutants that never end
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if mutant is not None:
        sys.meta_path.insert(0, MutantFinder(module, mutant))
    code = 1
    with contextlib.suppress(BaseException):
        code = int(pytest.main([*OPTIONS, *tests]))
    os._exit(code)
