"""Text encoders that normalise before each half and rotate queries and keys: ModernBERT."""

from __future__ import annotations

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, ClassifierRule, WeightNames

MODERNBERT_LAYER = "layers.{i}."
MODERNBERT_WEIGHTS: WeightNames = {
    "embedding": ("embeddings.tok_embeddings",),
    "embedding_norm": ("embeddings.norm",),
    "attention_norm_before": (MODERNBERT_LAYER + "attn_norm",),
    "qkv": (MODERNBERT_LAYER + "attn.Wqkv",),
    "out": (MODERNBERT_LAYER + "attn.Wo",),
    "mlp_norm_before": (MODERNBERT_LAYER + "mlp_norm",),
    "up": (MODERNBERT_LAYER + "mlp.Wi",),
    "down": (MODERNBERT_LAYER + "mlp.Wo",),
    "final_norm": ("final_norm",),
    "classifier_dense": ("head.dense",),
    "classifier_norm": ("head.norm",),
    "classifier": ("classifier",),
}

MODERNBERT_FAMILY: dict[str, Architecture] = {
    "ModernBertModel": Architecture(
        model_type="modernbert",
        base_classes=("ModernBertForMaskedLM",),
        weights=MODERNBERT_WEIGHTS,
        prefixes=("", "model."),
        defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "tie_word_embeddings": True,
        },
        keys={"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps"},
        norm="layernorm",
        norm_bias="norm_bias",
        bare_start=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        encoder=True,
        classifier=ClassifierRule(
            ("ModernBertForSequenceClassification",),
            pooling_key="classifier_pooling",
            activation_key="classifier_activation",
            dense_bias="classifier_bias",
            norm=True,
        ),
        window_rope=(("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")),
        windows=rules.modernbert_windows,
        ignored=(r".*\.rotary_emb\..*", r"head\..*", r"decoder\..*"),
    ),
}
