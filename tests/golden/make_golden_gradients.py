"""Writes golden_gradients.npz for test_trainable_decoder.py: what PyTorch computes when tiny models are trained.

Run from the project's root in an environment with torch and transformers (made with torch 2.13 and
transformers 5.23 on a CPU), in none that the project itself uses:

    python tests/golden/make_golden_gradients.py

For each model: the mean loss of the prompt's tokens after the first, and of every tensor's gradient the norm and
some elements. For one of them also the losses of a few steps of AdamW with clipped gradients.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.references.golden_gradients import ADAMW, MODELS, STEPS, TRAINED, places


def main() -> None:
    found: dict[str, Any] = {}
    ids = torch.tensor([prompt()])
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = build(TINY_MODELS[name], Path(folder))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found[f"{name}/loss"] = np.float32(loss.item())
        gradients = {tensor: parameter.grad.numpy() for tensor, parameter in model.named_parameters()}
        found[f"{name}/names"] = np.array(list(gradients))
        found[f"{name}/norms"] = np.array([np.linalg.norm(each) for each in gradients.values()], np.float32)
        some = [each.reshape(-1)[places(each.size)] for each in gradients.values()]
        found[f"{name}/some"] = np.array(some, np.float32)
        if name == TRAINED:
            found["losses"] = np.array(train(model, ids), np.float32)
        print(f"{name:22} loss {found[f'{name}/loss']:.4f}")
    target = Path(__file__).with_name("golden_gradients.npz")
    np.savez_compressed(target, **cast(Any, found))


def train(model: Any, ids: torch.Tensor) -> list[float]:
    settings = dict(ADAMW)
    clip, decay = settings.pop("max_gradient_norm"), settings.pop("weight_decay")
    betas = (settings.pop("beta1"), settings.pop("beta2"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=betas, **settings)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
