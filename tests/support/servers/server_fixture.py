"""`tessera serve` as its users run it: a process of its own on a free port of the loopback, and who speaks to it.

What a server prints goes to a file and is shown when something waits for it in vain. Servers that many
tests share are session fixtures; each ends by the id of its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tessera.app.cli.hub import BUILTIN_MODEL
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build
from tests.support.paths import ROOT

# Seconds; only a failing test waits this long. Under a tool that slows every kernel down, it takes more.
DEADLINE = float(os.environ.get("SERVER_DEADLINE", "60"))
HEALTH_DEADLINE = 5.0  # seconds; what users are promised
MAX_MODEL_LEN = 4096
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

T = TypeVar("T")


def ascii_tokenizer() -> Tokenizer:
    """Byte-level over ASCII, with special tokens first and merges enough to fill the tiny models' vocabulary."""
    alphabet = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]
    room = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)
    pairs = [(left, right) for left in "Ġthearonsi" for right in "theaonris"][:room]
    merged = [left + right for left, right in pairs]
    vocab = {token: token_id for token_id, token in enumerate([*SPECIAL_TOKENS, *alphabet, *merged])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """A random Llama with a context of its own length, a tokenizer and a chat template."""
    model = TINY_MODELS["llama"]
    config = {**model.config, "max_position_embeddings": MAX_MODEL_LEN, "rope_theta": 10000.0}
    build(replace(model, config=config), folder)
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@dataclass
class Answer:
    """One choice, whole or gathered from its chunks."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or []
        self.text += choice["text"]
        if choice["finish_reason"] is not None:
            assert self.finish_reason is None, "a choice ends once"
            self.finish_reason = choice["finish_reason"]


class Server:
    """A running server.

    Attributes:
        url: where it listens.
        model: the name that requests use.
        http: a client of its own.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], model: str, log_file: Path, verify: ssl.SSLContext | bool = True
    ) -> None:
        self.process = process
        self.model = model
        self._log_file = log_file
        self.url = self._find_url()
        _, is_unix, socket_path = self.url.partition("+unix:")
        self.http = httpx.Client(
            base_url="http://localhost" if is_unix else self.url,
            timeout=DEADLINE,
            transport=httpx.HTTPTransport(uds=socket_path) if is_unix else None,
            verify=verify,
        )

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def _find_url(self) -> str:
        pattern = re.compile(r"Ready on (http\S+)")
        self.until(lambda: self.process.poll() is not None or pattern.search(self.log), "readiness")
        found = pattern.search(self.log)
        assert found is not None, f"the server ended with exit code {self.process.returncode}; its log:\n{self.log}"
        return found[1]

    def until(self, condition: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
        """The first true result of `condition`."""
        end = time.monotonic() + deadline
        pause = threading.Event()
        while not (result := condition()):
            assert time.monotonic() < end, f"waited in vain for {what}; the log:\n{self.log}"
            pause.wait(0.01)
        return result

    def body(self, prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy completion that reports its tokens and runs to `max_tokens`, unless `fields` say otherwise."""
        common = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        return {**common, "temperature": 0, "ignore_eos": True, **fields}

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """The answer to a request that must succeed."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, f"{response.status_code} {response.text} for {body}; the log:\n{self.log}"
        answer: dict[str, Any] = response.json()
        return answer

    def complete(self, prompt: Any, max_tokens: int, **fields: Any) -> Answer:
        (choice,) = self.post(self.body(prompt, max_tokens, **fields))["choices"]
        return Answer(choice["token_ids"], choice["text"], choice["finish_reason"])

    def tokens(self, prompt: Any, max_tokens: int, **fields: Any) -> list[int]:
        return self.complete(prompt, max_tokens, **fields).token_ids

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """A streamed answer's frames, checked to end with [DONE]."""
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            yield frames_of(response.iter_lines())

    def streamed(self, prompt: Any, max_tokens: int, **fields: Any) -> Answer:
        answer = Answer()
        with self.stream(self.body(prompt, max_tokens, **fields)) as frames:
            for frame in frames:
                answer.add(frame["choices"][0])
        return answer

    def metrics(self) -> dict[str, float]:
        """Every sample without its prefix and its model_name label."""
        samples = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name.removeprefix("tessera:").replace(f'model_name="{self.model}"', "").replace("{}", "")] = (
                    float(value)
                )
        return samples

    def num_steps(self) -> int:
        """Steps of the engine since its start."""
        return int(self.metrics()["iteration_tokens_total_count"])

    def until_idle(self, polls: int = 500) -> None:
        """Ask again and again, at most `polls` times, until no request runs or waits and no block is used."""
        for _ in range(polls):
            found = self.metrics()
            if not any(found[n] for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")):
                return
        raise AssertionError(f"still busy after {polls} looks: {found}")

    def engine_pid(self) -> int | None:
        """Id of the engine process; None while there is none."""
        return next(iter(self.children("tessera.engine.ipc.process")), None)

    def children(self, module: str) -> list[int]:
        """Ids of the child processes that run this module."""
        pid = self.process.pid
        found = []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                    found.append(int(child))
        return found

    def end(self) -> int:
        return self.process.wait(DEADLINE)


def frames_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


@contextlib.asynccontextmanager
async def async_client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE, limits=limits) as client:
        yield client


async def stream_answer(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None) -> Answer:
    """A completion streamed to its end; `begun` is set by its first token."""
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        async for line in lines:
            if line == "data: [DONE]":
                return answer
            if line:
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                answer.add(choice)
                if answer.token_ids and begun is not None:
                    begun.set()
    raise AssertionError("the stream ended without [DONE]")


@contextlib.contextmanager
def running_server(
    folder: Path | None, log_file: Path, *arguments: str, verify: ssl.SSLContext | bool = True
) -> Iterator[Server]:
    """`tessera serve [FOLDER]` in float32 on the CPU, ready, to the end of the block; `verify` is the client's TLS."""
    model = [str(folder)] if folder else []
    command = [
        sys.executable,
        "-m",
        "tessera.app.cli.command",
        "serve",
        *model,
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TESSERA_API_KEY"}
    environment["TESSERA_DATA_DIR"] = "none"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", "0", *arguments], cwd=ROOT, stdout=log, stderr=log, env=environment
        )
    try:
        server = Server(process, folder.name if folder else BUILTIN_MODEL, log_file, verify)
        with server.http:
            yield server
    finally:
        process.send_signal(signal.SIGKILL)  # the engine ends with it
        process.wait()


# -- session fixtures, made known by conftest.py ---------------------------------------------------


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model with room for everybody."""
    log_file = tmp_path_factory.mktemp("logs") / "tiny.log"
    with running_server(tiny_folder, log_file, "--num-kv-blocks", "1024") as server:
        yield server


@pytest.fixture(scope="session")
def story_server(shared_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """stories260K, a model that was really trained."""
    log_file = tmp_path_factory.mktemp("logs") / "stories.log"
    with running_server(shared_models / "stories260K", log_file) as server:
        yield server


@pytest.fixture(scope="session")
def builtin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, started as a new user does: no model named."""
    with running_server(None, tmp_path_factory.mktemp("builtin") / "log") as server:
        yield server
