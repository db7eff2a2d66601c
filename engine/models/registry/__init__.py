"""The supported architectures as a table: how each one's config keys and weight names read.

Public: `ARCHITECTURES` by name in config.json, their type `Architecture`, `architecture_name` for names that are no
entries, and `supported_names` for errors. An entry belongs to the file of its family; rules that several entries share
are in `rules`.
"""

from tessera.engine.models.registry.architecture import Architecture
from tessera.engine.models.registry.bert import BERT_FAMILY
from tessera.engine.models.registry.gemma import GEMMA_FAMILY
from tessera.engine.models.registry.layernorm import LAYERNORM_FAMILY
from tessera.engine.models.registry.llama import LLAMA_FAMILY
from tessera.engine.models.registry.llama_variants import LLAMA_VARIANTS
from tessera.engine.models.registry.mixture_variants import MIXTURE_VARIANTS
from tessera.engine.models.registry.mixtures import MIXTURES
from tessera.engine.models.registry.modernbert import MODERNBERT_FAMILY
from tessera.engine.models.registry.parallel import PARALLEL_FAMILY
from tessera.engine.models.registry.post_norm import POST_NORM_FAMILY
from tessera.engine.models.registry.scaled import SCALED_FAMILY

ARCHITECTURES: dict[str, Architecture] = {
    **LLAMA_FAMILY,
    **LLAMA_VARIANTS,
    **SCALED_FAMILY,
    **GEMMA_FAMILY,
    **POST_NORM_FAMILY,
    **PARALLEL_FAMILY,
    **MIXTURES,
    **MIXTURE_VARIANTS,
    **LAYERNORM_FAMILY,
    **BERT_FAMILY,
    **MODERNBERT_FAMILY,
}


def architecture_name(class_name: str | None, model_type: object) -> str | None:
    """The entry for a class that config.json names, or for its model_type where it names none."""
    for name, entry in ARCHITECTURES.items():
        classifiers = entry.classifier.classes if entry.classifier is not None else ()
        if class_name in (name, *entry.base_classes, *classifiers) or (
            class_name is None and entry.model_type == model_type
        ):
            return name
    return None


def supported_names() -> str:
    """The entries for an error message, without the ending of most."""
    return ", ".join(sorted((name.removesuffix("ForCausalLM") for name in ARCHITECTURES), key=str.lower))


__all__ = ["ARCHITECTURES", "Architecture", "architecture_name", "supported_names"]
