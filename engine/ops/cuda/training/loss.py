"""Cross entropy with the head's product, so many tokens at a time that their logits have at most CHUNK_ELEMENTS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InFloat, InInt, Int32, OutFloat, OutT
from tessera.engine.ops.cuda.training.elementwise import rows_config
from tessera.engine.ops.cuda.training.layer import SoftmaxGradientParams
from tessera.engine.ops.cuda.training.linear import LinearOps, padded
from tessera.engine.ops.cuda.types import cuda_type, row_config
from tessera.engine.tensor import Tensor, empty, float32, zeros

FILE = "training/softmax.cu"


class CrossEntropyParams(NamedTuple):
    logits: InFloat
    targets: InInt
    losses: OutFloat
    logsumexp: OutFloat
    vocab_size: Int32
    width: Int32
    multiplier: Float32


class CrossEntropyGradientParams(NamedTuple):
    logits: InFloat
    targets: InInt
    logsumexp: InFloat
    factors: InFloat
    out: OutT
    vocab_size: Int32
    width: Int32
    multiplier: Float32


CROSS_ENTROPY = KernelSpec(FILE, "cross_entropy_kernel", (), CrossEntropyParams, on_demand=True)
CROSS_ENTROPY_GRADIENT = KernelSpec(
    FILE, "cross_entropy_gradient_kernel", ("T",), CrossEntropyGradientParams, on_demand=True
)
SPECS = (CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT)
declare_header(
    "training_softmax", __name__, params=(SoftmaxGradientParams, CrossEntropyParams, CrossEntropyGradientParams)
)

CHUNK_ELEMENTS = 1 << 27  # logits at a time, in float32
ROWS = 128  # tokens of a chunk are a multiple of them


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(CROSS_ENTROPY, ()), *((CROSS_ENTROPY_GRADIENT, (dtype,)) for dtype in dtypes)]


class LossOps(LinearOps):
    device: CudaDevice

    def _linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, multiplier: float, losses: Tensor, logsumexp: Tensor
    ) -> None:
        head = self._padded_rows(weight)
        for rows in _chunks(x.shape[0], head.shape[0]):
            logits = self._logits(x[rows], head)
            self._chunk_losses(logits, targets[rows], weight.shape[0], multiplier, losses[rows], logsumexp[rows])

    def _linear_cross_entropy_gradient(
        self,
        factors: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        multiplier: float,
        losses: Tensor | None,
        logsumexp: Tensor,
        weight_gradient: Tensor | None,
        out: Tensor,
    ) -> None:
        vocab_size = weight.shape[0]
        head = self._padded_rows(weight)
        summed = weight_gradient
        if summed is not None and head is not weight:
            summed = zeros(head.shape, float32, self.device)
        turned: Tensor | None = None
        for rows in _chunks(x.shape[0], head.shape[0]):
            logits = self._logits(x[rows], head)
            if losses is not None:
                self._chunk_losses(logits, targets[rows], vocab_size, multiplier, losses[rows], logsumexp[rows])
            slopes = empty(logits.shape, x.dtype, self.device)
            params = CrossEntropyGradientParams(
                logits=logits,
                targets=targets[rows],
                logsumexp=logsumexp[rows],
                factors=factors[rows],
                out=slopes,
                vocab_size=vocab_size,
                width=head.shape[0],
                multiplier=multiplier,
            )
            template = (cuda_type(x.dtype),)
            self.device.launch(CROSS_ENTROPY_GRADIENT, template, rows_config(*logits.shape), params)
            if self._can_read(slopes, head, out[rows]):
                self._matmul_input_gradient(slopes, head, out[rows])
            else:
                turned = self._transposed(head) if turned is None else turned  # once for all chunks
                self.products.matmul(slopes, turned, out=out[rows])
            if summed is not None:
                self._matmul_weight_gradient(slopes, x[rows], summed, accumulate=True)
        if weight_gradient is not None and summed is not None and summed is not weight_gradient:
            self._add_to(weight_gradient, summed[:vocab_size], 1.0)

    def _chunk_losses(
        self, logits: Tensor, targets: Tensor, vocab_size: int, multiplier: float, losses: Tensor, logsumexp: Tensor
    ) -> None:
        params = CrossEntropyParams(
            logits=logits,
            targets=targets,
            losses=losses,
            logsumexp=logsumexp,
            vocab_size=vocab_size,
            width=logits.shape[1],
            multiplier=multiplier,
        )
        self.device.launch(CROSS_ENTROPY, (), row_config(*logits.shape), params)

    def _logits(self, x: Tensor, head: Tensor) -> Tensor:
        return self.products.matmul(x, head, out=empty((x.shape[0], head.shape[0]), float32, self.device))

    def _padded_rows(self, weight: Tensor) -> Tensor:
        """[padded(V), H] of the weight [V, H], with zeros behind the V; itself where nothing is to be added."""
        rows, columns = weight.shape
        if padded(rows) == rows:
            return weight
        head = zeros((padded(rows), columns), weight.dtype, self.device)
        self.device.copy(head.pointer, weight.pointer, weight.nbytes)
        return head


def _chunks(num_tokens: int, width: int) -> Iterator[slice]:
    step = max(CHUNK_ELEMENTS // width // ROWS, 1) * ROWS
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))
