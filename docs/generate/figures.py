"""Tables of measured figures, from the files in `docs/figures`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from docs.generate.paths import FIGURES

Row = dict[str, Any]
MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "llama-8b": "Llama-3.1-8B"}
README_STREAMS = (1, 16, 64, 256)


@cache
def serving() -> dict[str, Any]:
    """Figures over HTTP, by part; rows are objects with the names of `tessera bench --output`."""
    return _read("serving.json")


@cache
def other_loads() -> dict[str, Any]:
    """Loads of further models and formats, by part; a part's label names them."""
    return _read("models.json")


@cache
def kernels() -> dict[str, Any]:
    """Figures of kernels, by table; rows are lists, a list in a cell is (ours, further figures)."""
    return _read("kernels.json")


@cache
def quantisation() -> dict[str, Any]:
    """Tables of quality by quantisation, as `tests.evaluation.quantisation` writes them; a list in a cell is a pair."""
    return _read("quantisation.json")


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FIGURES / name).read_text())
    return content


def number(value: float | None) -> str:
    """As measured: integers with separators, floats with the digits that the JSON has."""
    if value is None:
        return ""
    return f"{value:,}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """Columns from `numbers_from` on are aligned to the right."""
    rule = ["---"] * numbers_from + ["---:"] * (len(columns) - numbers_from)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def source(part: dict[str, Any]) -> str:
    """The line below a table: command, commit, date and device."""
    dtype = f", {part['dtype']}" if part.get("dtype") else ""
    beside = f"; {part['reference']} on the same kind of machine" if part.get("reference") else ""
    return f"*`{part['command']}`, commit {part['commit']}, {part['date']}, {part['device']}{dtype}{beside}.*"


def with_source(table: str, part: dict[str, Any]) -> str:
    note = f"{part['note']} " if part.get("note") else ""
    return f"{table}\n\n{note}{source(part)}"


# -- serving ----------------------------------------------------------------------------------------


def load(model: str, concurrency: int, *, input_len: int | None = None, stream: bool = True) -> Row:
    """The one row of `loads` that these select."""
    (row,) = (
        row
        for row in serving()["loads"]["rows"]
        if (row["model"], row["concurrency"], row["stream"]) == (model, concurrency, stream)
        and (row["input_len"] == input_len if input_len else row["output_len"] > 2)
    )
    found: Row = row
    return found


def readme_table() -> str:
    """Throughput, first token and start, beside the reference server."""
    columns = ["", *(cell for model in MODELS.values() for cell in (model, "vLLM"))]
    rows = []
    for streams in README_STREAMS:
        cells = [f"tokens/s, {streams} stream{'s' if streams > 1 else ''}"]
        for model in MODELS:
            row = load(model, streams)
            cells += [f"**{number(row['output_throughput'])}**", number(row.get("vllm_throughput"))]
        rows.append(cells)
    cells = ["first token of an 8,000-token prompt, ms"]
    for model in MODELS:
        row = load(model, 1, input_len=8000)
        cells += [f"**{number(row['median_ttft_ms'])}**", number(row.get("vllm_ttft_ms"))]
    rows.append(cells)
    starts = {row["model"]: row for row in serving()["start"]["rows"] if row["cached"]}
    cells = ["command to first token, s"]
    for model in MODELS:
        start = starts.get(model, {})
        ours = start.get("first_token_s")
        cells += [f"**{number(ours)}**" if ours else "", number(start.get("vllm_first_token_s"))]
    rows.append(cells)
    part = serving()["loads"]
    return (
        f"{markdown_table(columns, rows)}\n\n*{part['device']}, {part['dtype']}, {part['date']}, {part['reference']}.*"
    )


def loads_table() -> str:
    columns = ["model", "streams", "in / out", "tokens/s", "vLLM", "TTFT ms", "vLLM", "TPOT ms", "median / P99 ITL ms"]
    rows = []
    for row in serving()["loads"]["rows"]:
        rows.append(
            [
                MODELS[row["model"]],
                f"{row['concurrency']}{'' if row['stream'] else ', not streamed'}",
                f"{row['input_len']:,} / {row['output_len']}",
                number(row.get("output_throughput")),
                number(row.get("vllm_throughput")),
                number(row.get("median_ttft_ms")),
                number(row.get("vllm_ttft_ms")),
                number(row.get("median_tpot_ms")),
                _itl(row),
            ]
        )
    return with_source(markdown_table(columns, rows), serving()["loads"])


def _itl(row: Row) -> str:
    if row.get("median_itl_ms") is None:
        return ""
    return f"{number(row['median_itl_ms'])} / {number(row['p99_itl_ms'])}"


def other_loads_table() -> str:
    """All parts of `models.json`, below each other; the commands are below the table, in its order."""
    columns = ["", "streams", "in / out", "tokens/s", "TTFT ms", "TPOT ms", "median / P99 ITL ms", "of the floor, %"]
    rows = []
    for part in other_loads().values():
        for row in part["rows"]:
            if row["stream"]:
                throughput = number(row["output_throughput"]) if row["output_len"] > 2 else ""
                lengths = f"{row['input_len']:,} / {row['output_len']}"
                times = [number(row["median_ttft_ms"]), number(row["median_tpot_ms"]), _itl(row)]
                share = number(round(100 * row["weight_read_share"]))
                rows.append([part["label"], str(row["concurrency"]), lengths, throughput, *times, share])
    sources = "\n".join(f"- {part['label']}: {source(part)}" for part in other_loads().values())
    return f"{markdown_table(columns, rows)}\n\n{sources}"


def rows_table(part: str, columns: dict[str, str]) -> str:
    """`columns`: key of a row's object -> heading."""
    rows = []
    for row in serving()[part]["rows"]:
        rows.append([MODELS.get(row.get(key), _plain(row.get(key))) for key in columns])
    return with_source(markdown_table(list(columns.values()), rows), serving()[part])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else number(value)


