"""`make eval-quantisation`: what quantised weights do to log-probabilities and to held-out cases, as a table.

Every scheme rounds to nearest. The demonstration model is scored on answers of held-out cases, of which one is right
where each of its tokens is the likeliest after those before it, as greedy decoding has it; stories260K, where --stories
names its folder, on texts of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

import tests.support.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tessera.engine.builtin.training.corpus import SKILLS, cases
from tessera.engine.builtin.training.render import FOLDER as BUILTIN
from tessera.engine.builtin.training.render import render
from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import WeightFormat, WeightPart
from tessera.engine.formats.format import Float32Array, TensorLayout
from tessera.engine.models.config import load_config
from tessera.engine.models.quantised.rounded import RoundingName
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.models.weights.safetensors import SafetensorsFile
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.support import quantisers
from tests.support.decoder_harness import DecoderHarness
from tests.support.op_cases import Array
from tests.support.quantisers import SCHEMES, Scheme, gptq_config, pack_tensors, packed_config, write_tensors

BLOCKS = {**SCHEMES["deepseek"].config, "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# By the name in the table: how a folder of it is made, or what is asked for at the start.
WAYS: dict[str, Scheme | RoundingName] = {
    "FP8 by row, activations by token": SCHEMES["fp8-channel"],
    "FP8 by tensor, activations by token": Scheme(PER_TENSOR, lambda w: quantisers.fp8(w, None)),
    "FP8 in blocks of 128 x 128, activations in 128": Scheme(
        BLOCKS, lambda w: quantisers.fp8(w, (128, 128), name="weight_scale_inv")
    ),
    "`--quantization fp8`": "fp8",
    "INT8 by row, activations by token": SCHEMES["w8a8"],
    "8 bits in groups of 128": Scheme(
        packed_config(8, 128, symmetric=True), lambda w: quantisers.compressed(w, 8, 128, symmetric=True)
    ),
    "GPTQ, 8 bits in rows": Scheme(gptq_config(8, -1), lambda w: quantisers.gptq(w, 8, -1, symmetric=True)),
    "4 bits in groups of 128": Scheme(
        packed_config(4, 128, symmetric=True), lambda w: quantisers.compressed(w, 4, 128, symmetric=True)
    ),
    "4 bits in groups of 32, with zeros": SCHEMES["w4a16-asymmetric"],
    "AWQ's form, groups of 64": Scheme({**SCHEMES["awq"].config, "group_size": 64}, lambda w: quantisers.awq(w, 64)),
    "GPTQ's form, groups of 32, order of activations": SCHEMES["gptq-actorder"],
    "NF4 in blocks of 64, quantised twice": Scheme(SCHEMES["nf4"].config, lambda w: quantisers.nf4(w, 64, nested=True)),
    "MLX, 4 bits in groups of 64": Scheme(
        {"group_size": 64, "bits": 4}, lambda w: quantisers.mlx(w, 4, 64), "quantization", embeddings=True
    ),
    "`--quantization int4`": "int4",
}
CONTEXT = 512


@dataclass(frozen=True)
class Dequantised(WeightFormat, abstract=True):
    """`values` [R, K] float32, and activations as `inner` takes them: a text does not dequantise weights again."""

    inner: WeightFormat

    name = "dequantised"
    tensor_names = ("values",)

    def layout(self, rows: int, columns: int) -> tuple[TensorLayout, ...]:
        return (TensorLayout((rows, columns), float32),)

    def dequantize(self, arrays: Mapping[str, Array], rows: slice | Array) -> Float32Array:
        found: Float32Array = arrays["values"][rows]
        return found

    def input_of(self, x: Float32Array) -> Float32Array:
        return self.inner.input_of(x)


def dequantised(part: WeightPart) -> WeightPart:
    arrays = {name: tensor.numpy() for name, tensor in part.tensors.items()}
    values = from_numpy(part.format.dequantize(arrays, slice(None)), CPU)
    return WeightPart(Dequantised(part.format), part.shape, {"values": values})


@dataclass(frozen=True)
class Text:
    """Tokens, those that are scored, and those that must be the likeliest for the case to be right."""

    token_ids: list[int]
    scored: Array  # bool [T - 1], of the token after each
    judged: Array


@dataclass(frozen=True)
class Scores:
    """Of a model: mean |difference| of log-probabilities, KL divergence in nats, bytes of weights, share right.

    `right` is None where no text is a case that is judged.
    """

    difference: float
    divergence: float
    nbytes: int
    right: float | None


def held_out(count: int) -> list[Text]:
    """Answers of `count` cases of each skill."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    found = []
    for skill in SKILLS:
        for case in cases(skill, seed=1, count=count):
            token_ids: list[int] = []
            spans: list[tuple[int, int]] = []
            for text, answer in render(case):
                piece = tokenizer.encode(text, add_special_tokens=False).ids
                if answer:
                    spans.append((len(token_ids), len(token_ids) + len(piece)))
                token_ids += piece
            scored, judged = np.zeros((2, len(token_ids)), bool)
            for start, stop in spans:
                scored[start:stop] = True
            judged[slice(*spans[-1])] = True
            if len(token_ids) <= CONTEXT:
                found.append(Text(token_ids, scored[1:], judged[1:]))
    return found


def stories(folder: Path) -> list[Text]:
    listed = json.loads((folder / "greedy_ref.json").read_text())["cases"]
    texts = [[*case["prompt_ids"], *case["greedy_ids"]][:CONTEXT] for case in listed]
    return [Text(ids, np.ones(len(ids) - 1, bool), np.zeros(len(ids) - 1, bool)) for ids in texts]


