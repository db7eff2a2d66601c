"""config.json and an entry of the table of architectures -> the specification of a sequence classifier's head."""

from __future__ import annotations

from tessera.engine.models.fields import Fields
from tessera.engine.models.registry import Architecture
from tessera.engine.models.registry.architecture import ClassifierRule
from tessera.engine.models.specs import ClassifierSpec, HeadActivation, NormSpec, PoolingKind, ScoreFunction

MAX_LABELS = 2**16
MAX_LABEL_CHARS = 1024
USUAL_LABELS = 2  # where config.json names none, as in Hugging Face transformers

POOLINGS: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean"}
ACTIVATIONS: dict[str, HeadActivation] = {"tanh": "tanh", "gelu": "gelu", "relu": "relu"}
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# Classes of PyTorch that sentence-transformers writes; None: sigmoid or softmax, as the number of labels says.
TORCH_FUNCTIONS: dict[str, ScoreFunction | None] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": None,
    "torch.nn.modules.activation.Softmax": None,
    "torch.nn.modules.activation.Tanh": "tanh",
}


def parse_classifier(
    config: Fields, architecture: Architecture, class_name: str | None, norm: NormSpec
) -> ClassifierSpec | None:
    """None where config.json's class has no such head. Raises: ModelError naming the key at fault."""
    rule = architecture.classifier
    if rule is None or class_name not in rule.classes:
        return None
    labels = _labels(config)
    activation = rule.activation
    if rule.activation_key is not None:
        activation = config.choice(rule.activation_key, ACTIVATIONS)
    return ClassifierSpec(
        labels=labels,
        scores=_score_function(config, len(labels)),
        pooling=_pooling(config, rule),
        activation=activation,
        dense=rule.dense,
        dense_bias=config.boolean(rule.dense_bias) if isinstance(rule.dense_bias, str) else rule.dense_bias,
        norm=norm if rule.norm else None,
        bias=rule.bias,
    )


def _pooling(config: Fields, rule: ClassifierRule) -> PoolingKind:
    kind: PoolingKind = rule.pooling if rule.pooling_key is None else config.choice(rule.pooling_key, POOLINGS)
    return kind


def _labels(config: Fields) -> tuple[str, ...]:
    """Of id2label, in the order of ids; else as many as num_labels says."""
    if not config.has("id2label"):
        count = config.integer("num_labels", 1, MAX_LABELS) if config.has("num_labels") else USUAL_LABELS
        return tuple(f"LABEL_{index}" for index in range(count))
    names = config.section("id2label").values
    wanted = [str(index) for index in range(len(names))]
    values = [names.get(index) for index in wanted]
    fits = 0 < len(names) <= MAX_LABELS
    if not fits or not all(isinstance(value, str | int) and len(str(value)) <= MAX_LABEL_CHARS for value in values):
        config.refuse("id2label", f"an object that names labels from 0 on, at most {MAX_LABELS}")
    return tuple(map(str, values))


def _score_function(config: Fields, num_labels: int) -> ScoreFunction:
    """As the problem type says, else sentence-transformers' activation, else sigmoid or softmax."""
    usual: ScoreFunction = "sigmoid" if num_labels == 1 else "softmax"
    if config.has("problem_type"):
        kind = config.choice("problem_type", {kind: kind for kind in PROBLEM_TYPES})
        return "identity" if kind == "regression" else "sigmoid" if kind == "multi_label_classification" else usual
    section, key = config.section("sentence_transformers"), "activation_fn"
    if not section.has(key):
        section, key = config, "sbert_ce_default_activation_function"
    return (section.choice(key, TORCH_FUNCTIONS) or usual) if section.has(key) else usual
