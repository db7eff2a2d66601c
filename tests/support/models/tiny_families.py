"""Tiny models of the families beside Llama's: configurations as people have them, and weights by the names and shapes
that the reference implementation gives them (tests/golden/family_tensors.json), filled from a seed.

Needs NumPy and tests.support.models.tiny_models only, so that the script that makes the golden logits can run in an
environment of its own.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.tiny_models import round_to_bfloat16, write_safetensors

Array = np.ndarray[Any, Any]
Shapes = dict[str, list[int]]

SHAPES_FILE = Path(__file__).resolve().parents[2] / "golden" / "family_tensors.json"
VOCAB, LENGTH, MAX_LEN = 64, 24, 64
POSITIONS = (0, 9, 16, LENGTH - 1)
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "nemotron")
# Models that transformers does not have, and those of it that they are equal to.
EQUALS = {"internlm2": "Llama", "baichuan": "Llama", "minicpm": "Granite", "mimo": "Qwen2"}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
GPTJ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "rotary_dim": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def like(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    found = {"architectures": [architecture], "model_type": model_type, **SIZES, **changes}
    return {key: value for key, value in found.items() if value is not ...}


def gptj(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **GPTJ, **changes}


GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15, "logits_scaling": 2.5}
FALCON: dict[str, Any] = {
    "intermediate_size": ...,
    "num_key_value_heads": ...,
    "alibi": False,
    "layer_norm_epsilon": 1e-5,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": like("GemmaForCausalLM", "gemma", hidden_act="gelu", head_dim=16, tie_word_embeddings=...),
    "gemma-heads": like(
        "GemmaForCausalLM",
        "gemma",
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "gemma2": like(
        "Gemma2ForCausalLM",
        "gemma2",
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=9,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=...,
    ),
    "gemma2-uncapped": like(
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=[FULL, SLIDING],
    ),
    "gemma3": like(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_theta=200.0,
        rope_local_base_freq=20.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        tie_word_embeddings=...,
    ),
    "gemma3-saved": like(
        "Gemma3ForCausalLM",
        "gemma3_text",
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=6,
        layer_types=[FULL, SLIDING],
        final_logit_softcapping=5.0,
        rope_theta=...,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
            SLIDING: {"rope_type": "default", "rope_theta": 30.0},
        },
    ),
    "qwen3-biases": like("Qwen3ForCausalLM", "qwen3", head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "granitemoehybrid": like(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **GRANITE,
        shared_intermediate_size=40,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=4,
        layer_types=["attention"] * 2,
        position_embedding_type="rope",
    ),
    "granitemoehybrid-nope": like(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **GRANITE,
        shared_intermediate_size=24,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=4,
        layer_types=["attention"] * 2,
        position_embedding_type="nope",
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo": like("OlmoForCausalLM", "olmo"),
    "olmo-tied": like("OlmoForCausalLM", "olmo", attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4),
    "olmo2": like("Olmo2ForCausalLM", "olmo2"),
    "olmo2-biases": like("Olmo2ForCausalLM", "olmo2", attention_bias=True, num_key_value_heads=4, rms_norm_eps=1e-4),
    "olmo3": like(
        "Olmo3ForCausalLM",
        "olmo3",
        num_hidden_layers=4,
        sliding_window=6,
        rope_theta=500000.0,
        rope_scaling=YARN,
    ),
    "olmo3-types": like(
        "Olmo3ForCausalLM", "olmo3", sliding_window=5, layer_types=[FULL, SLIDING], rope_theta=500000.0
    ),
    "glm": like("GlmForCausalLM", "glm", head_dim=16),
    "glm-whole": like("GlmForCausalLM", "glm", head_dim=8, partial_rotary_factor=1.0, attention_bias=False),
    "glm4": like("Glm4ForCausalLM", "glm4", head_dim=16),
    "glm4-whole": like("Glm4ForCausalLM", "glm4", head_dim=8, partial_rotary_factor=1.0, attention_bias=False),
    "cohere": like("CohereForCausalLM", "cohere", logit_scale=0.5, tie_word_embeddings=...),
    "cohere-norms": like(
        "CohereForCausalLM",
        "cohere",
        logit_scale=0.25,
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "cohere2": like(
        "Cohere2ForCausalLM",
        "cohere2",
        num_hidden_layers=3,
        logit_scale=0.5,
        sliding_window=6,
        sliding_window_pattern=3,
        tie_word_embeddings=...,
    ),
    "cohere2-types": like(
        "Cohere2ForCausalLM", "cohere2", logit_scale=2.0, sliding_window=4, layer_types=[FULL, SLIDING]
    ),
    "phi": like("PhiForCausalLM", "phi", num_key_value_heads=..., partial_rotary_factor=0.5),
    "phi-groups": like("PhiForCausalLM", "phi", hidden_act="gelu", hidden_size=48, partial_rotary_factor=1 / 3),
    "gpt-neox": like(
        "GPTNeoXForCausalLM", "gpt_neox", num_key_value_heads=..., rotary_pct=0.25, rotary_emb_base=50, rope_theta=...
    ),
    "gpt-neox-serial": like(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        num_key_value_heads=...,
        use_parallel_residual=False,
        attention_bias=False,
        rope_theta=...,
        rope_parameters={"rope_type": "default", "rope_theta": 40.0, "partial_rotary_factor": 0.5},
    ),
    "falcon-7b": like("FalconForCausalLM", "falcon", **FALCON, multi_query=True, num_kv_heads=4, bias=False),
    "falcon-40b": like(
        "FalconForCausalLM",
        "falcon",
        **{**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon-11b": like(
        "FalconForCausalLM",
        "falcon",
        **FALCON,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=48,
    ),
    "falcon-serial": like("FalconForCausalLM", "falcon", **FALCON, multi_query=False, parallel_attn=False, bias=True),
    "stablelm-norms": like(
        "StableLmForCausalLM",
        "stablelm",
        use_qkv_bias=False,
        qk_layernorm=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.5,
    ),
    "gptj": gptj("GPTJForCausalLM", "gptj"),
    "gptj-inner": gptj("GPTJForCausalLM", "gptj", n_inner=40, rotary_dim=8, activation_function="gelu_fast"),
    "codegen": gptj("CodeGenForCausalLM", "codegen"),
    "codegen-inner": gptj("CodeGenForCausalLM", "codegen", n_inner=40, n_head=8, rotary_dim=2, n_embd=32),
    "gpt-bigcode": gptj("GPTBigCodeForCausalLM", "gpt_bigcode", tie_word_embeddings=True),
    "gpt-bigcode-heads": gptj("GPTBigCodeForCausalLM", "gpt_bigcode", multi_query=False, n_inner=40),
    "opt": like(
        "OPTForCausalLM", "opt", intermediate_size=..., ffn_dim=40, word_embed_proj_dim=32, tie_word_embeddings=True
    ),
    "opt-galactica": like(
        "OPTForCausalLM", "opt", intermediate_size=..., ffn_dim=48, activation_function="gelu", enable_bias=False
    ),
    "nemotron": like("NemotronForCausalLM", "nemotron", norm_eps=1e-5, partial_rotary_factor=0.5, head_dim=8),
    "nemotron-biases": like(
        "NemotronForCausalLM", "nemotron", attention_bias=True, mlp_bias=True, partial_rotary_factor=1.0, head_dim=16
    ),
    "arcee": like("ArceeForCausalLM", "arcee", rope_scaling=YARN),
    "arcee-biases": like("ArceeForCausalLM", "arcee", attention_bias=True, mlp_bias=True, head_dim=16),
    "ernie4-5": like("Ernie4_5ForCausalLM", "ernie4_5", head_dim=16, tie_word_embeddings=...),
    "ernie4-5-biases": like("Ernie4_5ForCausalLM", "ernie4_5", head_dim=8, use_bias=True),
    "helium": like("HeliumForCausalLM", "helium", head_dim=8),
    "helium-biases": like("HeliumForCausalLM", "helium", head_dim=8, attention_bias=True, num_key_value_heads=4),
    "hunyuan": like("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", head_dim=8, attention_bias=True),
    "hunyuan-alpha": like(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        head_dim=16,
        tie_word_embeddings=True,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    "internlm3": like("InternLM3ForCausalLM", "internlm3", head_dim=16),
    "internlm3-biases": like("InternLM3ForCausalLM", "internlm3", attention_bias=True, mlp_bias=True, head_dim=8),
    # Not of transformers: their reference is a model of another name that they are equal to; see the script.
    "internlm2": like("InternLM2ForCausalLM", "internlm2", bias=False),
    "internlm2-biases": like("InternLM2ForCausalLM", "internlm2", bias=True, num_key_value_heads=1),
    "baichuan": like("BaichuanForCausalLM", "baichuan", num_key_value_heads=...),
    "baichuan2": like("BaichuanForCausalLM", "baichuan", vocab_size=125696, num_key_value_heads=..., hidden_size=8),
    "minicpm": like("MiniCPMForCausalLM", "minicpm", scale_emb=6, scale_depth=1.4, dim_model_base=8),
    "minicpm-tied": like(
        "MiniCPMForCausalLM", "minicpm", scale_emb=2, scale_depth=0.7, dim_model_base=16, tie_word_embeddings=...
    ),
    "mimo": like("MiMoForCausalLM", "mimo", head_dim=8, attention_bias=True, num_nextn_predict_layers=1),
    "mimo-window": like("MiMoForCausalLM", "mimo", use_sliding_window=True, sliding_window=6, max_window_layers=1),
}


def prompt() -> list[int]:
    token_ids: list[int] = np.random.RandomState(21).randint(3, VOCAB, LENGTH).tolist()
    return token_ids


@cache
def shapes() -> dict[str, Shapes]:
    """Of each model's tensors by name."""
    found: dict[str, Shapes] = json.loads(SHAPES_FILE.read_text())
    return found


def fill(name: str, tensors: Shapes, offset_norms: bool) -> dict[str, Array]:
    """Weights from a seed: norms near 1 (or 0, of those stored as an offset), biases, and matrices large enough for
    logits and attention far from uniform. All are exact in bfloat16."""
    random = np.random.RandomState(zlib.crc32(name.encode()))  # its stream is frozen, unlike Generator's
    found = {}
    for tensor, shape in tensors.items():
        is_norm = "norm" in tensor or "ln_" in tensor
        is_embedding = any(part in tensor for part in ("embed", "wte", "wpe"))
        if tensor.endswith("bias"):
            std, mean = 0.3, 0.0
        elif is_norm:
            std, mean = 0.25, float(not offset_norms)
        else:
            std, mean = 0.7 if is_embedding else 1.1 * shape[-1] ** -0.5, 0.0
        found[tensor] = round_to_bfloat16(random.standard_normal(shape) * std + mean)
    return found


def tensors(name: str) -> dict[str, Array]:
    return fill(name, shapes()[name], FAMILIES[name]["model_type"] in OFFSET_NORMS)


def build_family(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model's folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FAMILIES[name], **changes}, indent=1))
    write_safetensors(folder / "model.safetensors", tensors(name))
    return folder
