"""The supported architectures as a table: how each one's config keys and weight names read.

There is one decoder forward; an entry here says only in what an architecture departs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tessera.engine.models.fields import Fields

MAX_WINDOW = 2**27

RopeRule = Callable[[Fields, int], tuple[bool, ...]]
WindowRule = Callable[[Fields, tuple[bool, ...]], tuple[int | None, ...]]

NormPlace = Literal["before", "after", "of_sum"]

# Modules whose `.weight` (and `.bias`) make up each fused weight, top to bottom; `{i}` is the layer.
WeightNames = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Architecture:
    """One entry of the table.

    Attributes:
        weights: modules that make up each fused weight (see `tessera.engine.models.weights.build`).
        prefixes: put before every name but the head's; the first that occurs in the folder counts.
        defaults: what config.json need not say, as Hugging Face transformers fills it in.
        keys: config keys that are called otherwise here.
        refused: config keys that must be false or absent, and what they would call for.
        norm: `layernorm` has a bias as well.
        norm_places: of the norms around each half of a layer, see `HalfNorms`.
        gated: the MLP multiplies a gate, activation(gate) * up; else it is activation(up).
        learned_positions: a table of position embeddings instead of RoPE.
        qk_norm: queries and keys pass an RMSNorm per head.
        qkv_bias, out_bias, mlp_bias: whether projections have one, or the config key that says so.
        parallel: whether attention and MLP both see the layer's input through one norm, or the config key that
            says so.
        embedding_multiplier, residual_multiplier, attention_multiplier, logits_divisor: config keys of numbers.
        transposed: projections are stored [in, out].
        encoder: tokens see the whole text, and there is no head: it makes embeddings, not text.
        rope_aliases: other names of rope types, to ours.
        rope_layers: which layers rotate queries and keys.
        windows: each layer's sliding window, None is full attention.
        ignored: patterns of tensors that are no weights (buffers that some savers left in).
    """

    weights: WeightNames
    prefixes: tuple[str, ...] = ("",)
    defaults: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_places: tuple[NormPlace, ...] = ("before",)
    gated: bool = True
    learned_positions: bool = False
    qk_norm: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    parallel: bool | str = False
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    logits_divisor: str | None = None
    transposed: bool = False
    encoder: bool = False
    rope_aliases: dict[str, str] = field(default_factory=dict)
    rope_layers: RopeRule = lambda config, num_layers: (True,) * num_layers
    windows: WindowRule = lambda config, rope_layers: (None,) * len(rope_layers)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)

    def key(self, name: str) -> str:
        return self.keys.get(name, name)


# -- rules ----------------------------------------------------------------------------------------


def _same_window(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    return (_window(config),) * len(rope_layers)


def _upper_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Layers from max_window_layers on, where use_sliding_window says so."""
    if not config.boolean("use_sliding_window"):
        return (None,) * len(rope_layers)
    first = config.integer("max_window_layers", 0, 2**31)
    return _by_layer_types(config, tuple(layer >= first for layer in range(len(rope_layers))))


def _unrotated_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Layers without RoPE, where use_sliding_window says so."""
    if not config.boolean("use_sliding_window"):
        return (None,) * len(rope_layers)
    return _by_layer_types(config, tuple(not rope for rope in rope_layers))


def _by_layer_types(config: Fields, sliding: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The window where `sliding`, or where config.json's layer_types says so."""
    if config.has("layer_types"):
        kinds = config.strings("layer_types", len(sliding))
        if not set(kinds) <= {"sliding_attention", "full_attention"}:
            config.refuse("layer_types", "a list of sliding_attention and full_attention")
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
    window = _window(config)
    return tuple(window if slides else None for slides in sliding)


def _window(config: Fields) -> int | None:
    return config.integer("sliding_window", 1, MAX_WINDOW) if config.has("sliding_window") else None


