"""MODEL to a folder: local ones, and downloads from a hub-like server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tessera.app.cli.hub import BUILTIN_MODEL, builtin_model, find_model
from tessera.engine.contract.errors import ModelError
from tests.support.fakes.fake_hub import COMMIT, FILES, MISTRALS_FORM, hub_environment, running_hub
from tests.support.paths import ROOT

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
import json, os, sys
import huggingface_hub._snapshot_download, huggingface_hub.hf_api
import tessera.app.cli.download_bar, tessera.engine.models.config, tessera.engine.models.weights.files
from tessera.app.cli.hub import find_model
from tessera.engine.contract.errors import ConfigError

for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(task["environment"])
        os.chdir(task["cwd"])
        for stream, path in enumerate(task["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        try:
            print(*find_model(task["model"]), sep="\\n")
        except ConfigError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Finder:
    """`find_model` in a process of its own each time, because the hub's client reads its settings when imported.

    Each is forked from one that has imported everything else, which takes three times as long.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, model: str, endpoint: str, home: Path, cwd: Path = ROOT, **environment: str) -> Result:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / name for name in ("stdout", "stderr")]
            task = {
                "model": model,
                "environment": {**hub_environment(endpoint, home), **environment},
                "cwd": str(cwd),
                "outputs": [str(output) for output in outputs],
            }
            print(json.dumps(task), file=self._process.stdin, flush=True)
            returncode = int(self._process.stdout.readline())
            return Result(returncode, *(output.read_text() for output in outputs))


@pytest.fixture(scope="module")
def find() -> Iterator[Finder]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Finder(process)
        assert process.stdin is not None
        process.stdin.close()


def test_downloads_only_what_is_served_and_runs_no_code(tmp_path: Path, find: Finder) -> None:
    with running_hub() as hub:
        result = find("tiny/llama", hub.url, tmp_path)
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
    again = find("tiny/llama", endpoint, tmp_path)  # the hub is gone; the cache is complete
    assert (again.returncode, again.stdout) == (0, result.stdout), again.stderr


