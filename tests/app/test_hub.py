"""MODEL to a folder: local ones, and downloads from a hub-like server on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tessera.app.cli.hub import find_model
from tessera.engine.contract.errors import ModelError
from tests.support.paths import ROOT
from tests.support.tiny_models import TINY_MODELS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps(TINY_MODELS["llama"].config).encode()
FILES = {
    "config.json": CONFIG,
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_custom.py": b"raise SystemExit",
    "consolidated.safetensors": b"the weights once more",
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"the weights once more",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "README.md": b"words",
}
GGUF_FILES = {
    "config.json": b"{}",
    "README.md": b"words",
    "Tiny-Q4_K_M.gguf": b"GGUF four" * 1000,
    "Tiny-Q8_0.gguf": b"GGUF eight" * 1000,
    "BF16/Tiny-BF16-00001-of-00002.gguf": b"GGUF first" * 1000,
    "BF16/Tiny-BF16-00002-of-00002.gguf": b"GGUF second" * 1000,
    "mmproj-Tiny-F16.gguf": b"GGUF pictures",
}
PICKLES = {"config.json": CONFIG, "pytorch_model.bin": b"a pickle", "training_args.bin": b"another"}
UNSUPPORTED = {"config.json": b'{"architectures": ["MambaForCausalLM"]}', "model.safetensors": b"weights"}
QUANTISED = {"config.json": CONFIG, "quantize_config.json": b'{"bits": 4}', "model.safetensors": b"weights"}
FP8_CONFIG = json.dumps({**TINY_MODELS["llama"].config, "quantization_config": {"quant_method": "fp8"}}).encode()
FP8 = {"config.json": FP8_CONFIG, "model.safetensors": b"weights"}
ADAPTER = {"adapter_config.json": b'{"base_model_name_or_path": "tiny/llama"}', "adapter_model.safetensors": b"weights"}
REFUSED = {
    "tiny/pickles": PICKLES,
    "tiny/mamba": UNSUPPORTED,
    "tiny/gptq": QUANTISED,
    "tiny/fp8": FP8,
    "tiny/lora": ADAPTER,
}
MODELS = {**REFUSED, "tiny/llama": FILES, "tiny/gguf": GGUF_FILES, "tiny/one": {"only.gguf": b"GGUF one"}}
WANTED = {
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "1_Pooling/config.json",
    "additional_chat_templates/tool_use.jinja",
}
PROGRAM = """
import sys
from tessera.app.cli.hub import find_model
from tessera.engine.contract.errors import ConfigError
try:
    print(*find_model(sys.argv[1]), sep="\\n")