def _every_window(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """All layers unless layer_types says which."""
    return _by_layer_types(config, (True,) * len(rope_layers))


def _exaone4_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Layers with a window, or all where none has one."""
    windows = _exaone4_windows(config, (True,) * num_layers)
    return tuple(window is not None or not config.has("sliding_window") for window in windows)


def _exaone4_windows(config: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """All layers but every sliding_window_pattern-th, unless layer_types says which."""
    if not config.has("sliding_window"):
        return (None,) * len(rope_layers)
    pattern = config.integer("sliding_window_pattern", 1, 2**31)
    return _by_layer_types(config, tuple((layer + 1) % pattern != 0 for layer in range(len(rope_layers))))


def _listed_rope_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3's no_rope_layers: 1 rotates and 0 does not, whatever the name says."""
    if config.has("no_rope_layers"):
        listed = config.raw("no_rope_layers")
        if not isinstance(listed, list) or len(listed) < num_layers or not all(flag in (0, 1) for flag in listed):
            config.refuse("no_rope_layers", f"a list of at least {num_layers} zeros and ones")
        return tuple(map(bool, listed[:num_layers]))
    interval = config.integer("no_rope_layer_interval", 1, 2**31)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


# -- weight names ---------------------------------------------------------------------------------

LLAMA_LAYER = "model.layers.{i}."
LLAMA_WEIGHTS: WeightNames = {
    "embedding": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "lm_head": ("lm_head",),
    "attention_norm_before": (LLAMA_LAYER + "input_layernorm",),
    "qkv": tuple(LLAMA_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    "q_norm": (LLAMA_LAYER + "self_attn.q_norm",),
    "k_norm": (LLAMA_LAYER + "self_attn.k_norm",),
    "out": (LLAMA_LAYER + "self_attn.o_proj",),
    "mlp_norm_before": (LLAMA_LAYER + "post_attention_layernorm",),
    "up": tuple(LLAMA_LAYER + f"mlp.{part}_proj" for part in ("gate", "up")),
    "down": (LLAMA_LAYER + "mlp.down_proj",),
}
PHI3_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "qkv": (LLAMA_LAYER + "self_attn.qkv_proj",),
    "up": (LLAMA_LAYER + "mlp.gate_up_proj",),
}
STARCODER2_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "up": (LLAMA_LAYER + "mlp.c_fc",),
    "down": (LLAMA_LAYER + "mlp.c_proj",),
}
EXAONE4_WEIGHTS: WeightNames = {
    **LLAMA_WEIGHTS,
    "attention_norm_after": (LLAMA_LAYER + "post_attention_layernorm",),
    "mlp_norm_after": (LLAMA_LAYER + "post_feedforward_layernorm",),
}
GPT2_WEIGHTS: WeightNames = {
    "embedding": ("wte",),
    "position_embedding": ("wpe",),
    "final_norm": ("ln_f",),
    "lm_head": ("lm_head",),
    "attention_norm_before": ("h.{i}.ln_1",),
    "qkv": ("h.{i}.attn.c_attn",),
    "out": ("h.{i}.attn.c_proj",),
    "mlp_norm_before": ("h.{i}.ln_2",),
    "up": ("h.{i}.mlp.c_fc",),
    "down": ("h.{i}.mlp.c_proj",),
}

BERT_LAYER = "encoder.layer.{i}."
BERT_WEIGHTS: WeightNames = {
    "embedding": ("embeddings.word_embeddings",),
    "position_embedding": ("embeddings.position_embeddings",),
    "token_type_embedding": ("embeddings.token_type_embeddings",),
    "embedding_norm": ("embeddings.LayerNorm",),
    "qkv": tuple(BERT_LAYER + f"attention.self.{part}" for part in ("query", "key", "value")),
    "out": (BERT_LAYER + "attention.output.dense",),
    "attention_norm_of_sum": (BERT_LAYER + "attention.output.LayerNorm",),
    "up": (BERT_LAYER + "intermediate.dense",),
    "down": (BERT_LAYER + "output.dense",),
    "mlp_norm_of_sum": (BERT_LAYER + "output.LayerNorm",),
}

# -- the table ------------------------------------------------------------------------------------

LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 2048,
}
QWEN_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={**LLAMA_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2},
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        windows=_same_window,
    ),
    "Qwen2ForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults=QWEN_DEFAULTS,
        qkv_bias=True,
        windows=_upper_windows,
    ),
    "Qwen3ForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        qk_norm=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        windows=_upper_windows,
    ),
    "SmolLM3ForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        rope_layers=_listed_rope_layers,
        windows=_unrotated_windows,
    ),
    "Phi3ForCausalLM": Architecture(
        weights=PHI3_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        windows=_same_window,
    ),
    "MinistralForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        windows=_every_window,
    ),
    "SeedOssForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "Starcoder2ForCausalLM": Architecture(
        weights=STARCODER2_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        keys={"rms_norm_eps": "norm_epsilon"},
        norm="layernorm",
        gated=False,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        windows=_same_window,
    ),
    "StableLmForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        refused={"qk_layernorm": "norms of each head with weights of its own are not supported"},
        norm="layernorm",
        qkv_bias="use_qkv_bias",
        parallel="use_parallel_residual",
    ),
    "GraniteForCausalLM": Architecture(
        weights=LLAMA_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), 1.0),
            "logits_scaling": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        attention_multiplier="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    "Exaone4ForCausalLM": Architecture(
        weights=EXAONE4_WEIGHTS,
        defaults={
            **LLAMA_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        norm_places=("after",),
        qk_norm=True,
        rope_layers=_exaone4_rope_layers,
        windows=_exaone4_windows,
    ),
    "GPT2LMHeadModel": Architecture(
        weights=GPT2_WEIGHTS,
        prefixes=("transformer.", ""),
        defaults={
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        refused={"add_cross_attention": "only decoders without an encoder are supported"},
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        norm="layernorm",
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        transposed=True,
        rope_layers=lambda config, num_layers: (False,) * num_layers,
        ignored=(r".*h\.\d+\.attn\.(masked_)?bias",),
    ),
    "BertModel": Architecture(
        weights=BERT_WEIGHTS,
        prefixes=("", "bert."),
        defaults={
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        norm="layernorm",
        norm_places=("of_sum",),
        gated=False,
        learned_positions=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        encoder=True,
        rope_layers=lambda config, num_layers: (False,) * num_layers,
        ignored=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?pooler\..*", r"cls\..*"),
    ),
}