def test_the_weights_of_mistrals_form_are_downloaded_where_there_are_no_others(tmp_path: Path, find: Finder) -> None:
    with running_hub() as hub:
        result = find("tiny/own", hub.url, tmp_path)
    assert result.returncode == 0, result.stderr
    folder, _ = result.stdout.splitlines()
    assert {path.name for path in Path(folder).iterdir()} == MISTRALS_FORM.keys() - {"README.md"}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny/pickles", "the hub model tiny/pickles has its weights in pytorch_model.bin only, a pickle, which could"),
        ("tiny/lora", "the hub model tiny/lora is a LoRA adapter, not a model: serve tiny/llama with --lora"),
        ("tiny/maker", "the hub model tiny/maker is in its maker's own format (params.json); get its version with"),
        ("tiny/mamba", 'the architecture "MambaForCausalLM" is not supported; supported are Arcee, '),
        ("tiny/hqq", 'quantisation by quant_method "hqq" is not supported; supported are FP8, W4A16'),
        ("tiny/gptq", "quantize_config.json: quantisation by GPTQ of 3 bits is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_move(
    tmp_path: Path, model: str, sentence: str, find: Finder
) -> None:
    with running_hub() as hub:
        result = find(model, hub.url, tmp_path)
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
def test_the_gguf_file_that_is_asked_for_is_downloaded_alone(
    tmp_path: Path, model: str, chosen: list[str], find: Finder
) -> None:
    with running_hub() as hub:
        result = find(model, hub.url, tmp_path)
        assert result.returncode == 0, result.stderr
        path, name = result.stdout.splitlines()
        assert name == model.partition("@")[0]
        assert path.endswith(chosen[0])
        fetched = {request.partition(f"/resolve/{COMMIT}/")[2] for request in hub.requested if "/resolve/" in request}
        assert fetched == set(chosen)
        endpoint = hub.url
    again = find(model, endpoint, tmp_path)  # the hub is gone; the cache has the file
    assert (again.returncode, again.stdout) == (0, result.stdout), again.stderr


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("tiny/gguf", "the hub model tiny/gguf has several GGUF files: add :NAME with one of BF16, Q4_K_M, Q8_0"),
        ("tiny/gguf:Q5_K", "the hub model tiny/gguf has no GGUF file Q5_K; there are BF16, Q4_K_M, Q8_0"),
        ("tiny/llama:Q4_K_M", "the hub model tiny/llama has no GGUF file of a language model"),
    ],
)
def test_gguf_files_that_are_not_clear_are_listed(tmp_path: Path, model: str, sentence: str, find: Finder) -> None:
    with running_hub() as hub:
        result = find(model, hub.url, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"ModelError: {sentence}"  # after the progress of the download


def test_a_revision_is_asked_for(tmp_path: Path, find: Finder) -> None:
    with running_hub() as hub:
        result = find("tiny/llama@v1", hub.url, tmp_path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[1] == "tiny/llama"
        assert "GET /api/models/tiny/llama/revision/v1" in hub.requested
        result = find("tiny/llama@v9", hub.url, tmp_path)
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
def test_what_the_hub_refuses_is_one_sentence(tmp_path: Path, model: str, sentence: str, find: Finder) -> None:
    with running_hub() as hub:
        result = find(model, hub.url, tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(sentence.format(hub=hub.url)), result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_hub_the_sentence_says_why(tmp_path: Path, offline: str, find: Finder) -> None:
    with running_hub() as hub:
        endpoint = hub.url
    result = find("tiny/llama", endpoint, tmp_path, HF_HUB_OFFLINE=offline)
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


def test_the_demonstration_model_has_a_name() -> None:
    assert find_model(BUILTIN_MODEL) == builtin_model()


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


def test_a_mistyped_folder_is_shown_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Finder
) -> None:
    for name in ("Qwen3-0.6B", "Llama-3.2-1B"):
        (tmp_path / "models" / name).mkdir(parents=True)
    with running_hub() as hub:
        result = find(str(tmp_path / "models" / "Qwen3-06B"), hub.url, tmp_path)
        near = find("models/Qwen3-06B", hub.url, tmp_path, cwd=tmp_path)
        far = find("models/phi", hub.url, tmp_path, cwd=tmp_path)
    assert f"there is no folder {tmp_path}/models/Qwen3-06B ({tmp_path}/models has Qwen3-0.6B)" in result.stderr
    assert "ModelError: there is no folder models/Qwen3-06B (models has Qwen3-0.6B), and no public model" in near.stderr
    assert "there is no folder models/phi (models has Llama-3.2-1B, Qwen3-0.6B), and no" in far.stderr
    gone = find("models/Qwen3-06B", hub.url, tmp_path, cwd=tmp_path)
    assert "there is no folder models/Qwen3-06B (models has Qwen3-0.6B); and as a hub id: " in gone.stderr
    assert "cannot be reached" in gone.stderr


def test_an_adapter_folder_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelError, match="is a LoRA adapter, not a model: serve org/base with --lora NAME="):
        find_model(str(tmp_path))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model: it has no config\.json"):
        find_model(str(tmp_path))
    for missing in ("/no/such/folder", "./missing", "missing", "../a/b", "a/b/c", "org/na me", ""):
        with pytest.raises(ModelError, match=r"there is no folder .*|no config\.json"):
            find_model(missing)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("model.bin", b"", "model.bin is a pickle, which could run code when opened; get the model in safetensors or"),
        ("model.safetensors", b"x", "model.safetensors is one file of a model: give its folder, "),
        ("config.json", b"{}", "config.json is one file of a model: give its folder, "),
        ("tiny-Q4_0", b"GGUF\3\0", "is a GGUF file by its content, but not by its name: rename it to tiny-Q4_0.gguf"),
        ("model", POINTER, "model is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder"),
        ("notes.txt", b"words", "notes.txt is a file; give a GGUF file, or the folder that holds config.json"),
    ],
)
def test_a_file_that_is_no_model_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as refused:
        find_model(str(tmp_path / name))
    assert sentence in str(refused.value)


def test_a_folder_of_a_diffusers_pipeline_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ModelError, match=r"is a diffusers pipeline \(StableDiffusionPipeline\), which makes images"):
        find_model(str(tmp_path))
