"""`python -m docs.generate.record BENCH.json --device NAME`: takes a run of `tests.bench` into the figures.

With `--as fp8 --label 'Llama-3.1-8B, FP8'` its loads become a part of `docs/figures/models.json`.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

from docs.generate.paths import FIGURES
from tests.support.checkout import current_commit

SHAPE = ("model", "concurrency", "input_len", "output_len", "stream", "cached", "streams")
PARTS = ("loads", "streams", "prompts", "start", "interference", "client")
SWEEP_PROMPT_OUTPUT = 16  # tokens out of the loads of a sweep that measure prompt lengths
SIGNIFICANT = 3
MODEL_FIGURES = (
    *("concurrency", "input_len", "output_len", "stream", "output_throughput", "median_ttft_ms", "median_tpot_ms"),
    *("median_itl_ms", "p99_itl_ms", "weight_read_share"),
)
NOT_STREAMED = MODEL_FIGURES[:5]  # what a load without streaming measures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.generate.record", description=__doc__)
    parser.add_argument("bench", type=Path, help="JSON of `python -m tests.bench`")
    parser.add_argument("--device", required=True, help="for instance 'NVIDIA H200'")
    parser.add_argument("--sweep", action="store_true", help="its loads are those of --sweep")
    parser.add_argument("--as", dest="part", help="part of models.json that the loads become")
    parser.add_argument("--label", help="of that part: the model and what is special about it")
    parser.add_argument("--command", help="of that part: what was run after `python -m tests.bench --only loads`")
    parser.add_argument("--commit", help="what was measured (default: the current one)")
    options = parser.parse_args()
    measured = json.loads(options.bench.read_text())
    commit = options.commit or current_commit()
    if options.part:
        record_model(options, measured["loads"], commit)
        return
    path = FIGURES / "serving.json"
    figures = json.loads(path.read_text())
    if options.sweep:
        loads = measured.pop("loads", [])
        measured["streams"] = [row for row in loads if row["output_len"] > SWEEP_PROMPT_OUTPUT]
        measured["prompts"] = [row for row in loads if row["output_len"] <= SWEEP_PROMPT_OUTPUT]
    for name in PARTS:
        if measured.get(name):
            record(figures[name], measured[name], commit, options.device, date.today().isoformat())
    path.write_text(dumps(figures))


def record_model(options: argparse.Namespace, loads: list[dict[str, Any]], commit: str) -> None:
    """Replace the part's figures, all measured in one run; what else it has (a reference's figures) stays."""
    path = FIGURES / "models.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    part = figures.setdefault(options.part, {})
    part.update(
        date=date.today().isoformat(),
        commit=commit,
        device=options.device,
        command=f"python -m tests.bench --only loads {options.command or ''}".rstrip(),
        label=options.label or part.get("label", options.part),
    )
    kept = {_shape(row, row): row for row in part.pop("rows", [])}
    part["rows"] = []
    for row in loads:
        names = MODEL_FIGURES if row["stream"] else NOT_STREAMED
        found = {key: row[key] if key in SHAPE else _rounded(row[key]) for key in names}
        earlier = kept.get(tuple(found.get(key) for key in SHAPE if key in found), {})
        part["rows"].append({**earlier, **found})
    path.write_text(dumps(figures))


def record(part: dict[str, Any], rows: list[dict[str, Any]], commit: str, device: str, day: str) -> None:
    """Replace the figures of every measured row and keep what only the part has (a reference server's figures).

    Raises: SystemExit if a row of the part was not measured, since one part has one commit and device.
    """
    by_shape = {_shape(row, part["rows"][0]): row for row in rows}
    missing = [row for row in part["rows"] if _shape(row, part["rows"][0]) not in by_shape]
    if missing:
        raise SystemExit(f"the run lacks {missing[0]}: measure all of a part at once")
    part.update(date=day, commit=commit, device=device)
    for row in part["rows"]:
        found = by_shape[_shape(row, part["rows"][0])]
        row.update({key: _rounded(found[key]) for key in row if key in found and key not in SHAPE})


def _shape(row: dict[str, Any], example: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in SHAPE if key in example)


def _rounded(value: Any) -> Any:
    """Three significant digits, integers from 100 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return round(value) if abs(value) >= 100 else float(f"{value:.{SIGNIFICANT}g}")


def dumps(figures: dict[str, Any]) -> str:
    """JSON with a row a line, for readable diffs."""
    parts = []
    for name, part in figures.items():
        head = json.dumps({key: value for key, value in part.items() if key != "rows"}, indent=1)[:-2]
        rows = ",\n".join(f"   {json.dumps(row)}" for row in part["rows"])
        indented = head.replace("\n", "\n ")
        parts.append(f' {json.dumps(name)}: {indented},\n  "rows": [\n{rows}\n  ]\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
