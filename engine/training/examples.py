"""Examples, their order, and their division into micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import Device, Tensor, from_numpy

NO_TARGET = -1

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of tokens.

    Attributes:
        token_ids: int32 [n], at least 2.
        weights: float32 [n], of each token's loss given those before it; the first token's is not used.
    """

    token_ids: Array
    weights: Array

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sequences(self) -> tuple[Example, ...]:
        """Itself: a `Preference` has two."""
        return (self,)

    @property
    def total_weight(self) -> float:
        return float(self.weights[1:].sum(dtype=np.float64))


class Item(Protocol):
    """One entry of the data: an `Example` or a `Preference`."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def sequences(self) -> tuple[Example, ...]: ...


AnyItem = TypeVar("AnyItem", bound=Item)


class MicroBatch(NamedTuple):
    """Sequences packed end to end, on the device; see `TrainableDecoder.loss`."""

    token_ids: Tensor
    targets: Tensor
    factors: Tensor
    sequences: PackedSequences


class ExampleOrder:
    """Batches of examples by step, in an order that depends on the seed and the epoch alone."""

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self.num_examples = num_examples
        self.batch_size = min(batch_size, num_examples)
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller."""
        return -(-self.num_examples // self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of the examples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = generator.permutation(self.num_examples)
        chosen: list[int] = order[place * self.batch_size : (place + 1) * self.batch_size].tolist()
        return chosen


class Batches(Protocol[AnyItem]):
    """Items by step.

    Attributes:
        digest: equal where all batches are.
    """

    digest: str

    def batch(self, step: int) -> list[AnyItem]: ...


class OrderedBatches(Generic[AnyItem]):
    """Of a finite number of items, in the order of `ExampleOrder`."""

    def __init__(self, items: Sequence[AnyItem], batch_size: int, seed: int) -> None:
        self.digest = digest(items)
        self._items = items
        self._order = ExampleOrder(len(items), batch_size, seed)

    def batch(self, step: int) -> list[AnyItem]:
        return [self._items[index] for index in self._order.batch(step)]


def groups(items: Sequence[AnyItem], max_tokens: int) -> Iterator[list[AnyItem]]:
    """The items in their order, as many at a time as `max_tokens` hold, one at least."""
    held: list[AnyItem] = []
    for item in items:
        if held and sum(other.num_tokens for other in held) + item.num_tokens > max_tokens:
            yield held
            held = []
        held.append(item)
    if held:
        yield held


def micro_batches(
    examples: Sequence[Example], max_tokens: int, total_weight: float, device: Device
) -> Iterator[MicroBatch]:
    """`groups` of examples, packed."""
    for group in groups(examples, max_tokens):
        yield pack(group, total_weight, device)


def pack(examples: Sequence[Example], total_weight: float, device: Device) -> MicroBatch:
    """End to end; a token's factor is its weight by `total_weight`."""
    targets, factors = [], []
    for example in examples:
        weights = np.append(example.weights[1:], 0)
        following = np.append(example.token_ids[1:], NO_TARGET)
        targets.append(np.where(weights != 0, following, NO_TARGET))
        factors.append(weights / total_weight)
    arrays = (
        np.concatenate([example.token_ids for example in examples]).astype(np.int32),
        np.concatenate(targets).astype(np.int32),
        np.concatenate(factors).astype(np.float32),
    )
    token_ids, of_targets, of_factors = (from_numpy(array, device) for array in arrays)
    lengths = [example.num_tokens for example in examples]
    return MicroBatch(token_ids, of_targets, of_factors, PackedSequences.of_lengths(lengths, device))


def digest(items: Sequence[Item]) -> str:
    """Equal for equal sequences in equal order."""
    found = hashlib.sha256()
    for example in (sequence for item in items for sequence in item.sequences):
        found.update(len(example.token_ids).to_bytes(8, "little"))
        found.update(example.token_ids.astype(np.int32).tobytes())
        found.update(example.weights.astype(np.float32).tobytes())
    return found.hexdigest()
