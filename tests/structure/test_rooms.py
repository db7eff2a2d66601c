"""The structure, enforced: imports point down between rooms and inside them, and only `engine/cuda` sees the driver."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tessera.engine.cuda.sources import SourceFile
from tests.conftest import SERVERS_TESTED_ALWAYS, SLOW, THOROUGH
from tests.structure.floors import APP_SEES, EXCEPTIONS, FLOORS
from tests.support.paths import ROOT

SOURCES = sorted(path for room in ("app", "engine", "loadtest", "tessera") for path in (ROOT / room).rglob("*.py"))

MAX_FILES = 15
PACKAGES = ("app", "engine")  # which hold rooms and are none

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "torch", "cupy"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True)
class Source:
    """The facts of a file that the tests below check, without its tree: a million nodes would slow all later tests."""

    docstring: str | None
    imports: tuple[str, ...]
    top_level_imports: tuple[str, ...]  # not those in functions or for types alone
    calls: frozenset[str]


@cache
def source(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return Source(
        ast.get_docstring(tree),
        tuple(imports_of(nodes)),
        tuple(imports_of(tree.body)),
        frozenset(func.id for func in calls if isinstance(func, ast.Name)),
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def project_imports(path: Path) -> list[str]:
    """Modules of the project that a file imports, without the common prefix."""
    found = []
    for name in source(path).imports:
        first, _, rest = name.partition(".")
        assert first not in ("app", "engine", "loadtest", "cuda_src"), f"{path}: import {name} by its tessera. name"
        if first == "tessera":
            room = rest.partition(".")[0]
            found.append(rest if room in ("app", "engine", "loadtest") else name if room == "options" else "tessera")
    return found


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@cache
def room_of(module: str) -> tuple[int, str]:
    """Floor, counted from the bottom, and name of the smallest room that holds a module."""
    rooms = [
        (len(FLOORS) - number, room) for number, rooms in enumerate(FLOORS) for room in rooms if within(module, room)
    ]
    assert rooms, f"{module} is in no room that this test knows: add it to FLOORS in tests/structure/floors.py"
    return max(rooms, key=lambda found: len(found[1]))


def test_imports_point_down() -> None:
    assert [wrong for path in SOURCES for wrong in imports_up(path)] == []


def imports_up(path: Path) -> Iterator[str]:
    module = module_name(path)
    if module in PACKAGES or (path.name == "__init__.py" and module == "tessera"):
        yield from (f"{module} imports {name}, but packages import nothing" for name in project_imports(path))
        return
    floor, room = room_of(module)
    for name in project_imports(path):
        if any(within(name, allowed) for allowed in EXCEPTIONS.get(module, ())):
            continue
        if module.startswith("app.") and not name.startswith("app."):
            if not any(within(name, seen) for seen in APP_SEES):
                yield f"{module} may not import {name}"
        elif module.startswith("engine.") and name.startswith("app."):
            yield f"{module} may not import {name}"
        else:
            below, other = room_of(name)
            if other != room and below >= floor:
                yield f"{module} may not import {name}: {other} is not below {room}"


@pytest.mark.parametrize("room", sorted({str(path.parent.relative_to(ROOT)) for path in SOURCES}))
def test_rooms_are_small_and_say_what_they_are_for(room: str) -> None:
    folder = ROOT / room
    name = room.replace("/", ".")
    assert name in PACKAGES or any(name in rooms for rooms in FLOORS), f"{name} is not in FLOORS"
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FILES, f"{room} has {len(files)} files: make rooms of it"
    assert source(folder / "__init__.py").docstring, f"{room}/__init__.py says nothing"


TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHER_TESTS = re.compile(r"^\s*(?:from|import) (tests\.(?:\w+\.)*test_\w+)", re.MULTILINE)


def test_no_test_module_is_imported() -> None:
    found = {path.relative_to(ROOT): imported for path in TESTS for imported in OTHER_TESTS.findall(path.read_text())}
    assert not found


@pytest.mark.parametrize("name", [*THOROUGH, *SLOW, *SERVERS_TESTED_ALWAYS])
def test_tests_that_are_left_out_at_times_are_there(name: str) -> None:
    file, _, test = name.partition("::")
    named = [path for path in (ROOT / "tests").glob(f"{file}*") if path.suffix == ".py"]
    assert any(test in path.read_text() for path in named)


KERNELS = ROOT / "cuda_src"
HEADERS = KERNELS / "include"
KERNEL_ROOMS = [folder for folder in sorted(KERNELS.rglob("*")) if folder.is_dir()]


@pytest.mark.parametrize("folder", KERNEL_ROOMS, ids=lambda folder: str(folder.relative_to(KERNELS)))
def test_a_room_of_kernels_is_small(folder: Path) -> None:
    assert len(list(folder.glob("*.cu*"))) <= MAX_FILES


def test_rooms_of_headers_include_each_other_in_no_circle() -> None:
    graph: TopologicalSorter[Path] = TopologicalSorter()
    for header in HEADERS.rglob("*.cuh"):
        included = {(HEADERS / name).parent for name in SourceFile.of(header.read_text()).includes}
        graph.add(header.parent, *(room for room in included if room.is_dir() and room != header.parent))
    assert HEADERS in graph.static_order()


def test_no_room_imports_in_a_circle() -> None:
    """Modules of one room form no cycle."""
    seen: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        file = ROOT / (module.replace(".", "/") + ".py")
        if not file.is_file():
            file = ROOT / module.replace(".", "/") / "__init__.py"
            if not file.is_file():
                return visit(module.rpartition(".")[0]) if "." in module else None
        name = module_name(file)
        assert name not in seen, " imports ".join([*seen, name])
        if name in done:
            return None
        seen.append(name)
        for imported in top_level_imports(file):
            if imported != name and not within(name, imported):
                visit(imported)
        seen.pop()
        done.add(name)
        return None

    for path in SOURCES:
        visit(module_name(path))


def top_level_imports(path: Path) -> list[str]:
    """Modules that are imported when a file is, not later in a function or for types alone."""
    names = source(path).top_level_imports
    return [name.partition(".")[2] for name in names if name.startswith(("tessera.app", "tessera.engine"))]


def test_only_the_driver_layer_imports_cuda() -> None:
    others = [path for path in SOURCES if not within(module_name(path), "engine.cuda")]
    assert [path for path in others if "cuda" in {name.split(".")[0] for name in source(path).imports}] == []


def test_fault_deserialisation_nothing_deserialises_code() -> None:
    assert [path for path in SOURCES if deserialises_code(path)] == []


def deserialises_code(path: Path) -> bool:
    modules = {name.split(".")[0] for name in source(path).imports}
    return bool(modules & FORBIDDEN_MODULES or source(path).calls & FORBIDDEN_CALLS)
