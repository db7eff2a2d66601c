"""Shared fixtures: which real models are at hand, and whether there is a CUDA device."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

import tests.support.processes.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tests.support.servers.server_fixture import builtin_server, story_server, tiny_folder, tiny_server

__all__ = ["builtin_server", "story_server", "tiny_folder", "tiny_server"]

TESTS = Path(__file__).resolve().parent
SHARED_MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
CARRIED_MODELS = Path(__file__).resolve().parents[1] / ".carry" / "models"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gguf-mutations", type=int, default=1000, help="how many mutated GGUF headers to read")
    parser.addoption("--worlds", type=int, default=80, help="how many random worlds the scheduler is put into")


def pytest_configure(config: pytest.Config) -> None:
    """Give servers under test a state folder of their own, so that none stores anything in the user's."""
    folder = tempfile.TemporaryDirectory(prefix="tessera-state-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_STATE_HOME"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without garbage collections, which would find next to nothing; later ones skip what is there by then."""
    gc.disable()
    try:
        import_own_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# What needs servers, processes, compilers and trainings of its own, or hundreds of cases that take long: these are left
# to `make test-thorough`.
THOROUGH = (
    *("attack/", "emulation/", "mutation/", "page/", "simulation/", "loadtest/test_command"),
    *(f"app/cli/test_{name}" for name in ("cli", "hub")),
    *(f"app/openai/test_{name}" for name in ("batches", "fine_tuning", "responses_store")),
    *("app/engines/test_model_turns", "app/openapi/test_schemathesis", "app/routing/test_replicated_client"),
    *("app/tools/test_tools_grammar", "app/test_train"),
    *("cuda/test_compile.py::test_every", "cuda/launches/test_launch_steps"),
    *(f"engine/ipc/test_{name}" for name in ("client", "process")),
    *(f"engine/training/test_{name}" for name in ("moments", "pretraining", "training_run")),
    *("engine/collectives/test_tensor_parallel", "engine/core/test_embeddings_engine", "engine/grammar/test_grammar"),
    *("engine/runner/test_sleep",),
    *(f"engine/gguf/test_gguf_{name}" for name in ("models", "mutations", "tokenizer")),
    *(f"engine/speculation/test_{name}" for name in ("chain", "distribution", "draft_model", "pays", "predictor")),
    *("engine/speculation/test_promises", "engine/speculation/test_same_tokens"),
    *(f"faults/test_{name}" for name in ("admin_port", "descriptors", "foreign_pages", "full_disk", "overload")),
    *(f"faults/test_{name}" for name in ("processes", "signals", "tool_parsers", "unbounded_numbers")),
    *("structure/test_bench_placement", "structure/test_docs.py::test_the_site_builds"),
    *("structure/test_docs_examples", "structure/test_install"),
)
OF_SERVERS = "e2e/"  # as thorough, but for these
SERVERS_TESTED_ALWAYS = ("e2e/test_deploy", "e2e/test_http_streaming", "e2e/test_models", "e2e/test_sdk")
# Of the others those that take seconds; not in `make test-fast`.
SLOW = (
    *("e2e/", "faults/", "app/cli/test_model_commands", "app/store/", "cuda/test_compile", "wire/test_sdk_helpers"),
    *("engine/golden/test_golden", "engine/models/test_partition", "engine/runner/test_cuda_graphs"),
)


def is_thorough(name: str) -> bool:
    return name.startswith(THOROUGH) or (name.startswith(OF_SERVERS) and not name.startswith(SERVERS_TESTED_ALWAYS))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which all tests are thorough are not even imported by `make test`."""
    name = collection_path.relative_to(TESTS).as_posix()
    return True if "not thorough" in config.option.markexpr and name.endswith(".py") and is_thorough(name) else None


def import_own_share(config: pytest.Config) -> None:
    """Import first what no other worker does, so that not each of them rewrites the assertions of every file."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.option.file_or_dir:
        return
    left_out = {*config.getini("norecursedirs"), *(Path(folder).name for folder in config.option.ignore or ())}
    files = sorted(path for path in TESTS.glob("*/**/test_*.py") if not left_out & set(path.relative_to(TESTS).parts))
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        if not pytest_ignore_collect(path, config):
            with suppress(Exception, pytest.skip.Exception):  # collection says what is wrong
                importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if is_thorough(name):
            item.add_marker("thorough")
        elif name.startswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of the real models and tokenizers that are kept outside the project."""
    for folder in (SHARED_MODELS, CARRIED_MODELS):
        if folder.is_dir():
            return folder
    pytest.skip(f"the real models are not at hand: neither {SHARED_MODELS} nor {CARRIED_MODELS} exists")
