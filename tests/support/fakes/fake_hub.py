"""A hub of models on the loopback, and models that it has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.models.tiny_models import TINY_MODELS
from tests.support.paths import ROOT

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
QUANTISED = {"config.json": CONFIG, "quantize_config.json": b'{"bits": 3}', "model.safetensors": b"weights"}
HQQ_CONFIG = json.dumps({**TINY_MODELS["llama"].config, "quantization_config": {"quant_method": "hqq"}}).encode()
HQQ = {"config.json": HQQ_CONFIG, "model.safetensors": b"weights"}
ADAPTER = {"adapter_config.json": b'{"base_model_name_or_path": "tiny/llama"}', "adapter_model.safetensors": b"weights"}
SIZES = {"dim": 8, "n_layers": 1, "head_dim": 4, "hidden_dim": 8, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 300}
MISTRALS_FORM = {
    "params.json": json.dumps({**SIZES, "norm_eps": 1e-5}).encode(),
    "consolidated.safetensors": b"weights" * 1000,
    "tekken.json": b"{}",
    "SYSTEM_PROMPT.txt": b"words",
    "README.md": b"words",
}
MAKERS_FORM = {"params.json": b"{}", "consolidated.00.pth": b"a pickle"}
REFUSED = {
    "tiny/pickles": PICKLES,
    "tiny/mamba": UNSUPPORTED,
    "tiny/gptq": QUANTISED,
    "tiny/hqq": HQQ,
    "tiny/lora": ADAPTER,
    "tiny/maker": MAKERS_FORM,
}
MODELS = {
    **REFUSED,
    "tiny/own": MISTRALS_FORM,
    "tiny/llama": FILES,
    "tiny/gguf": GGUF_FILES,
    "tiny/one": {"only.gguf": b"GGUF one"},
}


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


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Of a process whose downloads come from `endpoint` and go to `home`."""
    hidden = ("HF_", "HUGGING", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }
