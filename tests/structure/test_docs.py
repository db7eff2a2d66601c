"""The documentation says what is there: figures, links, paths, options, metrics, fields; and the site builds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from docs.generate.__main__ import generated_files, outdated
from docs.generate.api import undescribed_fields
from docs.generate.blocks import BLOCK, BLOCKS, markdown_files
from docs.generate.field_notes import NOTES
from docs.generate.figures import number, serving
from docs.generate.options import options_page
from docs.generate.record import dumps, record
from docs.generate.request_path import STAGES
from docs.generate.rooms import rooms_page
from docs.generate.sizing import GPUS, SIZED_MODELS, kv_bytes_per_token, most_tokens_per_second
from tessera.app.cli.reference import render_page
from tessera.engine.formats.kv import KVFormat
from tessera.engine.models.config import load_config
from tessera.engine.models.kv_cache import block_bytes
from tessera.engine.models.registry import ARCHITECTURES
from tests.structure.floors import FLOORS
from tests.support.paths import ROOT
from tests.support.servers.server_fixture import Server

README = ROOT / "README.md"
PROJECT_FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
OTHER_FILES = ("engine/builtin/README.md", "tests/faults/README.md")
PAGES = sorted({*markdown_files(), *(ROOT / name for name in (*PROJECT_FILES, *OTHER_FILES))})
GENERATED_PAGES = re.compile(r"^(\.\./)*(api/\w+|operating/options|architecture/rooms|options|rooms|\w+)\.md$")
MAX_README_LINES = 200

FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
REPOSITORY_PATH = re.compile(r"`((?:app|engine|cuda_src|loadtest|tests|docs|deploy|tessera|\.ci)/[\w./*-]+)")
MAKE_TARGET = re.compile(r"`make ([a-z-]+)|^\s*make ([a-z-]+)", re.MULTILINE)
OTHER_PROGRAMS = (  # curl, openssl, certbot, useradd, systemctl, kubectl, pip
    *("--cacert", "--cert", "--key", "--unix-socket", "--deploy-hook", "--system", "--home-dir", "--shell", "--now"),
    *("--property", "--value", "--from-file", "--no-compile"),
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links_of(text: str) -> Iterator[str]:
    for match in LINK.finditer(FENCE.sub("", text)):
        yield match[1] or match[2]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_generated_tables_and_pictures_are_up_to_date() -> None:
    stale = [name_of(path) for path in outdated(generated_files())]
    assert not stale, f"run `make docs`: {', '.join(stale)}"


def test_the_readmes_throughput_is_that_of_the_json() -> None:
    """Read again without the generator: every load's figure stands in the README."""
    text = README.read_text()
    for row in serving()["loads"]["rows"]:
        if row["output_len"] > 2 and row["stream"]:
            assert f"**{number(row['output_throughput'])}**" in text
            assert number(row["vllm_throughput"]) in text


def test_a_run_of_the_benchmark_replaces_its_part() -> None:
    part = json.loads(dumps(serving()))["loads"]
    measured = [{**row, "output_throughput": 1234.56, "ready_seconds": 3.0} for row in part["rows"]]
    record(part, measured, "abc1234", "another GPU", "2030-01-01")
    assert (part["commit"], part["device"], part["date"]) == ("abc1234", "another GPU", "2030-01-01")
    assert {row["output_throughput"] for row in part["rows"] if row["output_len"] > 2} == {1235}
    for row, before in zip(part["rows"], serving()["loads"]["rows"], strict=True):
        assert row.keys() == before.keys()
        assert row.get("vllm_throughput") == before.get("vllm_throughput")
    with pytest.raises(SystemExit, match="measure all of a part"):
        record(part, measured[1:], "abc1234", "another GPU", "2030-01-01")


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_blocks_are_known_and_closed(path: Path) -> None:
    text = path.read_text()
    begun = re.findall(r"<!-- begin: ([\w-]+) -->", text)
    assert begun == [match["name"] for match in BLOCK.finditer(text)]
    assert set(begun) <= set(BLOCKS)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in links_of(path.read_text()):
        target = link.partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            continue
        generated = path.is_relative_to(ROOT / "docs") and GENERATED_PAGES.match(target)
        # MkDocs checks links to generated pages in strict mode.
        assert generated or (path.parent / target).exists(), f"{name_of(path)} links to {link}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_paths_of_the_repository_exist(path: Path) -> None:
    for place in REPOSITORY_PATH.findall(path.read_text()):
        found = list(ROOT.glob(place.rstrip("/"))) if "*" in place else [ROOT / place]
        assert found, f"{name_of(path)} names {place}"
        assert all(each.exists() for each in found), f"{name_of(path)} names {place}"