except ConfigError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Hub(ThreadingHTTPServer):
    """As much of a model hub as a download needs, with MODELS and some that misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requested.append(f"{self.command} {path}")
        if path.startswith("/api/models/tiny/gated"):
            self._error(403, "GatedRepo")
        elif path.startswith("/api/models/tiny/broken"):
            self._error(500, "Internal")
        else:
            self._answer_of_model(path)

    def _answer_of_model(self, path: str) -> None:
        model, files = next(((model, MODELS[model]) for model in MODELS if model in path), ("", {}))
        if not model:
            self._error(404, "RepoNotFound")
        elif path in (f"/api/models/{model}/revision/main", f"/api/models/{model}/revision/v1"):
            self._json({"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif path.startswith(f"/api/models/{model}/revision/"):
            self._error(404, "RevisionNotFound")
        elif path == f"/api/models/{model}/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
            )
        elif path.startswith(f"/{model}/resolve/{COMMIT}/"):
            self._file(files[path.removeprefix(f"/{model}/resolve/{COMMIT}/")])
        else:
            self._error(404, "RepoNotFound")

    def _file(self, content: bytes) -> None:
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self._send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def find_in_process(
    model: str, endpoint: str, home: Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`find_model` in a process of its own, because the hub's client reads its settings when imported."""
    hidden = ("HF_", "HUGGING", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    settings = {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        cwd=cwd,
        env={**inherited, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_downloads_only_what_is_served_and_runs_no_code(tmp_path: Path) -> None:
    with running_hub() as hub:
        result = find_in_process("tiny/llama", hub.url, tmp_path)
        assert result.returncode == 0, result.stderr
        folder, name = result.stdout.splitlines()
        assert name == "tiny/llama"
        found = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
        assert found == WANTED
        for wanted in WANTED:
            assert (Path(folder) / wanted).read_bytes() == FILES[wanted]
        fetched = {request.partition(f"/resolve/{COMMIT}/")[2] for request in hub.requested if "/resolve/" in request}
        assert fetched == WANTED
        endpoint = hub.url
    again = find_in_process("tiny/llama", endpoint, tmp_path)  # the hub is gone; the cache is complete
    assert (again.returncode, again.stdout) == (0, result.stdout), again.stderr


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny/pickles", "the hub model tiny/pickles has its weights in pytorch_model.bin only, a pickle, which could"),
        ("tiny/lora", "the hub model tiny/lora is a LoRA adapter, not a model: merge it into tiny/llama and serve"),
        ("tiny/mamba", 'the architecture "MambaForCausalLM" is not supported; supported are BertModel, '),
        ("tiny/fp8", 'is quantised (quantization_config "fp8"), which is not supported'),
        ("tiny/gptq", "is quantised (GPTQ or AWQ, says quantize_config.json), which is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_move(tmp_path: Path, model: str, sentence: str) -> None:
    with running_hub() as hub:
        result = find_in_process(model, hub.url, tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]  # after the progress of the download
    assert last.startswith("ModelError: ")
    assert sentence in last
    fetched = {request.partition(f"/resolve/{COMMIT}/")[2] for request in hub.requested if "/resolve/" in request}
    assert all(name.endswith(".json") for name in fetched)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("tiny/gguf:q8_0", ["Tiny-Q8_0.gguf"]),
        ("tiny/gguf:Tiny-Q4_K_M@v1", ["Tiny-Q4_K_M.gguf"]),
        ("tiny/gguf:BF16", ["BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf"]),
        ("tiny/one", ["only.gguf"]),
    ],
)
def test_the_gguf_file_that_is_asked_for_is_downloaded_alone(tmp_path: Path, model: str, chosen: list[str]) -> None:
    with running_hub() as hub:
        result = find_in_process(model, hub.url, tmp_path)
        assert result.returncode == 0, result.stderr
        path, name = result.stdout.splitlines()
        assert name == model.partition("@")[0]
        assert path.endswith(chosen[0])
        fetched = {request.partition(f"/resolve/{COMMIT}/")[2] for request in hub.requested if "/resolve/" in request}
        assert fetched == set(chosen)
        endpoint = hub.url
    again = find_in_process(model, endpoint, tmp_path)  # the hub is gone; the cache has the file
    assert (again.returncode, again.stdout) == (0, result.stdout), again.stderr


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny/gguf", "the hub model tiny/gguf has several GGUF files: add :NAME with one of BF16, Q4_K_M, Q8_0"),
        ("tiny/gguf:Q5_K", "the hub model tiny/gguf has no GGUF file Q5_K; there are BF16, Q4_K_M, Q8_0"),
        ("tiny/llama:Q4_K_M", "the hub model tiny/llama has no GGUF file of a language model"),
    ],
)
def test_gguf_files_that_are_not_clear_are_listed(tmp_path: Path, model: str, sentence: str) -> None:
    with running_hub() as hub:
        result = find_in_process(model, hub.url, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"ModelError: {sentence}"  # after the progress of the download


def test_a_revision_is_asked_for(tmp_path: Path) -> None:
    with running_hub() as hub:
        result = find_in_process("tiny/llama@v1", hub.url, tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[1] == "tiny/llama"
        assert "GET /api/models/tiny/llama/revision/v1" in hub.requested
        result = find_in_process("tiny/llama@v9", hub.url, tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip() == f"ModelError: the model tiny/llama at {hub.url} has no revision v9"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny/unknown", "ModelError: there is no folder tiny/unknown, and no public model of that name at {hub}"),
        ("tiny/gated", "ConfigError: the model tiny/gated is gated: accept its terms at {hub}/tiny/gated"),
        ("tiny/broken", "ConfigError: {hub} answers with status 500, and the model tiny/broken is not complete"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(tmp_path: Path, model: str, sentence: str) -> None:
    with running_hub() as hub:
        result = find_in_process(model, hub.url, tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(sentence.format(hub=hub.url)), result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_hub_the_sentence_says_why(tmp_path: Path, offline: str) -> None:
    with running_hub() as hub:
        endpoint = hub.url
    result = find_in_process("tiny/llama", endpoint, tmp_path, HF_HUB_OFFLINE=offline)
    assert result.returncode == 1
    reason = "HF_HUB_OFFLINE is set" if offline == "1" else f"{endpoint} cannot be reached"
    assert result.stderr.startswith(f"ConfigError: {reason}, and the model tiny/llama is not complete in the cache")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_model(str(folder)) == (folder, "model")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/model") == (folder, "model")  # before any hub is asked
    monkeypatch.chdir(folder)
    assert find_model(".") == (folder, "model")


def test_gguf_files_may_be_named_alone_or_by_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "split").mkdir(parents=True)
    for name in (
        "a-Q4_0.gguf",
        "a-UD-Q4_0.gguf",
        "split/b-Q6_K-00001-of-00002.gguf",
        "split/b-Q6_K-00002-of-00002.gguf",
    ):
        (folder / name).touch()
    assert find_model(str(folder / "a-Q4_0.gguf")) == (folder / "a-Q4_0.gguf", "a-Q4_0")
    assert find_model(f"{folder}:ud-q4_0") == (folder / "a-UD-Q4_0.gguf", "a-UD-Q4_0")
    assert find_model(f"{folder}:a-Q4_0.gguf") == (folder / "a-Q4_0.gguf", "a-Q4_0")
    assert find_model(f"{folder}:Q6_K") == (folder / "split/b-Q6_K-00001-of-00002.gguf", "b-Q6_K")
    assert find_model(str(folder / "split")).name == "b-Q6_K"
    for model, message in (
        (f"{folder}", "has several GGUF files: add :NAME with one of Q4_0, Q6_K, UD-Q4_0"),
        (f"{folder}:Q4_0", "has several GGUF files Q4_0: add :NAME with one of Q4_0, UD-Q4_0"),
        (f"{folder}:Q2_K", "has no GGUF file Q2_K; there are Q4_0, Q6_K, UD-Q4_0"),
    ):
        with pytest.raises(ModelError) as refused:
            find_model(model)
        assert str(refused.value).endswith(message)


def test_a_folder_with_safetensors_is_that_model(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "a-Q4_0.gguf"):
        (tmp_path / name).write_text("{}")
    assert find_model(str(tmp_path)).path == tmp_path
    assert find_model(f"{tmp_path}:Q4_0").path == tmp_path / "a-Q4_0.gguf"


def test_a_mistyped_folder_is_shown_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Qwen3-0.6B", "Llama-3.2-1B"):
        (tmp_path / "models" / name).mkdir(parents=True)
    with running_hub() as hub:
        result = find_in_process(str(tmp_path / "models" / "Qwen3-06B"), hub.url, tmp_path)
        near = find_in_process("models/Qwen3-06B", hub.url, tmp_path, cwd=tmp_path)
        far = find_in_process("models/phi", hub.url, tmp_path, cwd=tmp_path)
    assert f"there is no folder {tmp_path}/models/Qwen3-06B ({tmp_path}/models has Qwen3-0.6B)" in result.stderr
    assert "ModelError: there is no folder models/Qwen3-06B (models has Qwen3-0.6B), and no public model" in near.stderr
    assert "there is no folder models/phi (models has Llama-3.2-1B, Qwen3-0.6B), and no" in far.stderr
    gone = find_in_process("models/Qwen3-06B", hub.url, tmp_path, cwd=tmp_path)
    assert "there is no folder models/Qwen3-06B (models has Qwen3-0.6B); and as a hub id: " in gone.stderr
    assert "cannot be reached" in gone.stderr


def test_an_adapter_folder_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelError, match="is a LoRA adapter, not a model: merge it into org/base and serve the result"):
        find_model(str(tmp_path))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model: it has no config\.json"):
        find_model(str(tmp_path))
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match="is a file"):
        find_model(str(file))
    for missing in ("/no/such/folder", "./missing", "missing", "../a/b", "a/b/c", "org/na me", ""):
        with pytest.raises(ModelError, match=r"there is no folder .*|no config\.json"):
            find_model(missing)
