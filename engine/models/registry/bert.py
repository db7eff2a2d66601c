"""Text encoders with learned positions that normalise sums: BERT, RoBERTa and XLM-RoBERTa, DistilBERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.engine.models.registry import rules
from tessera.engine.models.registry.architecture import Architecture, ClassifierRule, WeightNames

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
    "pooler": ("pooler.dense",),
    "classifier": ("classifier",),
}
ROBERTA_WEIGHTS: WeightNames = {
    **BERT_WEIGHTS,
    "classifier_dense": ("classifier.dense",),
    "classifier": ("classifier.out_proj",),
}
DISTILBERT_LAYER = "transformer.layer.{i}."
DISTILBERT_WEIGHTS: WeightNames = {
    "embedding": ("embeddings.word_embeddings",),
    "position_embedding": ("embeddings.position_embeddings",),
    "embedding_norm": ("embeddings.LayerNorm",),
    "qkv": tuple(DISTILBERT_LAYER + f"attention.{part}_lin" for part in "qkv"),
    "out": (DISTILBERT_LAYER + "attention.out_lin",),
    "attention_norm_of_sum": (DISTILBERT_LAYER + "sa_layer_norm",),
    "up": (DISTILBERT_LAYER + "ffn.lin1",),
    "down": (DISTILBERT_LAYER + "ffn.lin2",),
    "mlp_norm_of_sum": (DISTILBERT_LAYER + "output_layer_norm",),
    "classifier_dense": ("pre_classifier",),
    "classifier": ("classifier",),
}

BERT_DEFAULTS: dict[str, Any] = {
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
}

BERT = Architecture(
    model_type="bert",
    base_classes=("BertForMaskedLM", "BertForPreTraining"),
    weights=BERT_WEIGHTS,
    prefixes=("", "bert."),
    defaults=BERT_DEFAULTS,
    keys={"rms_norm_eps": "layer_norm_eps"},
    refused={"is_decoder": "an encoder makes no text"},
    norm="layernorm",
    norm_places=("of_sum",),
    gated=False,
    learned_positions=True,
    token_types=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    encoder=True,
    classifier=ClassifierRule(("BertForSequenceClassification",), dense="pooler", activation="tanh"),
    rope_layers=lambda config, num_layers: (False,) * num_layers,
    ignored=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?pooler\..*", r"cls\..*"),
)


def _roberta(model_type: str, name: str) -> Architecture:
    return replace(
        BERT,
        model_type=model_type,
        base_classes=(f"{name}ForMaskedLM",),
        weights=ROBERTA_WEIGHTS,
        prefixes=("", "roberta."),
        defaults={**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
        first_position=rules.position_after_padding,
        classifier=ClassifierRule((f"{name}ForSequenceClassification",), activation="tanh"),
        ignored=(r"(roberta\.)?embeddings\.position_ids", r"(roberta\.)?pooler\..*", r"lm_head\..*"),
    )


BERT_FAMILY: dict[str, Architecture] = {
    "BertModel": BERT,
    "RobertaModel": _roberta("roberta", "Roberta"),
    "XLMRobertaModel": _roberta("xlm-roberta", "XLMRoberta"),
    "CamembertModel": _roberta("camembert", "Camembert"),
    "DistilBertModel": replace(
        BERT,
        model_type="distilbert",
        base_classes=("DistilBertForMaskedLM",),
        weights=DISTILBERT_WEIGHTS,
        prefixes=("", "distilbert."),
        defaults={
            **BERT_DEFAULTS,
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "activation": "gelu",
        },
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_eps",
        },
        token_types=False,
        classifier=ClassifierRule(("DistilBertForSequenceClassification",), activation="relu"),
        ignored=(r"(distilbert\.)?embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*"),
    ),
}