# -- kernels ----------------------------------------------------------------------------------------


def kernel_table(name: str) -> str:
    table = kernels()[name]
    text_columns = sum(isinstance(cell, str) for cell in table["rows"][0])
    rows = [[_cell(cell) for cell in row] for row in table["rows"]]
    return with_source(markdown_table(table["columns"], rows, max(text_columns, 1)), table)


def quality_table() -> str:
    """One for each model, below each other."""
    tables = []
    for part in quantisation().values():
        rows = [[name, *map(_quality, cells)] for name, *cells in part["rows"]]
        tables.append(with_source(markdown_table(part["columns"], rows), part))
    return "\n\n".join(tables)


def _quality(cell: Any) -> str:
    if isinstance(cell, list):
        return ", ".join(map(number, cell))
    return "-" if cell is None else number(cell)


def _cell(cell: Any) -> str:
    """The last figure of several is the reference, in brackets; names stay on one line."""
    if isinstance(cell, str):
        return cell.replace(" ", "&nbsp;")
    if isinstance(cell, list):
        *own, reference = cell
        return ", ".join(map(number, own)) + (f" ({number(reference)})" if reference is not None else "")
    return _plain(cell)


STREAM_COLUMNS = {
    "model": "model",
    "concurrency": "streams",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT ms",
    "median_itl_ms": "median ITL ms",
    "p99_itl_ms": "P99 ITL ms",
}
TABLES: dict[str, Callable[[], str]] = {
    "readme": readme_table,
    "loads": loads_table,
    "streams": partial(rows_table, "streams", STREAM_COLUMNS),
    "prompts": partial(
        rows_table,
        "prompts",
        {
            "model": "model",
            "input_len": "prompt tokens",
            "median_ttft_ms": "TTFT ms",
            "median_itl_ms": "median ITL ms",
        },
    ),
    "start": partial(
        rows_table,
        "start",
        {
            "model": "model",
            "cached": "kernels cached",
            "first_token_s": "seconds to the first token",
            "vllm_first_token_s": "vLLM",
        },
    ),
    "other_loads": other_loads_table,
    "gguf": partial(
        rows_table,
        "gguf",
        {
            "concurrency": "streams",
            "input_len": "prompt tokens",
            "output_throughput": "tokens/s",
            "llamacpp_throughput": "llama.cpp",
            "median_ttft_ms": "TTFT ms",
            "llamacpp_ttft_ms": "llama.cpp",
            "median_tpot_ms": "TPOT ms",
            "p99_itl_ms": "P99 ITL ms",
            "percent_of_floor": "of the floor, %",
        },
    ),
    "interference": partial(
        rows_table,
        "interference",
        {
            "model": "model",
            "median_itl_ms": "median ITL ms",
            "p99_itl_ms": "P99 ITL ms",
            "ratio": "P99 / median",
            "long_prompt_ttft_ms": "TTFT of the long prompt, ms",
        },
    ),
    "quantisation": quality_table,
    "builtin": partial(
        rows_table,
        "builtin",
        {
            "skill": "skill",
            "exact_percent": "exact match, %",
            "phrasings_percent": "in held-out phrasings, %",
        },
    ),
    "cpu_streams": partial(
        rows_table,
        "cpu_streams",
        {
            "concurrency": "streams",
            "max_num_seqs": "`--max-num-seqs`",
            "output_throughput": "tokens/s",
            "median_ttft_ms": "median TTFT ms",
            "median_itl_ms": "median ITL ms",
            "p99_itl_ms": "P99 ITL ms",
        },
    ),
    "client": partial(
        rows_table,
        "client",
        {
            "streams": "streams",
            "mean_ttft_percent": "mean TTFT, %",
            "mean_tpot_percent": "mean TPOT, %",
            "p99_itl_percent": "P99 ITL, %",
            "median_e2el_percent": "median E2EL, %",
            "throughput_percent": "throughput, %",
        },
    ),
    **{f"kernel-{name}": partial(kernel_table, name) for name in kernels()},
}
