"""The tensors of consolidated.safetensors. Neighbouring elements of a head rotate together.

Source: mistral-inference, transformer.py and rope.py.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.engine.models.registry import ARCHITECTURES

LAYER = "layers.{i}."

CONSOLIDATED = replace(
    ARCHITECTURES["MistralForCausalLM"],
    prefixes=("",),
    weights={
        "embedding": ("tok_embeddings",),
        "final_norm": ("norm",),
        "lm_head": ("output",),
        "attention_norm_before": (LAYER + "attention_norm",),
        "qkv": tuple(f"{LAYER}attention.w{part}" for part in "qkv"),
        "out": (LAYER + "attention.wo",),
        "mlp_norm_before": (LAYER + "ffn_norm",),
        "up": (LAYER + "feed_forward.w1", LAYER + "feed_forward.w3"),
        "down": (LAYER + "feed_forward.w2",),
    },
    rope_interleaved=True,
    classifier=None,
    ignored=(r"(vision_encoder|vision_language_adapter|pre_mm_projector_norm|patch_merger)\..*",),
)
