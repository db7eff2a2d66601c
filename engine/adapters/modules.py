"""The modules of a model that can have adapters, by their names in its own checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tessera.engine.models.config import ModelConfig
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.weights.build import ExpertsField, MatrixField, layer_fields
from tessera.engine.models.weights.checkpoint_source import PROJECTIONS
from tessera.engine.models.weights.row_order import Rows, row_order

# What stands before the language model's own names in a multimodal model.
OUTER_NAMES = ("model.language_model.", "model.text_model.", "language_model.model.", "language_model.")


@dataclass(frozen=True, eq=False)
class AdaptableModule:
    """Some parts of a fused weight, which one module of a checkpoint holds.

    Attributes:
        layer, field: of the weight; see `tessera.engine.models.weights.build`.
        parts: the first of the weight's parts, and the one behind the last.
        first_row, rows: of the weight.
        columns: of the weight, which are the module's inputs.
        order: which row of the module each row of the weight is; None: they are in order.
    """

    layer: int
    field: str
    parts: tuple[int, int]
    first_row: int
    rows: int
    columns: int
    order: Rows | None = None


def adaptable_fields(config: ModelConfig) -> Iterator[tuple[int, MatrixField]]:
    """The weights of layers that can have adapters: projections of attention and of dense MLPs."""
    for layer, spec in enumerate(config.layers):
        for field in layer_fields(spec, config.hidden_size):
            if isinstance(field, MatrixField) and not isinstance(field, ExpertsField) and field.name in PROJECTIONS:
                yield layer, field


def adaptable_modules(config: ModelConfig) -> dict[str, AdaptableModule]:
    """By name without ".weight", as model.layers.0.self_attn.q_proj; under every name that checkpoints have."""
    architecture = ARCHITECTURES[config.architecture]
    found: dict[str, AdaptableModule] = {}
    for layer, field in adaptable_fields(config):
        for names in (architecture.weights, architecture.other_weights):
            modules = names.get(field.name, ())
            order = row_order(config, architecture, field, layer, fused_order=len(modules) == 1)
            for name, module in zip(modules, _modules(field, layer, len(modules), order), strict=True):
                for prefix in architecture.prefixes:
                    found[prefix + name.format(i=layer)] = module
    return found


def without_outer_name(name: str) -> str:
    """The name of a language model's module, where adapters of a multimodal model have more before it.

    Whatever is served: GGUF files, and folders that were made of it, have the language model alone.
    """
    for outer in OUTER_NAMES:
        if name.startswith(outer):
            return "model." + name.removeprefix(outer)
    return name


def _modules(field: MatrixField, layer: int, count: int, order: Rows | None) -> Iterator[AdaptableModule]:
    """Of a weight that is stored as `count` modules: one, or one for each part."""
    if count == 1:
        yield AdaptableModule(layer, field.name, (0, len(field.part_rows)), 0, field.rows, field.columns, order)
        return
    start = 0
    for part, rows in enumerate(field.part_rows if count else ()):
        of_part = None if order is None else order[start : start + rows] - start
        yield AdaptableModule(layer, field.name, (part, part + 1), start, rows, field.columns, of_part)
        start += rows
