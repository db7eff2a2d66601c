"""Each rank's part of choosing tokens, where several have slices of the vocabulary."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, Int32, OutInt, Pointer
from tessera.engine.ops.cuda.sampling import ROW_BLOCK, InRows, row_block_config
from tessera.engine.ops.cuda.types import ceil_div
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

InChoices = Annotated[Pointer, "const unsigned long long*"]
OutChoices = Annotated[Pointer, "unsigned long long*"]


class SliceBestParams(NamedTuple):
    logits: InFloat
    rows: InRows
    choices: OutChoices
    width: Int32
    first: Int32


class SliceChoiceParams(NamedTuple):
    logits: InFloat
    rows: InRows
    maxima: InChoices
    choices: OutChoices
    width: Int32
    first: Int32


class SliceTokensParams(NamedTuple):
    maxima: InChoices
    choices: InChoices
    token_ids: OutInt
    num_rows: Int32


SLICE_BEST = KernelSpec("sampling/slice.cu", "slice_best_kernel", (), SliceBestParams, overlaps=True, on_demand=True)
SLICE_CHOICE = KernelSpec(
    "sampling/slice.cu", "slice_choice_kernel", (), SliceChoiceParams, overlaps=True, on_demand=True
)
SLICE_TOKENS = KernelSpec(
    "sampling/slice.cu", "slice_tokens_kernel", (), SliceTokensParams, overlaps=True, on_demand=True
)
SPECS = (SLICE_BEST, SLICE_CHOICE, SLICE_TOKENS)
declare_header("slice", __name__, {"THREADS": ROW_BLOCK}, (SliceBestParams, SliceChoiceParams, SliceTokensParams))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All of them; logits are float32 whatever the dtype of the model."""
    return [(spec, ()) for spec in SPECS]


class SliceOps(Ops):
    device: CudaDevice

    def _best_of_slice(self, logits: Tensor, rows: Tensor, first: int, out: Tensor) -> None:
        num_rows, width = logits.shape
        params = SliceBestParams(logits=logits, rows=rows, choices=out, width=width, first=first)
        self.device.launch(SLICE_BEST, (), row_block_config(num_rows), params)

    def _choose_in_slice(self, logits: Tensor, rows: Tensor, maxima: Tensor, first: int, out: Tensor) -> None:
        num_rows, width = logits.shape
        params = SliceChoiceParams(logits=logits, rows=rows, maxima=maxima, choices=out, width=width, first=first)
        self.device.launch(SLICE_CHOICE, (), row_block_config(num_rows), params)

    def _slice_tokens(self, maxima: Tensor, choices: Tensor, out: Tensor) -> None:
        config = LaunchConfig((ceil_div(out.size, ROW_BLOCK), 1, 1), (ROW_BLOCK, 1, 1))
        params = SliceTokensParams(maxima=maxima, choices=choices, token_ids=out, num_rows=out.size)
        self.device.launch(SLICE_TOKENS, (), config, params)
