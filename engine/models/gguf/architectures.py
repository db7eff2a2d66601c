"""GGUF's names of architectures, of their configuration and of their tensors, in Hugging Face's terms."""

from __future__ import annotations

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.metadata import Metadata
from tessera.engine.models.gguf.architecture import LLAMA_NAMES, GGUFArchitecture, of_layers
from tessera.engine.models.gguf.mixtures import GGUF_MIXTURES

PHI3_NAMES = {
    **LLAMA_NAMES,
    **of_layers("model.layers.{i}.", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
STARCODER2_NAMES = {
    **LLAMA_NAMES,
    **of_layers("model.layers.{i}.", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
SEED_OSS_NAMES = {
    **LLAMA_NAMES,
    **of_layers("model.layers.{i}.", {"post_attention_norm": "post_attention_layernorm"}),
}
EXAONE4_NAMES = {
    **SEED_OSS_NAMES,
    **of_layers("model.layers.{i}.", {"post_ffw_norm": "post_feedforward_layernorm"}),
}
GEMMA2_NAMES = {
    **LLAMA_NAMES,
    **of_layers(
        "model.layers.{i}.",
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
GLM_NAMES = {
    **LLAMA_NAMES,
    **of_layers("model.layers.{i}.", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
GLM4_NAMES = {
    **GLM_NAMES,
    **of_layers(
        "model.layers.{i}.",
        {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
}
HUNYUAN_NAMES = {
    **LLAMA_NAMES,
    **of_layers(
        "model.layers.{i}.", {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
}
PHI2_NAMES = {
    **LLAMA_NAMES,
    "output_norm": "model.final_layernorm",
    **of_layers(
        "model.layers.{i}.",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
}
INTERNLM2_NAMES = {
    "token_embd": "model.tok_embeddings",
    "output_norm": "model.norm",
    "output": "output",
    **of_layers(
        "model.layers.{i}.",
        {
            "attn_norm": "attention_norm",
            "attn_q": "attention.wq",
            "attn_k": "attention.wk",
            "attn_v": "attention.wv",
            "attn_output": "attention.wo",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
    ),
}
NEOX_NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    **of_layers(
        "gpt_neox.layers.{i}.",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
}
FALCON_NAMES = {
    "token_embd": "word_embeddings",
    "output_norm": "ln_f",
    "output": "lm_head",
    **of_layers(
        "h.{i}.",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
}
FALCON_SECOND_NORM = {**FALCON_NAMES, **of_layers("h.{i}.", {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})}
GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    **of_layers(
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
    **of_layers(
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
    "mistral3": GGUFArchitecture("MistralForCausalLM", "mistral", LLAMA_NAMES, interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES),
    "qwen2vl": GGUFArchitecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES),
    "qwen3vl": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", LLAMA_NAMES, interleaved=True),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", PHI3_NAMES),
    "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM", "starcoder2", STARCODER2_NAMES),
    "stablelm": GGUFArchitecture("StableLmForCausalLM", "stablelm", LLAMA_NAMES),
    "granite": GGUFArchitecture("GraniteForCausalLM", "granite", LLAMA_NAMES, interleaved=True),
    "seed_oss": GGUFArchitecture("SeedOssForCausalLM", "seed_oss", SEED_OSS_NAMES),
    "exaone4": GGUFArchitecture("Exaone4ForCausalLM", "exaone4", EXAONE4_NAMES),
    "gemma": GGUFArchitecture("GemmaForCausalLM", "gemma", LLAMA_NAMES),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", "gemma2", GEMMA2_NAMES),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", GEMMA2_NAMES),
    "olmo": GGUFArchitecture("OlmoForCausalLM", "olmo", LLAMA_NAMES, interleaved=True),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2", EXAONE4_NAMES),
    "chatglm": GGUFArchitecture("GlmForCausalLM", "glm", GLM_NAMES),
    "glm4": GGUFArchitecture("Glm4ForCausalLM", "glm4", GLM4_NAMES, parted_for_images=True),
    "command-r": GGUFArchitecture(
        "CohereForCausalLM", "cohere", LLAMA_NAMES, multipliers={"logit_scale": "logit_scale"}
    ),
    "cohere2": GGUFArchitecture(
        "Cohere2ForCausalLM", "cohere2", LLAMA_NAMES, multipliers={"logit_scale": "logit_scale"}
    ),
    "phi2": GGUFArchitecture("PhiForCausalLM", "phi", PHI2_NAMES),
    "gptneox": GGUFArchitecture("GPTNeoXForCausalLM", "gpt_neox", NEOX_NAMES),
    "falcon": GGUFArchitecture("FalconForCausalLM", "falcon", FALCON_NAMES, second_norm=FALCON_SECOND_NORM),
    "starcoder": GGUFArchitecture("GPTBigCodeForCausalLM", "gpt_bigcode", GPT2_NAMES),
    "internlm2": GGUFArchitecture("InternLM2ForCausalLM", "internlm2", INTERNLM2_NAMES, interleaved=True),
    "nemotron": GGUFArchitecture("NemotronForCausalLM", "nemotron", LLAMA_NAMES),
    "baichuan": GGUFArchitecture("BaichuanForCausalLM", "baichuan", LLAMA_NAMES, interleaved=True),
    "minicpm": GGUFArchitecture(
        "MiniCPMForCausalLM",
        "minicpm",
        LLAMA_NAMES,
        interleaved=True,
        multipliers={
            "embedding_scale": "scale_emb",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_divisor",
        },
    ),
    "arcee": GGUFArchitecture("ArceeForCausalLM", "arcee", LLAMA_NAMES, interleaved=True),
    "ernie4_5": GGUFArchitecture("Ernie4_5ForCausalLM", "ernie4_5", LLAMA_NAMES),
    "hunyuan-dense": GGUFArchitecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", HUNYUAN_NAMES),
    "gpt2": GGUFArchitecture("GPT2LMHeadModel", "gpt2", GPT2_NAMES),
    "bert": GGUFArchitecture("BertModel", "bert", BERT_NAMES, ignored=("cls", "cls.output", "pooler.dense")),
}


MIXTURE_KEY = "expert_count"


def gguf_architecture(metadata: Metadata) -> GGUFArchitecture:
    """Raises: ModelError naming the architecture and those supported."""
    name = metadata.string("general.architecture")
    is_mixture = metadata.integer(f"{name}.{MIXTURE_KEY}", 0, 2**31 - 1, 0) > 0
    known = GGUF_MIXTURES if is_mixture else GGUF_ARCHITECTURES
    if name not in known:
        kind = "mixtures of experts of the architecture" if is_mixture else "the architecture"
        raise ModelError(
            f"{metadata.path}: {kind} {name[:60]!r} {'are' if is_mixture else 'is'} not supported; supported in GGUF "
            f"are {', '.join(sorted(known))}"
        )
    return known[name]
