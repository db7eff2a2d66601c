"""The command `tessera`: its options, its sentences, and a whole server from start to stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from tessera.app.cli.command import main
from tessera.app.cli.reference import render_page
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.app.settings import ServerOptions
from tessera.loadtest.bench_options import BENCH_OPTIONS
from tests.support.paths import ROOT

DEADLINE = 60.0  # seconds; only a failing test waits this long
HEALTH_DEADLINE = 5.0  # what users are promised
WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(61))]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be served with --load-format dummy."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@dataclass
class Served:
    """A running `tessera serve` and what it has printed."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        self.until(lambda: "listens on" in self.log)
        found = re.search(r"listens on (http://\S+)", self.log)
        assert found is not None
        return found[1]

    def until(self, condition: Callable[[], bool], deadline: float = DEADLINE) -> None:
        end = time.monotonic() + deadline
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < end, f"waited in vain; the log:\n{self.log}"
            pause.wait(0.01)

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=DEADLINE).status_code

    def until_ready(self) -> None:
        self.until(lambda: self.process.poll() is not None or self.status("/health") == 200)
        assert self.process.poll() is None, self.log
        self.until(lambda: "Ready on" in self.log)

    def end(self) -> int:
        exit_code = self.process.wait(DEADLINE)
        self._reader.join()
        return exit_code

    def children(self) -> dict[str, int]:
        """Module of each child process, and its id."""
        pid = self.process.pid
        found = {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                if "-m" in words:
                    found[words[words.index("-m") + 1]] = int(child)
        return found


@pytest.fixture
def serve(model: Path) -> Iterator[Any]:
    started: list[Served] = []

    def start(*arguments: str, folder: Path = model, **environment: str) -> Served:
        command = [
            sys.executable,
            "-m",
            "tessera.app.cli.command",
            "serve",
            str(folder),
            "--device",
            "cpu",
            "--port",
            "0",
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        process = subprocess.Popen(
            [*command, "--load-format", "dummy", *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**inherited, **environment},
        )
        served = Served(process)
        started.append(served)
        return served

    yield start
    for served in started:
        served.process.kill()
        served.end()
        assert served.process.stderr is not None
        served.process.stderr.close()


def completion(*, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "seed": 1, **fields}


@contextlib.contextmanager
def streaming(served: Served, max_tokens: int) -> Iterator[Iterator[str]]:
    """A streamed completion's data lines, from the second on: the first has arrived."""
    body = completion(max_tokens=max_tokens, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=DEADLINE) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


# -- options --------------------------------------------------------------------------------------


def test_help_names_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = re.findall(r"--[a-z-]+", text)
    for option in (
        *("--device", "--dtype", "--host", "--port", "--api-key", "--max-model-len", "--max-num-seqs"),
        *("--max-num-batched-tokens", "--block-size", "--gpu-memory-utilization", "--cpu-kv-cache-gib"),
        *("--api-workers", "--served-model-name", "--chat-template", "--load-format", "--drain-timeout"),
    ):
        assert option in options
    for described in ("port to listen on; 0 takes a free one (default: 8000)", "in GiB (default: 1)", "256 on CUDA"):
        assert described in text


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "serve a model over HTTP" in printed
    assert "load a server and measure it" in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"tessera \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fly"], "invalid choice: 'fly' (choose from serve, chat, pull, list, show, rm, bench, "),
        (["srve"], "did you mean serve?"),
        (["serve", "{model}", "--prot", "1"], "unrecognized arguments: --prot 1; did you mean --port?"),
        (["serve", "{model}", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["serve", "{model}", "--port", "70000"], "--port: must be a whole number from 0 to 65535, not '70000'"),
        (["serve", "{model}", "--max-num-seqs", "many"], "--max-num-seqs: must be a whole number from 1"),
        (["serve", "{model}", "--gpu-memory-utilization", "nan"], "must be a number from 0.05 to 0.98, not 'nan'"),
        (["serve", "{model}", "--cpu-kv-cache-gib", "-1"], "--cpu-kv-cache-gib: must be a number from 0.001"),
        (
            ["serve", "{model}", "--block-size", "24"],
            "invalid choice: '24' (choose from 8, 16, 32, 64, 128)",
        ),
        (
            ["serve", "{model}", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
            "must be at least --max-num-seqs",
        ),
        (["serve", "{model}", "--api-key", ""], "--api-key must not be empty"),
        (["serve", "{model}", "--chat-template", "none.jinja"], "--chat-template: there is no file none.jinja"),
        (["serve", "{model}", "--metrics-prefix", "a b"], "--metrics-prefix: must be letters, digits and _"),
        (["serve", "{model}", "--host", "no.such.host.invalid"], "--host no.such.host.invalid is not an address"),
        (["serve", "{model}", "--host", "192.0.2.1"], "this machine does not have that address"),
        (["serve", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["serve", "{model}/.."], "it has no config.json"),
        (["serve", "{model}/config.json"], "is one file of a model: give its folder"),
    ],
)
def test_wrong_use_is_one_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    try:
        code: Any = main([argument.format(model=model) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_port_in_use_is_one_sentence(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"tessera: cannot listen on 127.0.0.1 port {port}: "
        "another program already listens there; choose another --port\n"
    )


@pytest.fixture
def parsed(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerOptions]:
    """What a server would be started with."""
    seen: list[ServerOptions] = []

    def remember(options: ServerOptions, read_keys: Callable[[], tuple[str, ...]]) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("tessera.app.server.serve.run_server", remember)
    for name in list(os.environ):
        if name.startswith("TESSERA_"):
            monkeypatch.delenv(name)

    def parse(*arguments: str) -> ServerOptions:
        assert main(["serve", str(model), *arguments]) == 0
        return seen.pop()

    return parse


@pytest.mark.parametrize(("cores", "expected"), [(2, 1), (7, 1), (8, 2), (64, 2)])
def test_a_machine_with_many_cores_has_two_app_processes(
    cores: int, expected: int, parsed: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.app.settings.num_cores", lambda: cores)
    assert parsed().num_api_workers == expected
    assert parsed("--api-workers", "3").num_api_workers == 3


def test_options_reach_the_engine_and_the_app(parsed: Callable[..., ServerOptions], model: Path) -> None:
    plain = parsed()
    assert (plain.engines[0].config.model, plain.app.model_folder) == (str(model), str(model))
    assert plain.app.served_model_names == ("tiny",)
    assert (plain.host, plain.port, plain.api_workers, plain.drain_timeout) == ("127.0.0.1", 8000, None, 30)
    assert (plain.engines[0].config.max_num_seqs, plain.engines[0].config.max_num_batched_tokens) == (0, 0)
    assert plain.engines[0].config.prefix_caching
    assert plain.app.api_keys == ()
    cpu, cuda = (
        plain.engines[0].config.with_device_defaults("cpu"),
        plain.engines[0].config.with_device_defaults("cuda"),
    )
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 1024)
    assert (cuda.max_num_seqs, cuda.max_num_batched_tokens) == (256, 8192)

    full = parsed(
        *("--device", "cpu", "--dtype", "bfloat16", "--host", "::1", "--port", "1234", "--api-key", "a"),
        *("--api-key", "b", "--max-model-len", "100", "--max-num-seqs", "3", "--max-num-batched-tokens", "40"),
        *("--block-size", "32", "--gpu-memory-utilization", "0.5", "--cpu-kv-cache-gib", "0.25"),
        *("--api-workers", "4", "--served-model-name", "x", "--served-model-name", "y", "--load-format", "dummy"),
        *("--chat-template", str(model / "config.json"), "--max-queue-len", "7", "--num-kv-blocks", "9"),
        *("--no-prefix-caching", "--step-timeout", "5", "--drain-timeout", "6", "--metrics-prefix", "vllm"),
        *("--request-timeout", "8", "--tool-call-parser", "mistral", "--reasoning-parser", "think", "--seed", "5"),
        *("--log-format", "json", "--log-level", "warning", "--log-prompts", "--no-ui"),
    )
    engine, app = full.engines[0].config, full.app
    assert (engine.device, engine.dtype, engine.load_format, engine.prefix_caching) == (
        "cpu",
        "bfloat16",
        "dummy",
        False,
    )
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (100, 3, 40)
    assert (engine.block_size, engine.gpu_memory_utilization, engine.cpu_kv_cache_gib) == (32, 0.5, 0.25)
    assert (engine.max_queue_len, engine.num_kv_blocks, engine.served_name) == (7, 9, "x")
    assert (app.api_keys, app.served_model_names, app.metrics_prefix) == (("a", "b"), ("x", "y"), "vllm")
    assert (app.chat_template, app.request_timeout) == (str(model / "config.json"), 8.0)
    assert (app.tool_call_parser, app.reasoning_parser) == ("mistral", "think")
    for side in (engine, app):
        assert (side.log_format, side.log_level) == ("json", "warning")
    assert (app.log_prompts, app.ui, plain.app.log_prompts, plain.app.ui) == (True, False, False, True)
    assert (engine.seed, app.seed, plain.engines[0].config.seed, plain.app.seed) == (5, 5, None, None)
    assert (plain.app.tool_call_parser, plain.app.reasoning_parser) == ("auto", "auto")
    assert (full.host, full.port, full.api_workers, full.drain_timeout, full.step_timeout) == ("::1", 1234, 4, 6, 5.0)


def test_the_key_may_come_from_the_environment(
    parsed: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", "secret")
    assert parsed().app.api_keys == ("secret",)
    assert parsed("--api-key", "other").app.api_keys == ("other",)
    monkeypatch.setenv("TESSERA_API_KEY", "")
    assert parsed().app.api_keys == ()


def test_keys_of_a_lower_place_do_not_count(
    parsed: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key that was taken out of the place that decides is not accepted because of an older one elsewhere."""
    keys, config = tmp_path / "keys", tmp_path / "tessera.yaml"
    keys.write_text("from-file\n")
    config.write_text("api-key: [from-config, other]\n")
    options = ("--config", str(config))
    assert parsed(*options).app.api_keys == ("from-config", "other")
    monkeypatch.setenv("TESSERA_API_KEY", "one, two")
    assert parsed(*options).app.api_keys == ("one", "two")
    assert parsed(*options, "--api-key-file", str(keys)).app.api_keys == ("from-file",)
    assert parsed("--api-key-file", str(keys), "--api-key", "third").app.api_keys == ("third", "from-file")
    monkeypatch.setenv("TESSERA_API_KEY_FILE", str(keys))
    assert parsed(*options).app.api_keys == ("one", "two", "from-file")
    assert parsed(*options, "--api-key", "third").app.api_keys == ("third",)


@pytest.mark.parametrize("text", ['api-key: ""', "api-key: ['']", "api-key: a,,b"])
def test_an_empty_key_in_a_file_does_not_open_the_server(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    config = tmp_path / "tessera.yaml"
    config.write_text(text)
    assert main(["serve", str(model), "--config", str(config)]) == 2
    assert "--api-key must not be empty" in capsys.readouterr().err


def test_a_file_and_the_environment_start_a_server_as_the_command_line_does(
    parsed: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "tessera.yaml"
    config.write_text("max-num-seqs: 3\nprefix_caching: false\nport: 1234\nui: no\nlog-format: json\nseed: 5\n")
    monkeypatch.setenv("TESSERA_CONFIG", str(config))
    monkeypatch.setenv("TESSERA_PORT", "1235")
    monkeypatch.setenv("TESSERA_BENCH_SEED", "not this command's")
    for name in ("ARGS", "BIND", "MEMORY", "CPUS", "START_PERIOD", "CACHE_DIR"):  # compose's, and the kernel cache
        monkeypatch.setenv(f"TESSERA_{name}", "x")
    started = parsed("--max-num-seqs", "4")
    monkeypatch.delenv("TESSERA_CONFIG")
    monkeypatch.delenv("TESSERA_PORT")
    line = ("--max-num-seqs", "4", "--no-prefix-caching", "--port", "1235", "--no-ui", "--log-format", "json")
    assert started == parsed(*line, "--seed", "5")
    assert started != parsed(*line)


@pytest.mark.parametrize("place", ["environment", "file"])
def test_a_mistyped_option_elsewhere_ends_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    config = tmp_path / "tessera.yaml"
    config.write_text("max-num-seq: 4" if place == "file" else "")
    if place == "environment":
        monkeypatch.setenv("TESSERA_MAX_NUM_SEQ", "4")
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(model), "--config", str(config)])
    assert ended.value.code == 2
    assert re.fullmatch(
        r"tessera serve: .*did you mean (TESSERA_MAX_NUM_SEQS|max-num-seqs)\?.*\n", capsys.readouterr().err
    )


def test_settings_reach_other_processes_as_json(parsed: Callable[..., ServerOptions]) -> None:
    options = parsed("--block-size", "32", "--cors-origin", "*", "--seed", "7", "--no-ui", "--step-timeout", "9")
    assert msgspec.json.decode(msgspec.json.encode(options), type=ServerOptions) == options


def test_models_beside_have_names_of_their_own(
    parsed: Callable[..., ServerOptions], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("encoder", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    encoder, judge = str(tmp_path / "encoder"), str(tmp_path / "judge")
    options = parsed("--embedding-model", encoder, "--reranker-model", judge)
    assert (options.app.embedding_model_names, options.app.reranker_model_names) == (("encoder",), ("judge",))
    assert (options.engines[0].config.embedding_name, options.engines[0].config.reranker_name) == ("encoder", "judge")
    assert (options.engines[0].config.embedding_model, options.engines[0].config.reranker_model) == (encoder, judge)
    for wrong in (("--embedding-model", judge), ("--served-model-name", "judge")):
        assert main(["serve", str(model), *wrong, "--reranker-model", judge]) == 2
        assert "--reranker-model and another model are both called judge" in capsys.readouterr().err


def test_the_reference_documents_every_option_of_both_commands() -> None:
    page = render_page()
    for command in (SERVE_OPTIONS, BENCH_OPTIONS):
        for declared in command.options:
            assert f"| `{declared.flag}`" in page
            assert f"| `{command.variable(declared)}` |" in page
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert set(yaml.safe_load(example)) <= {declared.name for declared in SERVE_OPTIONS.options}


# -- whole servers --------------------------------------------------------------------------------


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of its own whose path leaves room for a socket's name, which tmp_path's may not."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_without_a_tokenizer_the_suggested_request_works(serve: Any, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    served = serve()
    served.until_ready()
    assert f"{model} has no tokenizer.json, and no tokenizer.model" in served.log
    assert "prompts must be lists of token ids" in served.log
    (curl,) = [line for line in served.lines if line.startswith("  curl ")]
    answer = subprocess.run(curl, shell=True, capture_output=True, check=True, timeout=DEADLINE)
    assert json.loads(answer.stdout)["object"] == "text_completion"


def test_a_server_from_start_to_stop(serve: Any, short_path: Path) -> None:
    served = serve("--api-key", "secret", TMPDIR=str(short_path))
    served.until_ready()
    for fact in (
        r"  model +tiny \(LlamaForCausalLM, [\d.]+ k parameters\)",
        r"  device +cpu, .*: the CPU was asked for",
        r"  dtype +float32, [\d.]+ kB of weights",
        r"  KV cache +\d+ blocks of 16 tokens, \d+ tokens in all",
        r"  step +at most 64 sequences and 1024 tokens",
        r"Ready on http://127\.0\.0\.1:\d+",
    ):
        assert re.search(fact, served.log), served.log
    (curl,) = [line for line in served.lines if line.startswith("  curl ")]
    environment = {**os.environ, "TESSERA_API_KEY": "secret"}
    answer = subprocess.run(curl, shell=True, env=environment, capture_output=True, check=True, timeout=DEADLINE)
    assert json.loads(answer.stdout)["object"] == "text_completion"
    assert list(short_path.glob("tessera-*"))
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == 0
    assert "Traceback" not in served.log
    assert not list(short_path.glob("tessera-*"))


def test_fault_overload_and_drain_sigterm_lets_the_requests_of_all_app_processes_finish(serve: Any) -> None:
    served = serve("--api-workers", "2")
    served.until_ready()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(served, max_tokens=200)) for _ in range(6)]
        served.process.send_signal(signal.SIGTERM)
        served.until(lambda: "Stopping" in served.log)
        for stream in streams:
            *_, usage, done = stream
            assert done == "[DONE]"
            assert json.loads(usage)["usage"]["completion_tokens"] == 200
    assert served.end() == 0
    assert "Traceback" not in served.log
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url)


def test_a_drain_is_bounded_and_a_second_signal_ends_at_once(serve: Any) -> None:
    served = serve("--drain-timeout", "1")
    served.until_ready()
    with streaming(served, max_tokens=16000) as stream, contextlib.suppress(httpx.RemoteProtocolError):
        served.process.send_signal(signal.SIGINT)
        *_, last = (line for line in stream if line != "[DONE]")
        assert json.loads(last)["error"]["code"] == "server_shutdown"
    assert served.end() == 0

    served = serve("--drain-timeout", "600")
    served.until_ready()
    engine = served.children()["tessera.engine.ipc.process"]
    with streaming(served, max_tokens=16000) as stream:
        served.process.send_signal(signal.SIGTERM)
        served.until(lambda: "Stopping" in served.log)
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 128 + signal.SIGTERM
        with contextlib.suppress(httpx.RemoteProtocolError):
            list(stream)
    served.until(lambda: not Path(f"/proc/{engine}").exists())


def test_a_killed_engine_ends_requests_with_an_error_and_comes_back(serve: Any) -> None:
    served = serve()
    served.until_ready()
    engine = served.children()["tessera.engine.ipc.process"]
    with streaming(served, max_tokens=16000) as stream:
        os.kill(engine, signal.SIGKILL)
        *_, last = (line for line in stream if line != "[DONE]")
    error = json.loads(last)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "engine_died")
    served.until(lambda: served.status("/health") == 503, HEALTH_DEADLINE)
    served.until(lambda: served.status("/health") == 200)
    answer = httpx.post(served.url + "/v1/completions", json=completion(max_tokens=5), timeout=DEADLINE)
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert served.children()["tessera.engine.ipc.process"] != engine


ENGINE_FIRST = """
import sys
from tessera.app.server import serve

class Pool:
    def __init__(self, *arguments, **options): pass
    def start(self): pass
    async def wait_launched(self):
        sys.exit(7 if {"fastapi", "tessera.app.server.http_server"}.isdisjoint(sys.modules) else 8)

serve.EnginePool = Pool
from tessera.app.cli.command import main
main(["serve", sys.argv[1], "--device", "cpu", "--port", "0"])
"""


def test_the_engine_process_begins_before_the_server_imports_the_rest(model: Path) -> None:
    """It loads the model meanwhile."""
    command = [sys.executable, "-c", ENGINE_FIRST, str(model)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=DEADLINE).returncode == 7


def test_app_processes_are_replaced_and_none_outlives_the_server(serve: Any, short_path: Path) -> None:
    served = serve("--api-workers", "2", TMPDIR=str(short_path))
    served.until_ready()
    worker = served.children()["tessera.app.server.worker"]
    os.kill(worker, signal.SIGKILL)
    served.until(lambda: served.children().get("tessera.app.server.worker", worker) != worker)
    body = completion(max_tokens=3)
    for _ in range(20):
        answer = httpx.post(served.url + "/v1/completions", json=body, timeout=DEADLINE)
        assert answer.status_code in (200, 503), "a replaced process connects to the engine first"
    children = served.children()
    assert set(children) == {"tessera.engine.ipc.process", "tessera.app.server.worker"}
    served.process.kill()
    served.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children.values()))
    assert not list(short_path.glob("tessera-*"))


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, (), r"tessera: .*MambaForCausalLM.* Llama,"),
        ({}, ("--load-format", "auto"), r"tessera: .*safetensors"),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_start(
    serve: Any, model: Path, tmp_path: Path, change: dict[str, Any], arguments: tuple[str, ...], sentence: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    served = serve(*arguments, folder=folder)
    assert served.end() == 2
    assert re.match(sentence, served.lines[-1]), served.log
    assert "Traceback" not in served.log


def test_a_broken_tokenizer_ends_the_start(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    served = serve(folder=tmp_path)
    assert served.end() == 2
    assert re.match(r"tessera: .*tokenizer\.json cannot be read", served.lines[-1])
    assert "Traceback" not in served.log
