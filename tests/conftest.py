"""Shared fixtures: which real models are at hand, and whether there is a CUDA device."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

import tests.support.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tests.support.server_fixture import builtin_server, story_server, tiny_folder, tiny_server

__all__ = ["builtin_server", "story_server", "tiny_folder", "tiny_server"]

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
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collections, which would find next to nothing; later ones skip what is there by then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Modules and rooms that start servers, compile for the CPU or try thousands of inputs; not in `make test-fast`.
SLOW = (
    *("attack/", "mutation/", "e2e/", "emulation/", "faults/", "loadtest/test_command"),
    *(
        "app/test_cli",
        "app/test_schemathesis",
        "app/test_hub",
        "app/test_model_commands",
        "app/test_responses_store",
        "wire/test_sdk_helpers",
    ),
    *("app/test_batches", "app/test_store"),
    *("engine/test_client", "engine/test_process", "engine/test_cuda_graphs", "engine/test_embeddings_engine"),
    *("cuda/test_compile", "structure/test_install", "structure/test_docs_examples"),
    *("engine/gguf/test_gguf_mutations", "engine/gguf/test_gguf_tokenizer"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Folder of the real models and tokenizers that are kept outside the project."""
    for folder in (SHARED_MODELS, CARRIED_MODELS):
        if folder.is_dir():
            return folder
    pytest.skip(f"the real models are not at hand: neither {SHARED_MODELS} nor {CARRIED_MODELS} exists")
