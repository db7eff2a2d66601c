"""Device memory for the adapters that steps can use, in slots of equal size beside each weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.engine.adapters.modules import adaptable_fields
from tessera.engine.adapters.reader import Adapter, ModuleAdapter
from tessera.engine.formats import AdapterSelection, LinearWeight, LoraStack
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.weights.build import MatrixField
from tessera.engine.models.weights.weights import LayerWeights, MLPWeights, Weights
from tessera.engine.tensor import Device, empty, float32, int32, zeros

RANK_MULTIPLE = 8  # of the ranks that a slot has room for: 16 bytes of the smallest elements


class AdapterSlots:
    """Attributes:
    selection: shared by all weights; what a step's products take.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype[Any],
        device: Device,
        *,
        num_slots: int,
        max_rank: int,
        max_rows: int,
    ) -> None:
        """All slots are empty. `max_rows`: of a product. Raises: OutOfMemoryError."""
        self.num_slots = num_slots
        rank = -(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        fields = list(adaptable_fields(config))
        most_parts = max(len(field.part_rows) for _, field in fields)
        self.selection = AdapterSelection(
            ranks=zeros((num_slots,), int32, device),
            shrunk=empty((max_rows * most_parts * rank,), float32, device),
        )
        self._stacks = {
            (layer, field.name): _make_stack(field, dtype, device, num_slots, rank, self.selection)
            for layer, field in fields
        }

    @property
    def nbytes(self) -> int:
        return self.selection.shrunk.nbytes + sum(stack.nbytes for stack in self._stacks.values())

    def attach(self, weights: Weights) -> Weights:
        """The same weights with these slots beside them."""
        layers = tuple(self._attach_layer(index, layer) for index, layer in enumerate(weights.layers))
        return replace(weights, layers=layers)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter in a slot, after the work that was submitted before."""
        by_field: dict[tuple[int, str], list[ModuleAdapter]] = {}
        for each in adapter.modules:
            by_field.setdefault((each.module.layer, each.module.field), []).append(each)
        for key, stack in self._stacks.items():
            _fill(stack, slot, by_field.get(key, []))
        self.selection.ranks[slot : slot + 1].upload(np.array([adapter.rank], np.int32))

    def _attach_layer(self, index: int, layer: LayerWeights) -> LayerWeights:
        def adapted(field: str, weight: LinearWeight) -> LinearWeight:
            return replace(weight, adapters=self._stacks[index, field])

        attention = replace(
            layer.attention, qkv=adapted("qkv", layer.attention.qkv), out=adapted("out", layer.attention.out)
        )
        mlp = layer.mlp
        if isinstance(mlp, MLPWeights):
            mlp = replace(mlp, up=adapted("up", mlp.up), down=adapted("down", mlp.down))
        return LayerWeights(attention, mlp)


def _make_stack(
    field: MatrixField, dtype: np.dtype[Any], device: Device, slots: int, rank: int, selection: AdapterSelection
) -> LoraStack:
    parts = len(field.part_rows)
    return LoraStack(
        a=empty((slots, parts, rank, field.columns), dtype, device),
        b=empty((slots, field.rows, rank), dtype, device),
        factors=zeros((slots, parts), float32, device),
        part_rows=field.part_rows,
        selection=selection,
    )


def _fill(stack: LoraStack, slot: int, modules: list[ModuleAdapter]) -> None:
    """Every element of the slot, so that nothing is left of the adapter before."""
    _, parts, rank, columns = stack.a.shape
    a = np.zeros((parts, rank, columns), stack.a.dtype)
    b = np.zeros((stack.b.shape[1], rank), stack.b.dtype)
    factors = np.zeros(parts, float32)
    for each in modules:
        module = each.module
        a[slice(*module.parts), : each.rank] = each.a
        b[module.first_row : module.first_row + module.rows, : each.rank] = each.b
        factors[slice(*module.parts)] = each.factor
    stack.a[slot].upload(a)
    stack.b[slot].upload(b)
    stack.factors[slot].upload(factors)
