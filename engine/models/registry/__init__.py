"""The supported architectures as a table: how each one's config keys and weight names read.

Public: `ARCHITECTURES` by name in config.json, and their type `Architecture`. An entry belongs to the file of its
family; rules that several entries share are in `rules`.
"""

from tessera.engine.models.registry.architecture import Architecture
from tessera.engine.models.registry.bert import BERT_FAMILY
from tessera.engine.models.registry.layernorm import LAYERNORM_FAMILY
from tessera.engine.models.registry.llama import LLAMA_FAMILY

ARCHITECTURES: dict[str, Architecture] = {**LLAMA_FAMILY, **LAYERNORM_FAMILY, **BERT_FAMILY}

__all__ = ["ARCHITECTURES", "Architecture"]
