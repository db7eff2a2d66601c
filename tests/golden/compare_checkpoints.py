"""Compares what is computed from model folders, in the forms that people have them, with Hugging Face transformers.

    python -m tests.golden.compare_checkpoints PYTHON [--seed 1] [--count 300] [--keep FOLDER]

PYTHON is the interpreter of an environment as `make_checkpoint_cases` wants it. Prints the seed, a line for every case
that differs, and a table by form; the exit status is 1 where a case differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tessera.app.text.tokenizer import load_tokenizer
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ModelError
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.encoder import Encoder, EncoderBuffers
from tessera.engine.models.rope import device_tables
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.head import ClassifierHead
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.support.decoder_harness import DecoderHarness, int32, relative_error, scattered_blocks
from tests.support.greedy import greedy_tokens
from tests.support.paths import ROOT

Array = np.ndarray[Any, Any]
OPS = make_ops(CPU)
TOLERANCE = 1e-3
MAX_MODEL_LEN = 64  # the trained length, so that factors of RoPE are those of transformers; see 'lengths' for others
MAX_SECONDS = 3600


def computed(folder: Path, case: dict[str, Any]) -> Array:
    """Logits [T, V] or [1, labels], or token vectors [T, H] of a case without a head."""
    config, prompt = load_config(folder), case["prompt"]
    weights = load_weights(folder, config, float32, OPS)
    if config.is_encoder:
        hidden = encoded(config, weights, prompt, case["first_length"])
        return hidden if config.classifier is None else classified(config, weights, hidden)
    assert weights.has_head is not case["headless"], f"has_head is {weights.has_head}"
    windows = {layer.attention.sliding_window for layer in config.layers}
    assert windows <= {case["window"], None}, f"windows {windows}, not {case['window']}"
    harness = DecoderHarness(config, weights, OPS, float32, max_model_len=MAX_MODEL_LEN)
    if not case["headless"]:
        return harness.logits(prompt)
    token_ids, metadata, _ = harness.step_inputs(prompt, 0, scattered_blocks(harness.num_blocks))
    hidden = np.array(harness.decoder.hidden_states(token_ids, metadata, harness.buffers).numpy())
    return hidden if config.classifier is None else classified(config, weights, hidden)


def encoded(config: ModelConfig, weights: Weights, prompt: list[int], first_length: int) -> Array:
    """Token vectors [T, H] of a text, or of a pair whose first text has `first_length` tokens."""
    encoder = Encoder(config, weights, OPS, device_tables(config.ropes, MAX_MODEL_LEN, CPU))
    places = np.arange(len(prompt))
    types = np.minimum(places >= first_length, max(config.num_token_types - 1, 0))
    arrays = (prompt, places + config.first_position, types, [0, len(prompt)])
    token_ids, positions, token_types, cu_seqlens = (from_numpy(int32(array), CPU) for array in arrays)
    buffers = EncoderBuffers(config, float32, CPU, MAX_MODEL_LEN)
    hidden = encoder.forward(token_ids, positions, token_types, cu_seqlens, len(prompt), buffers)
    return np.array(hidden.numpy())


def classified(config: ModelConfig, weights: Weights, hidden: Array) -> Array:
    """Logits [1, labels] of the token vectors [T, H] of a text."""
    assert config.classifier is not None
    assert weights.classifier is not None
    pooled = {"cls": hidden[:1], "last": hidden[-1:], "mean": hidden.mean(axis=0, keepdims=True)}
    return ClassifierHead(config.classifier, weights.classifier).logits(pooled[config.classifier.pooling])


def completed(folder: Path, case: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of a case's requests, all at once in one engine."""
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=case["max_model_len"], block_size=8
    )
    return greedy_tokens(config, case["requests"])


def difference(folder: Path, case: dict[str, Any]) -> float:
    """Relative error; for a tokenizer the share of texts with other ids, for requests the share of other tokens."""
    if case["family"] == "lengths":
        pairs = zip(completed(folder / "model", case), case["tokens"], strict=True)
        equal = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
        return 1 - sum(equal) / len(equal)
    if case["family"] == "tokenizer":
        tokenizer = load_tokenizer(folder / "model")
        texts = json.loads((folder / "texts.json").read_text())
        wrong = [text for text, ids in texts if tokenizer.encode(text, add_special_tokens=False) != ids]
        case["wrong"] = wrong[:3]
        begun = tokenizer.encode("a", add_special_tokens=True)[:1] == tokenizer.encode(
            "<|endoftext|>", add_special_tokens=False
        )
        assert begun is case.get("bos", False), f"begins with BOS: {begun}"
        return len(wrong) / len(texts)
    with np.load(folder / "expected.npz") as expected:
        return relative_error(computed(folder / "model", case), expected["arr_0"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", help="interpreter with transformers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="an empty folder to leave the cases in")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count} cases")
    logging.disable(logging.WARNING)
    errors: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        out = options.keep or Path(name)
        script = ROOT / "tests" / "golden" / "make_checkpoint_cases.py"
        command = [options.python, str(script), str(out), str(options.seed), str(options.count)]
        subprocess.run(command, check=True, timeout=MAX_SECONDS)
        for folder in sorted(out.iterdir()):
            case = json.loads((folder / "case.json").read_text())
            try:
                error = difference(folder, case)
            except (ModelError, AssertionError) as failure:
                error = float("inf")
                print(f"{folder.name}: {failure}")
            errors[case["form"]].append(error)
            if error > TOLERANCE:
                print(f"{folder.name} differs by {error:.1e}: {json.dumps(case)}")
    for form, found in sorted(errors.items()):
        equal = sum(error <= TOLERANCE for error in found)
        print(f"{form:24} {equal} of {len(found)} equal, worst {max(found):.1e}")
    return int(any(error > TOLERANCE for found in errors.values() for error in found))


if __name__ == "__main__":
    sys.exit(main())
