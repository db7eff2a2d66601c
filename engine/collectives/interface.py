"""One rank's side of what all ranks of a model do together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.tensor import Tensor


class SummedHalf(NamedTuple):
    """The product that ends a half of a layer, and the one behind its sum over the ranks, with its activation."""

    last: LinearWeight
    next: LinearWeight
    activation: Activation | None


@dataclass(frozen=True)
class LeftSum:
    """The sum over ranks of one row that `leave_sum` left, for `project_sum`.

    Attributes:
        update: [1, H] this rank's part.
        half: of a layer: 0 where attention ends, 1 where the MLP does.
        out: [1, H] gets the stream with the sum.
    """

    ranks: Collectives
    update: Tensor
    half: int
    out: Tensor


class Collectives(ABC):
    """Every rank calls the same methods in the same order, with tensors of equal shapes but where it says otherwise.

    Sums are those of rank 0, rank 1 and so on, in this order and in float32, rounded once: all ranks get the same bits,
    each time. Letters: T tokens, S sampled rows, V vocabulary, W width.

    Attributes:
        index, size: this rank, and how many there are.
        rendezvous: of the ranks' threads.

    Raises: RankError where another rank failed or does not come.
    """

    def __init__(self, index: int, rendezvous: Rendezvous) -> None:
        self.index, self.size = index, rendezvous.size
        self.rendezvous = rendezvous

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """x [T, W] becomes the sum of all ranks' x."""

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> bool:
        """residual += the sum of all ranks' x, rounded once; x may change. False: not at once, and nothing was done."""
        return False

    @abstractmethod
    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        """As `all_reduce_add`, and `out` [T, W] becomes `Ops.rmsnorm` of the residual. False: nothing was done."""

    def leaves_sums(self, halves: Sequence[SummedHalf]) -> bool:
        """Whether all ranks' products of one row may leave their sums to the ones behind; to be asked by all ranks.

        If so, what is left is taken before anything else is left.
        """
        return False

    def leave_sum(self, x: Tensor, weight: LinearWeight, half: int, update: Tensor) -> None:
        """`update` [1, H] becomes x [1, K] times the weight, a part of the sum that `project_sum` takes."""
        raise NotImplementedError

    def project_sum(
        self,
        x: Tensor,
        left: LeftSum,
        norm: Tensor,
        eps: float,
        weight: LinearWeight,
        activation: Activation | None,
        out: Tensor,
    ) -> None:
        """`left.out` becomes x [1, H] + the sum of all ranks' updates, rounded once; `out` the product of its RMSNorm,
        after the activation. `left.out` is neither x nor the update."""
        raise NotImplementedError

    @abstractmethod
    def gather_columns(self, x: Tensor, out: Tensor | None, *, first: int, whole: int) -> None:
        """Each rank's x [S, V_r] float32 into `out` [S, V] of rank 0, from column `first` of V = `whole` on.

        Together they are all columns. `out` is None on other ranks.
        """

    @abstractmethod
    def own_ids(self, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> Tensor:
        """ids [T] int32 as rows of a rank's part of a table, which begins with row `first` of the whole; `out` [T].

        Those of other parts are outside of this one's rows, and none is negative: -1 - n stands for sampled[n], as in
        `Ops.embedding`. Each rank by itself.
        """

    @abstractmethod
    def norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int, centred: bool) -> None:
        """`Ops.norm_columns` of a vector whose parts the ranks have: the columns `first` and on that `weight` is for.

        Where ranks have equal parts, all parts are had by equally many.
        """

    @abstractmethod
    def broadcast(self, x: Tensor) -> None:
        """x becomes rank 0's."""

    @abstractmethod
    def all_reduce_max(self, x: Tensor) -> None:
        """x [S] uint64 becomes the largest of all ranks' x."""

    def least(self, value: int) -> int:
        """Of all ranks' values; on the host, and however long ranks take to come."""
        return min(self.rendezvous.exchange(self.index, value))

    def wait_for_all(self) -> None:
        """Return when all ranks have come; on the host, and however long they take."""
        self.rendezvous.wait(self.index, patient=True)
