"""Writes golden_logits.npz: what Hugging Face transformers computes for each tiny model.

Run from the project's root in an environment with torch and transformers (made with torch 2.13 and
transformers 5.23 on a CPU), in none that the project itself uses:

    python tests/golden/make_golden_logits.py

For each model: float32 logits of every fourth token of the prompt and the last, and the SHA-256 of
its config and weights, by which a test notices that a model was changed without making these anew.
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

from tests.support.models.tiny_models import PROMPT_LEN, TINY_MODELS, build, prompt

POSITIONS = sorted({*range(0, PROMPT_LEN, 4), PROMPT_LEN - 1})


def fingerprint(folder: Path) -> np.ndarray:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return np.frombuffer(digest.digest(), np.uint8)


def main() -> None:
    found = {"positions": np.array(POSITIONS)}
    for model in TINY_MODELS.values():
        with tempfile.TemporaryDirectory() as name:
            folder = build(model, Path(name))
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                keys = {key for key in info[kind] if "rotary" not in key}
                assert not keys, f"{model.name}: {kind}: {keys}"
            with torch.no_grad():
                logits = loaded.eval()(torch.tensor([prompt()])).logits[0].numpy()
            found[model.name] = logits[POSITIONS].astype(np.float32)
            found[f"{model.name}/sha256"] = fingerprint(folder)
            top = np.sort(torch.softmax(torch.tensor(logits), -1).numpy(), axis=-1)[:, -1]
            print(f"{model.name:22} max |logit| {abs(logits).max():6.2f}, mean top probability {top.mean():.2f}")
    np.savez_compressed(Path(__file__).with_name("golden_logits.npz"), **cast(Any, found))


if __name__ == "__main__":
    main()
