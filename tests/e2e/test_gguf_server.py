"""`tessera serve model.gguf`, with nothing beside the file: text, chat, structured output, and malformed files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.gguf.converter import convert
from tests.engine.gguf.writer import Stored
from tests.support.models.tiny_models import TINY_MODELS, make_tensors
from tests.support.paths import ROOT
from tests.support.servers.server_fixture import Server, running_server

LETTERS = [chr(code) if code != 32 else "Ġ" for code in range(32, 127)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TOKENS = [*SPECIAL, *LETTERS, "he", "ll", *(f"<unused{index}>" for index in range(26))]
TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>"


def half_precision(name: str, values: np.ndarray) -> Stored:
    """Matrices in float16, vectors in float32."""
    stored = Stored.of(values)
    return stored if values.ndim == 1 else Stored("F16", values.shape, values.astype("<f2").tobytes())


def write_model(path: Path) -> Path:
    model = TINY_MODELS["llama"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array([3] * 5 + [1] * 123, np.int32),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    return convert(path, model.config, make_tensors(model), store=half_precision, metadata=metadata)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gguf")
    path = write_model(folder / "tiny.gguf")
    with running_server(path, folder / "log", "--served-model-name", path.name) as started:
        yield started


def test_the_tokenizer_is_the_files(server: Server) -> None:
    answer = server.http.post(
        "/tokenize", json={"model": server.model, "prompt": "hello you", "return_token_strs": True}
    )
    assert answer.json()["token_strs"] == ["<s>", "he", "ll", "o", "Ġ", "y", "o", "u"]


def test_text_chat_and_structured_output(server: Server) -> None:
    body = {"model": server.model, "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    usage = server.http.post("/v1/completions", json=body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(["<s>", "he", "ll", "o"]), 8)
    body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    chat = server.http.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["prompt_tokens"] == len(["<|user|>", "he", "ll", "o", "<|assistant|>"])
    choices = {"choice": ["yes", "no"]}
    body = {"model": server.model, "prompt": "hello", "max_tokens": 8, "structured_outputs": choices}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] in choices["choice"]


def test_the_start_report_names_the_types(server: Server) -> None:
    report = server.log
    assert "stored as   " in report
    assert "F16 (" in report
    assert "F32 (" in report


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1; versions 2 and 3 are read"), (b"", "cannot be read")],
)
def test_fault_gguf_malformed_files_end_the_start_with_one_sentence(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    command = [sys.executable, "-m", "tessera", "serve", str(path), "--device", "cpu", "--port", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    (sentence,) = [line for line in result.stderr.splitlines() if "broken.gguf" in line]
    assert message in sentence
