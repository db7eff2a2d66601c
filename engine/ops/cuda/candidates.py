"""Tables of kernels that can do the same operation, and the choice of one for a problem.

A file of kernels registers its candidates in the table of their operation. A candidate says with which plan (tile,
splits, ...) it would do a problem, or that it would not, and what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec

Problem = TypeVar("Problem", bound=tuple[Any, ...])  # hashable: what a choice depends on
Operands = TypeVar("Operands")

MAX_CACHED_CHOICES = 16384  # of an operation on a device


@dataclass(frozen=True, eq=False)
class Candidate(Generic[Problem, Operands]):
    """A way to do an operation.

    Attributes:
        name: by which tests and benchmarks force or forbid it; unique in its table.
        specs: the kernels that it launches.
        accepts: its best plan for a problem, None where it cannot do it or is known to be slower than others.
        launch: submits the kernel.
        order: of those that accept a problem the ones of the lowest order compete; measurements are behind it.
        cost: microseconds of a plan, or another measure that the competitors of one order share.
    """

    name: str
    specs: tuple[KernelSpec[Any], ...]
    accepts: Callable[[Problem, CudaDevice], Any]
    launch: Callable[[CudaDevice, Problem, Any, Operands], None]
    order: int
    cost: Callable[[Problem, Any, CudaDevice], float] | None = None


class Choice(NamedTuple):
    """A candidate and its plan."""

    candidate: Candidate[Any, Any]
    plan: Any


class CandidateTable(Generic[Problem, Operands]):
    """The candidates of one operation."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.candidates: list[Candidate[Problem, Operands]] = []

    @property
    def names(self) -> list[str]:
        return [candidate.name for candidate in self.candidates]

    def register(self, candidate: Candidate[Problem, Operands]) -> None:
        assert candidate.name not in self.names, f"{self.operation} has a kernel {candidate.name} already"
        self.candidates.append(candidate)

    def choose(self, problem: Problem, device: CudaDevice, without: Collection[str] = ()) -> Choice | None:
        """The best for a problem; the first registered where several are as good, None where no candidate accepts."""
        choices = [
            (candidate, plan)
            for candidate in self.candidates
            if candidate.name not in without and (plan := candidate.accepts(problem, device)) is not None
        ]
        if not choices:
            return None
        lowest = min(candidate.order for candidate, _ in choices)
        competing = [choice for choice in choices if choice[0].order == lowest]
        if len(competing) == 1:
            return Choice(*competing[0])

        def cost(choice: tuple[Candidate[Problem, Operands], Any]) -> float:
            candidate, plan = choice
            assert candidate.cost is not None, f"{candidate.name} competes without a cost"
            return candidate.cost(problem, plan, device)

        return Choice(*min(competing, key=cost))


class Chooser(Generic[Problem, Operands]):
    """Chooses from a table on one device and remembers what it chose."""

    def __init__(self, table: CandidateTable[Problem, Operands], device: CudaDevice) -> None:
        self.table = table
        self._device = device
        self.restrict()

    def restrict(self, *, only: Collection[str] | None = None, without: Collection[str] = ()) -> None:
        """Choose only among these candidates from now on, or among all others; all without arguments.

        Raises: TesseraError for a name that the table does not have.
        """
        for name in (*(only or ()), *without):
            if name not in self.table.names:
                known = ", ".join(self.table.names)
                raise TesseraError(f"{self.table.operation} has no kernel {name!r}; it has {known}")
        forbidden = {*without, *(name for name in self.table.names if only is not None and name not in only)}

        @lru_cache(maxsize=MAX_CACHED_CHOICES)
        def choose(problem: Problem) -> Choice | None:
            return self.table.choose(problem, self._device, forbidden)

        self.choose = choose

    def launch(self, problem: Problem, operands: Operands) -> bool:
        """Submit the best kernel; False, and nothing done, where no candidate accepts the problem."""
        choice = self.choose(problem)
        if choice is None:
            return False
        choice.candidate.launch(self._device, problem, choice.plan, operands)
        return True
