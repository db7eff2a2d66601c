"""GGUF's names of architectures, of their configuration and of their tensors, in Hugging Face's terms."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.metadata import Metadata

LAYER = "blk.{i}."

# Tensor names without `.weight` and `.bias`; `{i}` is the layer.
Names = dict[str, str]


@dataclass(frozen=True)
class GGUFArchitecture:
    """One value of general.architecture.

    Attributes:
        name: of the architecture in config.json.
        names: GGUF's tensor names to those of a Hugging Face checkpoint.
        interleaved: rows of queries and keys are stored for RoPE of neighbouring elements instead of halves.
        ignored: tensors that no forward pass takes.
    """

    name: str
    model_type: str
    names: Names
    interleaved: bool = False
    ignored: tuple[str, ...] = ("rope_freqs", "rope_factors_long", "rope_factors_short")


def _layer(prefix: str, names: Names) -> Names:
    return {LAYER + ours: prefix + theirs for ours, theirs in names.items()}


LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **_layer(
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
PHI3_NAMES = {
    **LLAMA_NAMES,
    **_layer("model.layers.{i}.", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
STARCODER2_NAMES = {
    **LLAMA_NAMES,
    **_layer("model.layers.{i}.", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
SEED_OSS_NAMES = {
    **LLAMA_NAMES,
    **_layer("model.layers.{i}.", {"post_attention_norm": "post_attention_layernorm"}),
}
EXAONE4_NAMES = {
    **SEED_OSS_NAMES,
    **_layer("model.layers.{i}.", {"post_ffw_norm": "post_feedforward_layernorm"}),
}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    **_layer(
        "h.{i}.",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
}
BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **_layer(
        "encoder.layer.{i}.",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
}

GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", LLAMA_NAMES, interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", LLAMA_NAMES, interleaved=True),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", PHI3_NAMES),
    "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM", "starcoder2", STARCODER2_NAMES),
    "stablelm": GGUFArchitecture("StableLmForCausalLM", "stablelm", LLAMA_NAMES),
    "granite": GGUFArchitecture("GraniteForCausalLM", "granite", LLAMA_NAMES, interleaved=True),
    "seed_oss": GGUFArchitecture("SeedOssForCausalLM", "seed_oss", SEED_OSS_NAMES),
    "exaone4": GGUFArchitecture("Exaone4ForCausalLM", "exaone4", EXAONE4_NAMES),
    "gpt2": GGUFArchitecture("GPT2LMHeadModel", "gpt2", GPT2_NAMES),
    "bert": GGUFArchitecture("BertModel", "bert", BERT_NAMES, ignored=("cls", "cls.output", "pooler.dense")),
}


def gguf_architecture(metadata: Metadata) -> GGUFArchitecture:
    """Raises: ModelError naming the architecture and those supported."""
    name = metadata.string("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ModelError(
            f"{metadata.path}: the architecture {name[:60]!r} is not supported; supported in GGUF are {supported}"
        )
    return GGUF_ARCHITECTURES[name]
