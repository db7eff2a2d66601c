"""Tiny encoders of all families, most with a head for sequence classification, in the files that people have.

Their random weights are built from a seed. Needs NumPy and tests.support.models.tiny_models only, so that the script
that makes the golden scores can run in an environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.models.tiny_models import round_to_bfloat16, write_safetensors

Array = np.ndarray[Any, Any]

VOCAB, HIDDEN, INNER, POSITIONS, NUM_LAYERS = 80, 32, 48, 66, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": POSITIONS,
}
BERT_LAYER = {
    "attention.self.query": (HIDDEN, HIDDEN),
    "attention.self.key": (HIDDEN, HIDDEN),
    "attention.self.value": (HIDDEN, HIDDEN),
    "attention.output.dense": (HIDDEN, HIDDEN),
    "attention.output.LayerNorm": (HIDDEN,),
    "intermediate.dense": (INNER, HIDDEN),
    "output.dense": (HIDDEN, INNER),
    "output.LayerNorm": (HIDDEN,),
}
BERT_EMBEDDINGS = {
    "embeddings.word_embeddings": (VOCAB, HIDDEN),
    "embeddings.position_embeddings": (POSITIONS, HIDDEN),
    "embeddings.LayerNorm": (HIDDEN,),
}


class TinyClassifier(NamedTuple):
    """Modules by name with the shape of their weight; those without a bias are listed, layers are under `layer`."""

    config: dict[str, Any]
    prefix: str
    modules: dict[str, tuple[int, ...]]
    layer: str
    layer_modules: dict[str, tuple[int, ...]]
    heads: dict[str, tuple[int, ...]]
    without_bias: tuple[str, ...] = ("embeddings",)


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


TINY_CLASSIFIERS = {
    "bert": TinyClassifier(
        {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **SIZES, **labels("relevant")},
        "bert.",
        {**BERT_EMBEDDINGS, "embeddings.token_type_embeddings": (2, HIDDEN), "pooler.dense": (HIDDEN, HIDDEN)},
        "encoder.layer",
        BERT_LAYER,
        {"classifier": (1, HIDDEN)},
    ),
    "xlm-roberta": TinyClassifier(
        {
            "architectures": ["XLMRobertaForSequenceClassification"],
            "model_type": "xlm-roberta",
            **SIZES,
            **labels("relevant"),
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
            "type_vocab_size": 1,
        },
        "roberta.",
        {**BERT_EMBEDDINGS, "embeddings.token_type_embeddings": (1, HIDDEN)},
        "encoder.layer",
        BERT_LAYER,
        {"classifier.dense": (HIDDEN, HIDDEN), "classifier.out_proj": (1, HIDDEN)},
    ),
    "distilbert": TinyClassifier(
        {
            "architectures": ["DistilBertForSequenceClassification"],
            "model_type": "distilbert",
            **labels("bad", "fair", "good"),
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "hidden_dim": INNER,
            "n_heads": 4,
            "n_layers": NUM_LAYERS,
            "max_position_embeddings": POSITIONS,
        },
        "distilbert.",
        BERT_EMBEDDINGS,
        "transformer.layer",
        {
            **{f"attention.{part}_lin": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")},
            "sa_layer_norm": (HIDDEN,),
            "ffn.lin1": (INNER, HIDDEN),
            "ffn.lin2": (HIDDEN, INNER),
            "output_layer_norm": (HIDDEN,),
        },
        {"pre_classifier": (HIDDEN, HIDDEN), "classifier": (3, HIDDEN)},
    ),
    "modernbert": TinyClassifier(
        {
            "architectures": ["ModernBertForSequenceClassification"],
            "model_type": "modernbert",
            **SIZES,
            **labels("no", "yes"),
            "local_attention": 9,
            "global_rope_theta": 900.0,
            "local_rope_theta": 20.0,
            "classifier_pooling": "mean",
            "deterministic_flash_attn": False,
            "reference_compile": None,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 3),
        },
        "model.",
        {"embeddings.tok_embeddings": (VOCAB, HIDDEN), "embeddings.norm": (HIDDEN,), "final_norm": (HIDDEN,)},
        "layers",
        {
            "attn_norm": (HIDDEN,),
            "attn.Wqkv": (3 * HIDDEN, HIDDEN),
            "attn.Wo": (HIDDEN, HIDDEN),
            "mlp_norm": (HIDDEN,),
            "mlp.Wi": (2 * INNER, HIDDEN),
            "mlp.Wo": (HIDDEN, INNER),
        },
        {"head.dense": (HIDDEN, HIDDEN), "head.norm": (HIDDEN,), "classifier": (2, HIDDEN)},
        ("embeddings", "layers", "final_norm", "head"),
    ),
    "nomic_bert": TinyClassifier(  # without a head
        {
            "architectures": ["NomicBertModel"],
            "model_type": "nomic_bert",
            **SIZES,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "type_vocab_size": 2,
        },
        "",
        {
            "embeddings.word_embeddings": (VOCAB, HIDDEN),
            "embeddings.token_type_embeddings": (2, HIDDEN),
            "emb_ln": (HIDDEN,),
        },
        "encoder.layers",
        {
            "attn.Wqkv": (3 * HIDDEN, HIDDEN),
            "attn.out_proj": (HIDDEN, HIDDEN),
            "norm1": (HIDDEN,),
            "mlp.fc11": (INNER, HIDDEN),
            "mlp.fc12": (INNER, HIDDEN),
            "mlp.fc2": (HIDDEN, INNER),
            "norm2": (HIDDEN,),
        },
        {},
        ("embeddings", "encoder"),
    ),
}
WITH_HEADS = [name for name, model in TINY_CLASSIFIERS.items() if model.heads]


def pair() -> tuple[list[int], int]:
    """The token ids of a pair of texts, and those of the first."""
    return np.random.RandomState(5).randint(4, VOCAB, 41).tolist(), 9


def tensors(model: TinyClassifier) -> dict[str, Array]:
    random = np.random.RandomState(23)  # its stream is frozen, unlike Generator's
    modules = {model.prefix + name: shape for name, shape in model.modules.items()}
    for layer in range(NUM_LAYERS):
        at = f"{model.prefix}{model.layer}.{layer}."
        modules |= {at + name: shape for name, shape in model.layer_modules.items()}
    modules.pop("model.layers.0.attn_norm", None)
    found = {}
    for name, shape in {**modules, **model.heads}.items():
        is_norm = len(shape) == 1
        std = 0.25 if is_norm else 0.8 if "embeddings" in name else 0.3
        found[f"{name}.weight"] = round_to_bfloat16(random.standard_normal(shape) * std + is_norm)
        inner = name.removeprefix(model.prefix)
        if not inner.startswith(model.without_bias) or (is_norm and model.prefix != "model."):
            found[f"{name}.bias"] = round_to_bfloat16(random.standard_normal(shape[:1]) * 0.3)
    return found


def build_classifier(name: str, folder: Path, **config: Any) -> Path:
    """Write the model's folder without a tokenizer; returns it."""
    model = TINY_CLASSIFIERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config, **config}, indent=1))
    write_safetensors(folder / "model.safetensors", tensors(model))
    return folder
