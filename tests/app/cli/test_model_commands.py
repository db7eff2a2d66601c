"""`tessera pull`, `list`, `show` and `rm`, against a hub on the loopback and a cache made by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.cache import commands
from tessera.app.cli.cache.cached_models import cached_models
from tessera.app.cli.cache.units import ago, count, size
from tessera.app.cli.command import main
from tests.support.fakes.fake_hub import COMMIT, hub_environment, running_hub
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.models.tiny_tekken import tekken_values, write_tekken
from tests.support.paths import ROOT

PROGRAM = """
import sys
from tessera.app.cli.command import main
for line in sys.stdin:
    print("exit", main(line.split()), flush=True)
"""


def test_a_model_is_pulled_listed_and_removed(tmp_path: Path) -> None:
    lines = [
        "pull tiny/gguf:Q8_0 tiny/gguf:BF16 tiny/llama",
        "list",
        "list --json gguf",
        "rm --yes tiny/gguf:Q8_0",
        "list --names",
        "rm tiny/llama",
        "rm --yes tiny/gguf tiny/llama",
        "list",
        "pull tiny/mamba",
        "show tiny/hqq",
        "show tiny/one",
    ]
    with running_hub() as hub:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input="\n".join(lines),
            cwd=ROOT,
            env=hub_environment(hub.url, tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
        )
    outputs = done.stdout.split("exit ")
    pulled, listed, as_json, removed, names, unasked, gone, empty, refused, shown, _, _ = [
        output.partition("\n")[2] if index else output for index, output in enumerate([*outputs])
    ]
    codes = [output.partition("\n")[0] for output in outputs[1:]]
    assert codes == ["0", "0", "0", "0", "0", "2", "0", "0", "2", "1", "2"], done.stderr
    assert [line.partition(": ")[0] for line in pulled.splitlines()] == [
        "tiny/gguf:Q8_0",
        "tiny/gguf:BF16",
        "tiny/llama",
    ]
    assert "tiny/gguf:BF16: 21 kB in " in pulled  # of both its files
    assert [line.split()[0] for line in listed.splitlines()[1:4]] == ["tiny/gguf:BF16", "tiny/gguf:Q8_0", "tiny/llama"]
    rows: list[dict[str, Any]] = json.loads(as_json)
    assert [(row["name"], row["bytes"], row["format"], row["complete"]) for row in rows] == [
        ("tiny/gguf:BF16", 21000, "GGUF", True),
        ("tiny/gguf:Q8_0", 10000, "GGUF", True),
    ]
    assert {row["revision"] for row in rows} == {COMMIT}
    assert removed == "removed tiny/gguf:Q8_0, 10 kB\n"
    assert names.split() == ["tiny/gguf:BF16", "tiny/llama"]
    assert unasked == ""
    assert "tessera: rm: there is no terminal to ask on; add --yes" in done.stderr
    assert gone.count("removed ") == 2
    assert empty.startswith("There is no model in ")
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_file() and "tiny--gguf" in str(path)]
    assert refused == ""
    assert 'the architecture "MambaForCausalLM" is not supported' in done.stderr
    assert "can be served  no: " in shown
    assert "only.gguf of tiny/one is not in the cache" in done.stderr
    assert "`tessera pull tiny/one:only` downloads it" in done.stderr
    assert 'quantisation by quant_method "hqq"' in " ".join(shown.split())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With org/model of two revisions that share their weights, and org/broken, whose download broke off."""
    repository = tmp_path / "models--org--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "weights").write_bytes(b"w" * 100)
    (repository / "blobs" / "new").write_bytes(b"n" * 10)
    for commit, blobs in (("a" * 40, {"model.safetensors": "weights"}), ("b" * 40, {"model.safetensors": "weights"})):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, blob in blobs.items():
            (snapshot / name).symlink_to(Path("../../blobs") / blob)
    (repository / "snapshots" / ("b" * 40) / "config.json").symlink_to("../../blobs/new")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    broken = tmp_path / "models--org--broken"
    (broken / "snapshots" / ("c" * 40)).mkdir(parents=True)
    (broken / "snapshots" / ("c" * 40) / "config.json").write_text("{}")
    (broken / "blobs").mkdir()
    (broken / "blobs" / "x.incomplete").write_bytes(b"half")
    monkeypatch.setattr(commands, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_revisions_and_downloads_that_broke_off_are_told_apart(cache: Path) -> None:
    found = {model.name: (model.nbytes, model.format, model.complete) for model in cached_models(cache)}
    assert found == {
        "org/broken@cccccccc": (2, "no weights", False),
        "org/model": (110, "safetensors", True),
        "org/model@aaaaaaaa": (100, "safetensors", True),
    }


def test_a_revision_is_removed_and_what_others_need_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "--yes", "org/model@main"]) == 0
    assert [model.name for model in cached_models(cache)] == ["org/broken@cccccccc", "org/model@aaaaaaaa"]
    assert {path.name for path in (cache / "models--org--model" / "blobs").iterdir()} == {"weights"}
    assert main(["rm", "--yes", "org/broken", "org/model"]) == 0
    assert list(cache.glob("models--*")) == []
    for name, sentence in (
        ("org/model", "the model org/model is not in the cache"),
        ("../../etc", "'../../etc' is not a hub id"),
        ("", "is not a hub id"),
    ):
        assert main(["rm", "--yes", name]) == 2
        assert sentence in capsys.readouterr().err