def test_the_options_page_keeps_all_of_the_reference() -> None:
    words = re.compile(r"[\w$][\w.$/-]*")
    rows = [line for line in options_page().splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in rows} <= {1, 2}, "wider tables do not fit the page"
    assert set(words.findall(render_page())) - {"environment"} <= set(words.findall(options_page()))


def test_sizes_are_computed_as_the_engine_does() -> None:
    model = load_config(ROOT / "engine" / "builtin")
    spec = model.layers[0].attention
    computed = kv_bytes_per_token(len(model.layers), spec.num_kv_heads, spec.head_dim, item_bytes=4)
    assert 16 * computed == block_bytes(model, 16, KVFormat(np.dtype(np.float32)))
    llama, h200 = (next(each for each in SIZED_MODELS if each.name == "Llama-3.1-8B"), GPUS[-1])
    measured = [row for row in serving()["loads"]["rows"] if (row["model"], row["concurrency"]) == ("llama-8b", 1)]
    fastest = max(row.get("output_throughput", 0) for row in measured)
    assert 0.5 * most_tokens_per_second(llama, h200) < fastest < most_tokens_per_second(llama, h200)


def test_every_room_is_listed_with_its_purpose() -> None:
    listed = dict(re.findall(r"^\| `([\w.]+)` \| \d+ \| \d+ \| (.*) \|$", rooms_page(), re.MULTILINE))
    assert listed.keys() == {room for rooms in FLOORS for room in rooms}
    assert not [room for room, purpose in listed.items() if not purpose]


def test_the_request_path_names_what_is_there() -> None:
    for stage in STAGES:
        for place in stage.places:
            assert (ROOT / place).exists(), f"{stage.title}: {place}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for found in MAKE_TARGET.findall(path.read_text()) for name in found if name}
    assert named <= targets


@pytest.mark.parametrize("path", [README, *sorted((ROOT / "docs" / "operating").glob("*.md"))], ids=name_of)
def test_options_exist(path: Path) -> None:
    others = {
        "--profile",
        "--only",
        "--streams",
        "--tokens",
        *OTHER_PROGRAMS,
    }  # of Docker and of `python -m tests.bench`
    assert set(OPTION.findall(path.read_text())) <= set(OPTION.findall(render_page())) | others


def test_every_architecture_is_listed() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    missing = [name for name in ARCHITECTURES if f"`{name}`" not in text]
    assert not missing, f"docs/models.md does not list {', '.join(missing)}: run make docs"


def test_every_field_of_the_api_is_described_once() -> None:
    """By its schema, or else by a note."""
    undescribed = {field.partition(".")[2] for field in undescribed_fields()}
    assert undescribed == set(NOTES)


@pytest.mark.slow
def test_the_metrics_page_lists_what_the_server_has(builtin_server: Server) -> None:
    page = (ROOT / "docs" / "operating" / "monitoring.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    builtin_server.http.get("/v1/models")
    exposed = builtin_server.http.get("/metrics").text
    served = {match.removesuffix("_created") for match in re.findall(r"^# TYPE tessera:(\w+)", exposed, re.MULTILINE)}
    gpu = {name for name in listed if name.startswith("gpu_")}  # only where there is one
    assert listed - gpu == served - gpu


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    """In strict mode, which fails on a link or an anchor that leads nowhere."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    fetched = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"(https?:)?//|<link[^>]*href=\"(https?:)?//")
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not fetched.search(page.read_text()), f"{page} fetches from another host"
