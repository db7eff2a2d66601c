"""The structure the README describes, enforced: imports point down, only `engine/cuda` sees the driver."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for room in ("app", "engine", "loadtest") for path in (ROOT / room).rglob("*.py"))

# What each room may import of the project, longest prefix first; a room may always import itself.
FOUNDATION = {"engine.errors", "engine.config", "engine.sampling_params", "engine.messages", "engine.tensor"}
ALLOWED: dict[str, set[str]] = {
    "app": {"engine.client", "engine.config", "engine.errors", "engine.messages", "engine.sampling_params"}
    | {"engine.histogram", "engine.logs"},
    "app.cli": {"loadtest.command", "loadtest.options", "loadtest.ranges"},
    "app.serve": {"engine.supervisor"},
    "engine.builtin": set(),
    "loadtest": set(),
    "engine.cuda": {"engine.errors", "engine.tensor"},
    "engine.ops": {"engine.errors", "engine.tensor", "engine.sampling_params"},
    "engine.ops.cuda": {"engine.cuda"},
    "engine.ops.make": {"engine.cuda"},
    "engine.devices": {"engine.errors", "engine.config", "engine.tensor", "engine.cuda"},
    "engine.models": {*FOUNDATION, "engine.ops", "engine.batch"},
    "engine.grammar_source": FOUNDATION,
    "engine.grammar_probe": {"engine.grammar_source", "engine.sampling_params"},
    "engine.grammar": FOUNDATION | {"engine.grammar_probe", "engine.grammar_source"},
    "engine.constraint": FOUNDATION | {"engine.grammar"},
    "engine.sequence": FOUNDATION | {"engine.constraint"},
    "engine.block_manager": FOUNDATION | {"engine.sequence"},
    "engine.slot_table": FOUNDATION | {"engine.sequence", "engine.batch", "engine.prompt_logprobs"},
    "engine.scheduler": FOUNDATION
    | {"engine.sequence", "engine.block_manager", "engine.batch", "engine.prefixes_in_progress"}
    | {"engine.slot_table", "engine.step_pace"},
    "engine.step_pace": set(),
    "engine.recorded_steps": FOUNDATION | {"engine.batch", "engine.models"},
    "engine.batch": FOUNDATION,
    "engine.prefixes_in_progress": FOUNDATION | {"engine.sequence", "engine.block_manager"},
    "engine.prompt_logprobs": FOUNDATION | {"engine.batch", "engine.sequence"},
    "engine.histogram": set(),
    "engine.logs": set(),
    "engine.metrics": FOUNDATION | {"engine.sequence", "engine.histogram"},
    "engine.core": FOUNDATION
    | {
        "engine.scheduler",
        "engine.slot_table",
        "engine.sequence",
        "engine.block_manager",
        "engine.batch",
        "engine.metrics",
    }
    | {"engine.grammar", "engine.constraint", "engine.prompt_logprobs"},
    "engine.step_sampler": FOUNDATION | {"engine.batch", "engine.models", "engine.ops"},
    "engine.model_runner": FOUNDATION
    | {"engine.batch", "engine.models", "engine.ops", "engine.cuda", "engine.step_sampler"}
    | {"engine.recorded_steps"},
    "engine.embedding_runner": FOUNDATION | {"engine.models", "engine.ops"},
    "engine.embedder": FOUNDATION | {"engine.sequence"},
    "engine.embedding_engine": FOUNDATION
    | {"engine.embedder", "engine.embedding_runner", "engine.model_runner", "engine.models", "engine.ops"},
    "engine.heartbeat": {"engine.messages"},
    "engine.client": FOUNDATION | {"engine.heartbeat"},
    "engine.supervisor": FOUNDATION | {"engine.heartbeat"},
    "engine.errors": set(),
    "engine.config": {"engine.errors", "engine.logs"},
    "engine.sampling_params": {"engine.errors"},
    "engine.messages": {"engine.sampling_params", "engine.errors"},
    "engine.tensor": {"engine.errors"},
}
UNRESTRICTED = {"engine.process"}  # where everything is put together
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "torch", "cupy"}
TRAINING_SCRIPT = "engine.builtin.training.train"  # made the built-in model; never imported when serving
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    if module in UNRESTRICTED:
        return
    rooms = [room for room in ALLOWED if within(module, room)]
    allowed = {target for room in rooms for target in ALLOWED[room]} | set(rooms)
    if module == "engine":
        return
    assert rooms, f"{module} is in no room that this test knows: add it to ALLOWED"
    for name in imports_of(ast.parse(path.read_text())):
        if name.split(".")[0] in ("app", "engine", "loadtest") and "." in name:
            assert any(within(name, room) for room in allowed), f"{module} may not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_the_driver_layer_imports_cuda(path: Path) -> None:
    names = imports_of(ast.parse(path.read_text()))
    if not within(module_name(path), "engine.cuda"):
        assert not [name for name in names if name.split(".")[0] == "cuda"]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_fault_deserialisation_nothing_deserialises_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    forbidden = FORBIDDEN_MODULES - ({"torch"} if module_name(path) == TRAINING_SCRIPT else set())
    assert not {name.split(".")[0] for name in imports_of(tree)} & forbidden
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in FORBIDDEN_CALLS]
