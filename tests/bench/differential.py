"""Models of every kind beside Hugging Face transformers on the same device: `python -m tests.bench.differential`.

transformers makes each model with random weights, in sizes that the kernels of large models take. In float32 the greedy
tokens of prompts of several lengths, all at once here and one by one there, must be the same. In bfloat16 the error of
all logits of a prompt, against those of transformers in float32, is set beside transformers' own. Each line is JSON,
the last one of all kinds. Needs PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.devices import select_device
from tessera.engine.tensor import bfloat16
from tests.support.decoder_harness import DecoderHarness
from tests.support.greedy import greedy_tokens

Array = np.ndarray[Any, Any]
DeviceName = Literal["cuda", "cpu"]

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ALL_HEADS = {"num_key_value_heads": 8}
EXPERTS = {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
# By transformers' `model_type`: what is particular to it, beside SIZES.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500_000.0},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 256},
    "phi3": {},
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 128, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 256, "query_pre_attn_scalar": 128, "tie_word_embeddings": True},
    "olmo2": ALL_HEADS,
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.09, "logits_scaling": 8.0},
    "glm4": {},
    "cohere2": {"sliding_window": 256, "tie_word_embeddings": True},
    "gpt_neox": ALL_HEADS,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "olmoe": {**ALL_HEADS, **EXPERTS, "intermediate_size": 512},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "intermediate_size": 1024},
}
PROMPTS = (5, 33, 200, 700)  # tokens
COMPARED = 200  # tokens of the prompt whose logits are compared
NUM_TOKENS = 48


class Theirs:
    """A model of transformers with random weights, saved in `folder`."""

    def __init__(self, kind: str, folder: Path, device: DeviceName, seed: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._torch = torch
        self._device = device
        torch.manual_seed(seed)
        torch.backends.cuda.matmul.allow_tf32 = False
        config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
        config._attn_implementation = "eager"
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in self._model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
                else:
                    weight += torch.randn_like(weight) * 0.1
        self._model.save_pretrained(folder)
        self._model.to(device)

    def tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy, after each prompt."""
        found = []
        for prompt in prompts:
            ids = self._torch.tensor([prompt], device=self._device)
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=[],
                pad_token_id=0,
            )
            found.append(out[0, len(prompt) :].tolist())
        return found

    def logits(self, prompt: list[int]) -> Array:
        """[T, V] float64."""
        with self._torch.no_grad():
            found = self._model(self._torch.tensor([prompt], device=self._device)).logits[0]
        return np.asarray(found.float().cpu().numpy(), np.float64)

    def to_bfloat16(self) -> None:
        self._model.to(self._torch.bfloat16)


def our_tokens(folder: Path, device: DeviceName, prompts: list[list[int]]) -> list[list[int]]:
    """The same, all prompts at once in one engine."""
    length = max(map(len, prompts)) + NUM_TOKENS
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        max_model_len=length,
        num_kv_blocks=len(prompts) * length // 16,
    )
    return greedy_tokens(config, [(prompt, NUM_TOKENS) for prompt in prompts])


def compare(kind: str, device: DeviceName, seed: int) -> dict[str, Any]:
    """Shares of equal tokens, and relative errors (root mean square) of logits in bfloat16."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, SIZES["vocab_size"], count).tolist() for count in PROMPTS]
    compared = rng.integers(3, SIZES["vocab_size"], COMPARED).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs = Theirs(kind, folder, device, seed)
        tokens, exact = theirs.tokens(prompts), theirs.logits(compared)
        theirs.to_bfloat16()
        their_error = error_of(theirs.logits(compared), exact)
        del theirs
        gc.collect()
        ours = our_tokens(folder, device, prompts)
        gc.collect()
        ops = make_ops(select_device(device)[0])
        harness = DecoderHarness.of(folder, ops, bfloat16, max_model_len=COMPARED, block_size=16)
        our_error = error_of(harness.logits(compared).astype(np.float64), exact)
    equal = [a == b for one, other in zip(ours, tokens, strict=True) for a, b in zip(one, other, strict=True)]
    return {
        "kind": kind,
        "equal": sum(equal) / len(equal),
        "our_error": our_error,
        "their_error": their_error,
        "ratio": our_error / their_error,
    }


def error_of(found: Array, exact: Array) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.differential", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    logging.disable(logging.WARNING)
    rows = []
    for kind in given.kinds:
        rows.append(compare(kind, given.device, given.seed))
        print(json.dumps(rows[-1]), flush=True)
        gc.collect()
    ratios = [row["ratio"] for row in rows]
    found = {
        "kinds": len(rows),
        "with_equal_tokens": sum(row["equal"] == 1 for row in rows),
        "median_ratio": statistics.median(ratios),
        "worst_ratio": max(ratios),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
