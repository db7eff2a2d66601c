"""Text encoders."""

from __future__ import annotations

from tessera.engine.models.registry.architecture import Architecture, WeightNames

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

BERT_FAMILY: dict[str, Architecture] = {
    "BertModel": Architecture(
        model_type="bert",
        base_classes=("BertForMaskedLM", "BertForPreTraining"),
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
