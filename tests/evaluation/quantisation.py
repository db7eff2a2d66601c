"""`make eval-quantisation`: what quantised weights do to log-probabilities and to held-out cases, as a table.

The demonstration model is scored on answers of held-out cases, of which one is right where each of its tokens is the
likeliest after those before it, as greedy decoding has it; stories260K, where --stories names its folder, on texts of
its own. All ways score the same cases, and are compared by those that only one of two has right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

import tests.support.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tessera.engine.builtin.training.conversation import Conversation, Split
from tessera.engine.builtin.training.corpus import cases, skills_of
from tessera.engine.builtin.training.render import FOLDER as BUILTIN
from tessera.engine.builtin.training.render import render
from tests.evaluation.forms import PLAIN, SIXTEEN_BITS, WAYS, Forms
from tests.evaluation.scoring import Pairs, Scores, Text, in_steps

COLUMNS = ("KiB", "difference, 0.001", "KL, 0.001")
CASE_COLUMNS = ("right, %", "only 16 bits / only this", "points from 16 bits, 95 %")
Cell: TypeAlias = "str | float | list[int] | list[float] | None"


def held_out(count: int, split: Split = "test") -> list[Text]:
    """Answers of `count` cases of each skill."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    chosen = [case for skill in skills_of(split) for case in cases(skill, seed=1, count=count, split=split)]
    return [_text(tokenizer, case) for case in chosen]


def _text(tokenizer: Tokenizer, case: Conversation) -> Text:
    token_ids: list[int] = []
    spans: list[slice] = []
    for text, is_answer in render(case):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        if is_answer:
            spans.append(slice(len(token_ids), len(token_ids) + len(piece)))
        token_ids += piece
    scored, judged = np.zeros((2, len(token_ids)), bool)
    for span in spans:
        scored[span] = True
    judged[spans[-1]] = True
    return Text(token_ids, scored[1:], judged[1:])


def stories(folder: Path) -> list[Text]:
    listed = json.loads((folder / "greedy_ref.json").read_text())["cases"]
    longest = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    texts = [[*case["prompt_ids"], *case["greedy_ids"]][:longest] for case in listed]
    return [Text(ids, np.ones(len(ids) - 1, bool), np.zeros(len(ids) - 1, bool)) for ids in texts]


class Row(NamedTuple):
    """A way's part of a table; `scores` are beside the plain form's, `pairs` are with 16 bits'."""

    scores: Scores
    pairs: Pairs | None
    nbytes: int


Rows: TypeAlias = "dict[str, Row | None]"


def rows_of(source: Path, texts: list[Text], title: str) -> Rows:
    """Of each way; None where the model's sizes do not fit it."""
    with tempfile.TemporaryDirectory() as work:
        forms = Forms(source, Path(work))
        loaded = {name: forms.load(way) for name, way in WAYS.items()}
    scores = {name: Scores() for name, found in loaded.items() if found is not None}
    for step in track(list(in_steps(texts)), title, console=Console(stderr=True)):
        plain: Any = None
        for name, found in loaded.items():
            if found is not None:
                logprobs = found.form.log_probabilities(step)
                plain = logprobs if name == PLAIN else plain
                scores[name].add(step, logprobs, plain)
    sixteen = scores[SIXTEEN_BITS].right
    return {
        name: found and Row(scores[name], Pairs.of(sixteen, scores[name].right) if sixteen else None, found.nbytes)
        for name, found in loaded.items()
    }


def cells_of(row: Row | None, *, judged: bool) -> list[Cell]:
    """Of `COLUMNS`, and of `CASE_COLUMNS` after the first where there are cases."""
    if row is None:
        return [None] * (len(COLUMNS) + judged * len(CASE_COLUMNS))
    size, *figures = (
        round(row.nbytes / 1024),
        round(1000 * row.scores.mean_difference, 1),
        round(1000 * row.scores.mean_divergence, 2),
    )
    if row.pairs is None or row.scores.share is None:
        return [size, *figures]
    points = [round(100 * bound, 2) for bound in row.pairs.interval()]
    return [size, round(100 * row.scores.share, 1), [row.pairs.lost, row.pairs.gained], points, *figures]


def columns_of(*, judged: bool) -> list[str]:
    return [COLUMNS[0], *(CASE_COLUMNS if judged else ()), *COLUMNS[1:]]


def part_of(title: str, rows: Rows, texts: list[Text], command: str) -> dict[str, Any]:
    """A part of `docs/figures/quantisation.json`."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), check=True, capture_output=True, text=True)
    judged = sum(bool(text.judged.any()) for text in texts)
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "device": "CPU, products in float32",
        "command": command,
        "cases": judged,
        "columns": [title, *columns_of(judged=judged > 0)],
        "rows": [[name, *cells_of(row, judged=judged > 0)] for name, row in rows.items()],
    }


def shown(cell: Cell) -> str:
    if isinstance(cell, list):
        return " / ".join(map(str, cell))
    return "" if cell is None else str(cell)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.quantisation", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases a skill (%(default)s)")
    parser.add_argument("--stories", type=Path, help="folder of stories260K")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write docs/figures/quantisation.json, or its like")
    options = parser.parse_args()
    models = {"demonstration model": (BUILTIN, held_out(options.count))}
    if options.stories is not None:
        models["stories260K"] = (options.stories, stories(options.stories))
    command = f"python -m tests.evaluation.quantisation --count {options.count}"
    parts = {}
    for title, (folder, texts) in models.items():
        part = parts[title] = part_of(title, rows_of(folder, texts, title), texts, command)
        table = Table(*part["columns"], title=f"{len(texts)} texts")
        for row in part["rows"]:
            table.add_row(*map(shown, row))
        Console(width=140).print(table)
        if options.output:
            options.output.write_text(json.dumps(parts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
