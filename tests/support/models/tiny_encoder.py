"""A tiny BertModel with random weights built from a seed, and a WordPiece vocabulary for it.

Needs NumPy and tests.support.models.tiny_models only, so that the script that makes the golden embeddings can run in an
environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.tiny_models import round_to_bfloat16, write_safetensors

Array = np.ndarray[Any, Any]

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "it", "was", "red", "small"]
PIECES = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz.,!?", *PIECES]
VOCAB = list(dict.fromkeys(VOCAB))
CLS, SEP = VOCAB.index("[CLS]"), VOCAB.index("[SEP]")
MAX_LENGTH = 64
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 48,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": MAX_LENGTH,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "type_vocab_size": 2,
    "vocab_size": len(VOCAB),
}
INPUT_LENGTHS = (1, 2, 7, 33, MAX_LENGTH)


def inputs() -> list[list[int]]:
    random = np.random.RandomState(5)
    return [random.randint(5, len(VOCAB), length).tolist() for length in INPUT_LENGTHS]


def tensors() -> dict[str, Array]:
    random = np.random.RandomState(17)  # its stream is frozen, unlike Generator's
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]

    def normal(*shape: int, std: float, mean: float = 0.0) -> Array:
        return round_to_bfloat16(random.standard_normal(shape) * std + mean)

    def norm(name: str) -> dict[str, Array]:
        return {f"{name}.weight": normal(hidden, std=0.25, mean=1.0), f"{name}.bias": normal(hidden, std=0.2)}

    def dense(name: str, rows: int, columns: int) -> dict[str, Array]:
        return {f"{name}.weight": normal(rows, columns, std=0.17), f"{name}.bias": normal(rows, std=0.3)}

    found = {
        "embeddings.word_embeddings.weight": normal(len(VOCAB), hidden, std=0.8),
        "embeddings.position_embeddings.weight": normal(MAX_LENGTH, hidden, std=0.5),
        "embeddings.token_type_embeddings.weight": normal(2, hidden, std=0.5),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            found |= dense(f"{at}attention.self.{part}", hidden, hidden)
        found |= dense(f"{at}attention.output.dense", hidden, hidden) | norm(f"{at}attention.output.LayerNorm")
        found |= dense(f"{at}intermediate.dense", inner, hidden)
        found |= dense(f"{at}output.dense", hidden, inner) | norm(f"{at}output.LayerNorm")
    return found | dense("pooler.dense", hidden, hidden)


def build_encoder(folder: Path, prefix: str = "", **config: Any) -> Path:
    """Write the model's folder without a tokenizer; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}, indent=1))
    write_safetensors(folder / "model.safetensors", {prefix + name: tensor for name, tensor in tensors().items()})
    return folder


def write_pooling(folder: Path, *modes: str, normalize: bool = True, steps: tuple[str, ...] = ()) -> None:
    """The files of sentence-transformers; `modes` are the keys of 1_Pooling/config.json that are true."""
    kinds = ["Transformer", "Pooling", *steps, *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    every = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    config = {f"pooling_mode_{mode}": mode in modes for mode in every}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **config}))
