"""What GGUF says of an architecture in words of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

LAYER = "blk.{i}."

# Tensor names without `.weight` and `.bias`, or with it where the other name has none; `{i}` is the layer.
Names = dict[str, str]

GRANITE_MULTIPLIERS: Names = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """One value of general.architecture.

    Attributes:
        name: of the architecture in config.json.
        names: GGUF's tensor names to those of a Hugging Face checkpoint.
        interleaved: rows of queries and keys are stored for RoPE of neighbouring elements instead of halves.
        parted_for_images: they are stored for RoPE of halves where the file has one of images.
        ignored: tensors that no forward pass takes.
        multipliers: keys of numbers, to those of config.json.
        norm_topk_prob: of mixtures whose file does not say whether the experts' weights are divided by their sum.
        second_norm: names of a file whose attention has a norm of its own, `attn_norm_2`, where others have one for
            both halves.
    """

    name: str
    model_type: str
    names: Names
    interleaved: bool = False
    parted_for_images: bool = False
    ignored: tuple[str, ...] = ("rope_freqs", "rope_factors_long", "rope_factors_short")
    multipliers: Names = field(default_factory=lambda: GRANITE_MULTIPLIERS)
    norm_topk_prob: bool = False
    second_norm: Names = field(default_factory=dict)


def of_layers(prefix: str, names: Names) -> Names:
    return {LAYER + ours: prefix + theirs for ours, theirs in names.items()}


LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **of_layers(
        "model.layers.{i}.",
        {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
