"""`make eval-quantisation`: what quantised weights do to log-probabilities and to held-out cases, as a table.

The demonstration model is scored on answers of held-out cases, of which one is right where each of its tokens is the
likeliest after those before it, as greedy decoding has it; stories260K, where --stories names its folder, on texts of
its own. All ways score the same cases, and are compared by those that only one of two has right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from tessera.engine.builtin.training.conversation import Conversation, Split
from tessera.engine.builtin.training.corpus import cases, skills_of
from tessera.engine.builtin.training.render import FOLDER as BUILTIN
from tessera.engine.builtin.training.render import render
from tests.evaluation.forms import PLAIN, PROMISED, SIXTEEN_BITS, WAYS, Forms, Loaded
from tests.evaluation.judge import SPLITS
from tests.evaluation.scoring import Pairs, Scores, Text, in_steps
from tests.support.checkout import current_commit

# Of a model with cases: how many only 16 bits, and only this way, has right; and the interval of the difference.
CASE_COLUMNS = ("cases", "right, %", "only 16 bits, only this", "points from 16 bits, 95 %")
Cell: TypeAlias = "str | float | list[int] | list[float] | None"


def held_out(count: int, split: Split, *, after: int = 0) -> list[Text]:
    """Answers of `count` cases of each skill, skill by skill in turn; those that come `after` so many others."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    of_skills = (cases(skill, seed=1, count=after + count, split=split)[after:] for skill in skills_of(split))
    return [_text(tokenizer, case) for turn in zip_longest(*of_skills) for case in turn if case is not None]


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


def rows_of(source: Path, texts: list[Text], further: list[Text], title: str, only: str) -> Rows:
    """Of each way whose name has `only` in it, and of the two that others are compared with: None where the model's
    sizes do not fit it. `further` texts are for those of `PROMISED` alone."""
    ways = {name: way for name, way in WAYS.items() if only in name or name in (PLAIN, SIXTEEN_BITS)}
    with tempfile.TemporaryDirectory() as work:
        forms = Forms(source, Path(work))
        loaded = {name: found for name, way in ways.items() if (found := forms.load(way)) is not None}
    scores = {name: Scores() for name in loaded}
    promised = [name for name in PROMISED if name in loaded]
    steps = [*((step, list(loaded)) for step in in_steps(texts)), *((step, promised) for step in in_steps(further))]
    for step, names in track(steps, title, console=Console(stderr=True)):
        plain = loaded[PLAIN].form.log_probabilities(step)
        for name in names:
            logprobs = plain if name == PLAIN else loaded[name].form.log_probabilities(step)
            scores[name].add(step, logprobs, plain)
    return {name: _row(scores[name], scores[SIXTEEN_BITS], loaded[name]) if name in loaded else None for name in ways}


def _row(scores: Scores, sixteen: Scores, loaded: Loaded) -> Row:
    pairs = Pairs.of(sixteen.right[: len(scores.right)], scores.right) if scores.right else None
    return Row(scores, pairs, loaded.nbytes)


def part_of(title: str, rows: Rows, command: str) -> dict[str, Any]:
    """A part of `docs/figures/quantisation.json`."""
    plain = rows[PLAIN]
    assert plain is not None
    columns = [title, "KiB", *(CASE_COLUMNS if plain.pairs else ()), "difference, 0.001", "KL, 0.001"]
    return {
        "date": date.today().isoformat(),
        "commit": current_commit(),
        "device": "CPU, products in float32",
        "command": command,
        "columns": columns,
        "rows": [[name, *(cells_of(row) if row else [None] * (len(columns) - 1))] for name, row in rows.items()],
    }


def cells_of(row: Row) -> list[Cell]:
    scores, pairs = row.scores, row.pairs
    cells: list[Cell] = [round(row.nbytes / 1024)]
    if pairs is not None:
        points = [round(100 * bound, 2) for bound in pairs.interval()]
        cells += [pairs.count, round(100 * scores.share, 1), [pairs.lost, pairs.gained], points]
    return [*cells, round(1000 * scores.mean_difference, 1), round(1000 * scores.mean_divergence, 2)]


def shown(cell: Cell) -> str:
    if isinstance(cell, list):
        return " / ".join(map(str, cell))
    return "" if cell is None else str(cell)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.quantisation", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="cases a skill (%(default)s)")
    parser.add_argument(
        "--further",
        type=int,
        default=150,
        help="more of them for 16 bits and FP8, whose distance is promised (%(default)s)",
    )
    parser.add_argument("--phrasings", choices=SPLITS, default="usual", help="how cases are asked for (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="ways whose name has it; the others are left out")
    parser.add_argument("--stories", type=Path, help="folder of stories260K")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write docs/figures/quantisation.json, or its like")
    options = parser.parse_args()
    split = SPLITS[options.phrasings]
    texts, further = held_out(options.count, split), held_out(options.further, split, after=options.count)
    models = {"demonstration model": (BUILTIN, texts, further)}
    if options.stories is not None:
        models["stories260K"] = (options.stories, stories(options.stories), [])
    command = f"python -m tests.evaluation.quantisation --count {options.count} --further {options.further}"
    command += f" --only {options.only}" if options.only else ""
    parts = {}
    for title, given in models.items():
        part = parts[title] = part_of(title, rows_of(*given, title, options.only), command)
        table = Table(*part["columns"])
        for row in part["rows"]:
            table.add_row(*map(shown, row))
        Console(width=140).print(table)
        if options.output:
            options.output.write_text(json.dumps(parts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
