"""The supported architectures as a table: how each one's config keys and weight names read.

Public: `ARCHITECTURES` by name in config.json, their type `Architecture`, and `architecture_name` for names that are no
entries. An entry belongs to the file of its
family; rules that several entries share are in `rules`.
"""

from tessera.engine.models.registry.architecture import Architecture
from tessera.engine.models.registry.bert import BERT_FAMILY
from tessera.engine.models.registry.layernorm import LAYERNORM_FAMILY
from tessera.engine.models.registry.llama import LLAMA_FAMILY

ARCHITECTURES: dict[str, Architecture] = {**LLAMA_FAMILY, **LAYERNORM_FAMILY, **BERT_FAMILY}

_BY_MODEL_TYPE = {entry.model_type: name for name, entry in ARCHITECTURES.items()}
_BY_CLASS = {other: name for name, entry in ARCHITECTURES.items() for other in (name, *entry.base_classes)}


def architecture_name(class_name: str | None, model_type: object) -> str | None:
    """The entry for a class that config.json names, or for its model_type where it names none."""
    if class_name is not None:
        return _BY_CLASS.get(class_name)
    return _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None


__all__ = ["ARCHITECTURES", "Architecture", "architecture_name"]