def test_facts_of_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(TINY_MODELS["llama"], tmp_path / "tiny")
    assert main(["show", str(tmp_path / "tiny"), "--json", "--context", "100", "--num-seqs", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["architecture"], facts["servable"], facts["problem"]) == ("LlamaForCausalLM", True, None)
    assert facts["parameters"] * 2 == facts["weight_bytes"]
    assert list(facts["stored"]) == ["float32"]
    config = TINY_MODELS["llama"].config
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim  # keys, values; 2 bytes
    assert facts["kv_bytes_per_token"] == per_token
    assert facts["memory_bytes"] == facts["weight_bytes"] + 300 * per_token
    assert (facts["tokenizer"], facts["chat_template"]) == (False, False)
    shutil.rmtree(tmp_path / "tiny")


def test_marks_in_brackets_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tekken(build(TINY_MODELS["mistral"], tmp_path / "tiny"), tekken_values())
    assert main(["show", str(tmp_path / "tiny")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reasoning", "[THINK]", "...", "[/THINK]"] in rows
    assert ["tool", "calls", "mistral"] in rows


def test_the_demonstration_model_is_shown_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert max(map(len, rows)) <= 80
    shown = {row[:15].strip(): row[15:].strip() for row in rows}
    assert shown["parameters"] == "3.74 M"
    assert shown["tool calls"] == "hermes"
    assert shown["can be served"] == "yes"


def test_weights_that_are_missing_are_the_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODELS["llama"].config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    assert main(["show", str(tmp_path), "--json"]) == 1
    assert "has its weights in pytorch_model.bin only, a pickle" in json.loads(capsys.readouterr().out)["problem"]
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert main(["show", str(tmp_path), "--json"]) == 1
    assert "is a Git LFS pointer" in json.loads(capsys.readouterr().out)["problem"]


def test_sizes_and_times_in_words() -> None:
    assert [size(number) for number in (0, 999, 1000, 1_523_000_000)] == ["0 B", "999 B", "1 kB", "1.52 GB"]
    assert [count(number) for number in (12, 260_000, 595_800_000, 8.03e9)] == ["12", "260 k", "596 M", "8.03 B"]
    assert [ago(seconds) for seconds in (5, 61, 7300, 86400 * 3, 86400 * 800)] == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "3 days ago",
        "2 years ago",
    ]
