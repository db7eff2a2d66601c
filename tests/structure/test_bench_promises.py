"""The proof of figures: what it reads from benchmarks, and in which order and time it runs them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.bench import speculation
from tests.bench.promises.campaign import Campaign
from tests.bench.promises.figure import Figure, Result, line, load, pattern, quotient, start
from tests.bench.promises.parts import ALL_GPUS, BASE, OUTPUT, PARTS, WORKERS, Part
from tests.support.paths import ROOT


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def campaign(folder: Path, gpus: int = 1, seconds: float = 60, base: Path | None = None) -> Campaign:
    names = [str(number) for number in range(gpus)]
    return Campaign(folder, names, time.monotonic() + seconds, base, lambda text: None)


def test_a_load_is_found_by_its_streams_and_prompts(tmp_path: Path) -> None:
    rows = [
        {"concurrency": 1, "input_len": 128, "stream": True, "output_throughput": 480.5, "median_ttft_ms": 9},
        {"concurrency": 256, "input_len": 512, "stream": False, "output_throughput": 1, "median_ttft_ms": None},
        {"concurrency": 256, "input_len": 512, "stream": True, "output_throughput": 7809, "median_ttft_ms": 190},
        {"concurrency": 1, "input_len": 8000, "stream": True, "output_throughput": 9, "median_ttft_ms": 212},
    ]
    starts = [{"cached": False, "first_token_s": 9.0}, {"cached": True, "first_token_s": 2.5}]
    (tmp_path / "bench.json").write_text(json.dumps({"loads": rows, "start": starts}))
    result = Result.read(tmp_path / "log", tmp_path)
    assert load(1, input_len=128)(result) == 480.5
    assert load(256)(result) == 7809
    assert load(1, "median_ttft_ms", input_len=8000)(result) == 212
    assert start(cached=True)(result) == 2.5
    assert Figure("none", load(64)).of(result) is None


def test_lines_of_json_are_found_by_what_they_have(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'seed 1\n{"mode": "off", "tok/s": 200}\n{"mode": "on", "tok/s": 900}\n{"without": {"rate": 4}}\n'
        '{"with": {"rate": 9}}\n{"broken\n[1, 2]\n12 failed, 3,401 passed in 90 s\n'
    )
    result = Result.read(log, tmp_path)
    assert line("tok/s", mode="on")(result) == 900
    assert quotient(line("with", "rate"), line("without", "rate"))(result) == 2.25
    assert pattern(r"([\d,]+) passed")(result) == 3401
    assert pattern(r"(\d+) errors", missing=0)(result) == 0
    assert Figure("none", line("tok/s", mode="auto")).of(result) is None
    nothing = Result.read(tmp_path / "other", tmp_path)
    assert Figure("failed", pattern(r"(\d+) failed", missing=0)).of(nothing) is None


@pytest.mark.parametrize(
    ("at_least", "at_most", "value", "kept"),
    [(5, None, 5, True), (5, None, 4.9, False), (None, 5, 5, True), (None, 5, 5.1, False), (1, 5, 0, False)],
)
def test_bounds_are_kept_or_not(at_least: float | None, at_most: float | None, value: float, kept: bool) -> None:
    assert Figure("x", lambda result: 0.0, at_least, at_most).is_kept(value) is kept


def test_a_part_counts_only_if_it_ends_well_with_every_figure(tmp_path: Path) -> None:
    found = Figure("found", line("found"), at_least=3)
    parts = [
        Part("good", python("print('{\"found\": 3}')"), 5, (found,)),
        Part("low", python("print('{\"found\": 2}')"), 5, (found,)),
        Part("silent", python("pass"), 5, (found,)),
        Part("broken", python("print('{\"found\": 9}'); raise SystemExit(3)"), 5, (found,)),
    ]
    outcomes = campaign(tmp_path).run(parts)
    assert [(each.ended, each.values, each.is_kept) for each in outcomes] == [
        ("done", (3.0,), True),
        ("done", (2.0,), False),
        ("done", (None,), False),
        ("exit code 3", (9.0,), False),
    ]


def test_parts_of_one_gpu_share_the_gpus_and_others_have_the_machine_alone(tmp_path: Path) -> None:
    # Each part of one GPU waits until the other has begun, so they can only end if they run at the same time.
    code = (
        "import os, pathlib, time; here = pathlib.Path({folder!r})\n"
        "(here / os.environ['CUDA_VISIBLE_DEVICES']).touch()\n"
        "end = time.monotonic() + 20\n"
        "while len(list(here.iterdir())) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
        "print('{{\"seen\": %d}}' % len(list(here.iterdir())))"
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    seen = (Figure("seen", line("seen"), at_least=2),)
    visible = python("import json, os; print(json.dumps({'gpus': os.environ['CUDA_VISIBLE_DEVICES'].count(',') + 1}))")
    parts = [
        Part("one", python(code.format(folder=str(shared))), 30, seen),
        Part("other", python(code.format(folder=str(shared))), 30, seen),
        Part("alone", visible, 5, (Figure("gpus", line("gpus"), 1, 1),), alone=True),
        Part("both", visible, 5, (Figure("gpus", line("gpus"), 2, 2),), num_gpus=2),
    ]
    assert [each.is_kept for each in campaign(tmp_path / "out", gpus=2).run(parts)] == [True] * 4


def test_a_part_that_has_room_overtakes_one_that_has_none(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    # Two last until the last has run, which has room on the third GPU.
    until = (
        "import pathlib, sys, time\nend = time.monotonic() + 20\nfile = pathlib.Path(sys.argv[1])\n"
        "while not file.exists() and time.monotonic() < end: time.sleep(0.01)\nprint('{\"seen\": %d}' % file.exists())"
    )
    file, seen = str(tmp_path / "seen" / "last"), (Figure("seen", line("seen"), 1, 1),)
    parts = [
        Part("first", (*python(until), file), 30, seen),
        Part("beside it", (*python(until), file), 30, seen),
        Part("wide", python("pass"), 5, (), num_gpus=2),
        Part("last", (*python("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"), file), 5, ()),
    ]
    assert [each.is_kept for each in campaign(tmp_path / "out", gpus=3).run(parts)] == [True] * 4
    (tmp_path / "seen" / "last").unlink()
    parts[2] = Part("wide", python("pass"), 5, (), alone=True)
    beside = campaign(tmp_path / "beside", gpus=3)
    beside.side_by_side = True
    assert [each.is_kept for each in beside.run(parts)] == [True] * 4


def test_a_part_for_all_gpus_has_workers_for_each(tmp_path: Path) -> None:
    code = "import json, sys; print(json.dumps({'n': int(sys.argv[1])}))"
    all_of = Part("all", (*python(code), WORKERS), 5, (Figure("n", line("n"), 42, 42),), ALL_GPUS)
    one = Part("one", (*python(code), WORKERS), 5, (Figure("n", line("n"), 14, 14),))
    assert [each.is_kept for each in campaign(tmp_path, gpus=3).run([one, all_of, one])] == [True] * 3


def test_what_does_not_fit_is_left_out_and_what_hangs_is_ended(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    parts = [
        Part("long", python("pass"), 100, ()),
        Part("two", python("pass"), 1, (), num_gpus=2),
        Part("compared", (*python("pass"), BASE), 1, ()),
        Part("hangs", python(hangs), 0.5, ()),
        Part("folder", python(f"print({{}}, {OUTPUT!r})"), 5, ()),
    ]
    outcomes = campaign(tmp_path, seconds=30).run(parts)
    assert [each.ended.split(":")[0] for each in outcomes[:3]] == ["left out"] * 3
    assert outcomes[3].ended == "ended after 1 s"
    assert str(tmp_path / "folder") in (tmp_path / "folder" / "log").read_text()


def test_every_part_is_a_command_that_exists() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module = part.command[part.command.index("-m") + 1]
        if module != "pytest":
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for word in part.command:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert {"on", "off", "auto"} == set(speculation.MODES)