def log_probabilities(harness: DecoderHarness, text: Text) -> Array:
    """Of all tokens after each scored place, [n, V] float64."""
    logits = harness.logits(text.token_ids)[:-1][text.scored].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    result: Array = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def harness_of(folder: Path, quantization: RoundingName | None) -> tuple[DecoderHarness, int]:
    config, ops = load_config(folder), make_ops(CPU)
    if quantization is not None:
        config = rounded_while_loading(config, quantization, folder)
    weights = load_weights(folder, config, float32, ops)
    nbytes = weights.nbytes
    for weight in weights.linear_weights():
        object.__setattr__(weight, "parts", tuple(map(dequantised, weight.parts)))
    return DecoderHarness(config, weights, ops, float32, max_model_len=CONTEXT), nbytes


def quantised_folder(source: Path, target: Path, scheme: Scheme) -> Path:
    file = SafetensorsFile(source / "model.safetensors")
    tensors, _ = pack_tensors({name: file.tensor(name).astype(np.float32) for name in sorted(file.names)}, scheme)
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, scheme.key: scheme.config}))
    write_tensors(target / "model.safetensors", tensors)
    return target


def score(
    folder: Path, quantization: RoundingName | None, texts: list[Text], plain: list[Array] | None
) -> tuple[Scores, list[Array]]:
    harness, nbytes = harness_of(folder, quantization)
    difference = divergence = 0.0
    count = right = 0
    all_found = []
    for number, text in enumerate(texts):
        found = log_probabilities(harness, text)
        targets = np.array(text.token_ids[1:])[text.scored]
        judged = text.judged[text.scored]
        right += bool((found.argmax(axis=1) == targets)[judged].all())
        if plain is not None:
            exact = plain[number].astype(np.float64)
            rows = np.arange(len(targets))
            difference += float(np.abs(found[rows, targets] - exact[rows, targets]).sum())
            divergence += float((np.exp(exact) * (exact - found)).sum())
        else:
            all_found.append(found.astype(np.float32))
        count += len(targets)
    is_judged = any(text.judged.any() for text in texts)
    share = right / len(texts) if is_judged else None
    return Scores(difference / count, divergence / count, nbytes, share), all_found


Results: TypeAlias = dict[str, list[tuple[str, Scores | None]]]


def rows_of(source: Path, texts: list[Text], title: str) -> list[tuple[str, Scores | None]]:
    """Of the plain model and each way; None where the model's sizes do not fit it."""
    exact, plain = score(source, None, texts, None)
    found: list[tuple[str, Scores | None]] = [("float32", replace(exact, difference=0.0, divergence=0.0))]
    with tempfile.TemporaryDirectory() as work:
        for number, (name, way) in enumerate(track(WAYS.items(), title, console=Console(stderr=True))):
            try:
                if isinstance(way, Scheme):
                    folder = quantised_folder(source, Path(work) / str(number), way)
                    scores, _ = score(folder, None, texts, plain)
                else:
                    scores, _ = score(source, way, texts, plain)
                found.append((name, scores))
            except (ValueError, ModelError):
                found.append((name, None))
            print(*found[-1], file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.quantisation", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases a skill (%(default)s)")
    parser.add_argument("--stories", type=Path, help="folder of stories260K")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the figures as docs/figures/quantisation.json has them"
    )
    options = parser.parse_args()
    results: Results = {"demonstration model": rows_of(BUILTIN, held_out(options.count), "demonstration model")}
    if options.stories is not None:
        results["stories260K"] = rows_of(options.stories, stories(options.stories), "stories260K")
    for title, rows in results.items():
        table = Table(title=title)
        for column in ("weights", "KiB", "|difference|", "KL, nats", "right, %"):
            table.add_column(column, justify="left" if column == "weights" else "right")
        for name, scores in rows:
            cells = ("",) * 4
            if scores is not None:
                cells = (
                    f"{scores.nbytes / 1024:,.0f}",
                    f"{scores.difference:.4f}",
                    f"{scores.divergence:.5f}",
                    "" if scores.right is None else f"{100 * scores.right:.1f}",
                )
            table.add_row(name, *cells)
        Console(width=120).print(table)
    if options.output:
        command = f"python -m tests.evaluation.quantisation --count {options.count}"
        options.output.write_text(json.dumps({"quality": figures(results, command)}, indent=1) + "\n")
    return 0


def figures(results: Results, command: str) -> dict[str, Any]:
    """A part of `docs/figures/quantisation.json`."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), check=True, capture_output=True, text=True)
    head = {"date": date.today().isoformat(), "commit": commit.stdout.strip(), "device": "CPU, float32"}
    columns = ["weights"]
    is_judged = {title: found[0][1] is not None and found[0][1].right is not None for title, found in results.items()}
    for title in results:
        columns += [f"{title}: KiB", *(("right, %",) if is_judged[title] else ()), "difference, 0.001", "KL, 0.001"]
    rows: list[list[str | float | None]] = []
    for number, (name, _) in enumerate(next(iter(results.values()))):
        row: list[str | float | None] = [name]
        for title, found in results.items():
            scores = found[number][1]
            if scores is None:
                row += [None] * (3 + is_judged[title])
                continue
            row.append(round(scores.nbytes / 1024))
            if scores.right is not None:
                row.append(round(100 * scores.right, 1))
            row += [round(1000 * scores.difference, 1), round(1000 * scores.divergence, 2)]
        rows.append(row)
    return {**head, "command": command, "columns": columns, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
