"""Writes golden_scores.npz: what Hugging Face transformers computes of the tiny encoders.

Run from the project's root in an environment with torch and transformers (made with torch 2.13 and transformers 5.23
on a CPU):

    python tests/golden/make_golden_scores.py

Holds of each model, all float32: the token vectors [T, H] of the pair, and its logits [labels] where there is a head.
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

from tests.support.models.tiny_classifiers import TINY_CLASSIFIERS, build_classifier, pair


def fingerprint(folder: Path) -> np.ndarray:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return np.frombuffer(digest.digest(), np.uint8)


def main() -> None:
    found = {}
    token_ids, first_length = pair()
    with tempfile.TemporaryDirectory() as name:
        for family in TINY_CLASSIFIERS:
            folder = build_classifier(family, Path(name) / family)
            found[f"{family}/sha256"] = fingerprint(folder)
            has_head = bool(TINY_CLASSIFIERS[family].heads)
            loader = transformers.AutoModelForSequenceClassification if has_head else transformers.AutoModel
            model, info = loader.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not info["missing_keys"], info
            assert not info["mismatched_keys"], info
            assert not info["unexpected_keys"], info
            arguments = {"input_ids": torch.tensor([token_ids])}
            if family in ("bert", "nomic_bert"):
                types = [int(place >= first_length) for place in range(len(token_ids))]
                arguments["token_type_ids"] = torch.tensor([types])
            with torch.no_grad():
                if has_head:
                    found[f"{family}/logits"] = model.eval()(**arguments).logits[0].numpy()
                    print(family, found[f"{family}/logits"])
                found[f"{family}/vectors"] = model.eval().base_model(**arguments).last_hidden_state[0].numpy()
    np.savez_compressed(Path(__file__).with_name("golden_scores.npz"), **cast(Any, found))


if __name__ == "__main__":
    main()
