"""Ranks on GPUs of one host that see each other's memory: kernels that meet there, without the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from tessera.engine.collectives.interface import Collectives, LeftSum, SummedHalf
from tessera.engine.collectives.peers import PeerGroup
from tessera.engine.collectives.trial import try_sums
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig, P
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_MAX,
    ALL_REDUCE_NORM,
    ALL_REDUCE_PARTS,
    BROADCAST,
    GATHER_COLUMNS,
    MAX_BLOCKS,
    MOST_LEFT,
    AllReduceMaxParams,
    AllReduceNormParams,
    AllReduceParams,
    AllReducePartsParams,
    Board,
    BroadcastParams,
    GatherColumnsParams,
    empty_box,
    instantiations,
    launch_own_ids,
    meeting_config,
    most_at_once,
    norm_config,
    sum_config,
)
from tessera.engine.ops.cuda.linear import rank_products
from tessera.engine.ops.cuda.linear.rank_products import MatmulOfRanksParams, MatmulToRanksParams, RowProduct
from tessera.engine.ops.cuda.types import CHUNK, aligned, cuda_type
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.tensor import Tensor, from_numpy, uint32, uint64

STEP_PATIENCE = 4.0  # seconds
START_PATIENCE = 30.0  # seconds at the first steps, for which kernels may still be loaded

logger = logging.getLogger("tessera.engine")


class CudaCollectives(Collectives):
    """Sums in one shot, to the boxes of all ranks; large ones of more than two in two, by writing to all ranks.

    Attributes:
        starting: while ranks warm up, a kernel waits longer for others; not in a CUDA graph.
        patience: seconds that it waits else before it ends the device's work with an error.
    """

    def __init__(self, index: int, group: PeerGroup, device: CudaDevice) -> None:
        """To be called in each rank's thread; returns when the ranks see each other's memory.

        Raises: ConfigError where a device cannot see another's; RankError.
        """
        super().__init__(index, group.rendezvous)
        self.starting, self.patience = True, STEP_PATIENCE
        self._group, self._device = group, device
        self._box = from_numpy(empty_box(self.size), device)
        device.synchronize()
        self._board = device.pinned(len(Board) * uint32.itemsize)
        board = self._board.array.view(np.uint32)
        board[:] = 0
        group.devices[index], group.boxes[index], group.boards[index] = device, self._box.pointer, board
        self.wait_for_all()
        for other in group.devices:
            if other is not None and other is not device:
                device.see_memory_of(other)
        # Of which each finds a multiprocessor, on the smallest of the devices.
        self._multiprocessors = min(other.multiprocessors for other in group.devices if other is not None)
        self._most_blocks = min(MAX_BLOCKS, self._multiprocessors)
        self._boxes = from_numpy(np.array([*group.boxes, board.ctypes.data], uint64), device)
        self.wait_for_all()

    def prepare(self, dtype: np.dtype[np.generic]) -> None:
        """Compile what a model in `dtype` launches, and try it.

        Raises: DeviceError where memory of other devices, though it can be had, has other contents.
        """
        self._device.compile(instantiations((cuda_type(dtype),)))
        self.wait_for_all()
        try_sums(self, self._device, dtype)
        self.wait_for_all()
        logger.info("rank %d on %s (%s) sums with the others", self.index, self._device.name, self._device.device_name)

    def all_reduce(self, x: Tensor) -> None:
        self._all_reduce(x, None)

    def all_reduce_add(self, x: Tensor, residual: Tensor) -> bool:
        self._all_reduce(x, residual)
        return True

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        rows, hidden = x.shape
        plan = norm_config(rows, hidden, self.size, x.dtype.itemsize, self._multiprocessors)
        # What takes two shots has its norm in another kernel: it moves less between ranks than the norm with it would.
        if plan is None or not aligned(16, x, residual, weight, out):
            return False
        config, once = plan
        params = AllReduceNormParams(
            x, residual, weight, out, self._boxes, rows, hidden, eps, self.index, self.size, self._patience
        )
        self._launch(ALL_REDUCE_NORM, (cuda_type(x.dtype), "true" if once else "false"), config, params)
        return True

    def leaves_sums(self, halves: Sequence[SummedHalf]) -> bool:
        kernels: list[Instantiation] = []
        for half in halves:
            last = rank_products.plan(self._device, half.last, None, ends_half=True)
            after = rank_products.plan(self._device, half.next, half.activation, ends_half=False)
            if not rank_products.LEAVES_SUMS or last is None or after is None or last.features > MOST_LEFT:
                kernels = []
                break
            kernels += [last.kernel, after.kernel]
        if not self.least(len(kernels)):  # ranks may have parts of other sizes
            return False
        self._device.compile(kernels)
        return True

    def leave_sum(self, x: Tensor, weight: LinearWeight, half: int, update: Tensor) -> None:
        product = self._row_product(weight, None, ends_half=True)
        params = MatmulToRanksParams(
            x=x,
            weight=weight.dense,
            bias=weight.bias,
            out=update,
            boxes=self._boxes,
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            half=half,
            rank=self.index,
            ranks=self.size,
        )
        spec, template = product.kernel
        self._launch(spec, template, product.config(self._device), params)

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
        product = self._row_product(weight, activation, ends_half=False)
        params = MatmulOfRanksParams(
            x=x,
            update=left.update,
            sum=left.out,
            norm=norm,
            weight=weight.dense,
            bias=weight.bias,
            out=out,
            boxes=self._boxes,
            patience=self._patience,
            out_features=weight.shape[0],
            in_features=weight.shape[1],
            eps=eps,
            gated=product.gate,
            half=left.half,
            rank=self.index,
            ranks=self.size,
        )
        spec, template = product.kernel
        self._launch(spec, template, product.config(self._device), params)

    def _row_product(self, weight: LinearWeight, activation: Activation | None, *, ends_half: bool) -> RowProduct:
        product = rank_products.plan(self._device, weight, activation, ends_half=ends_half)
        assert product is not None, "`leaves_sums` was not asked about this product"
        return product

    def _all_reduce(self, x: Tensor, residual: Tensor | None) -> None:
        """`residual`: gets the sum added, instead of x becoming it."""
        template = cuda_type(x.dtype), "false" if residual is None else "true"
        if self.size == 2 or x.size <= most_at_once(self.size):
            config, pieces = sum_config(x.size, x.dtype.itemsize, self._multiprocessors)
            params = AllReduceParams(x, residual, self._boxes, x.size, self.index, self.size, self._patience)
            self._launch(ALL_REDUCE, (*template, str(pieces)), config, params)
            return
        config = meeting_config(x.size, CHUNK, self._most_blocks)
        parts = AllReducePartsParams(x, residual, self._boxes, x.size, self.index, self.size, self._patience)
        self._launch(ALL_REDUCE_PARTS, template, config, parts)

    def gather_columns(self, x: Tensor, out: Tensor | None, *, first: int, whole: int) -> None:
        rows, width = x.shape
        params = GatherColumnsParams(
            x, out, self._boxes, rows, width, whole, first, self.index, self.size, self._patience
        )
        config = meeting_config(rows * whole // self.size, most_blocks=self._most_blocks)
        self._launch(GATHER_COLUMNS, (), config, params)

    def own_ids(self, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> Tensor:
        launch_own_ids(self._device, ids, sampled, first, out)
        return out

    def norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int, centred: bool) -> None:
        raise ConfigError("norms over the heads of several GPUs are not supported")

    def broadcast(self, x: Tensor) -> None:
        params = BroadcastParams(x, self._boxes, x.size, self.index, self.size, self._patience)
        self._launch(BROADCAST, (), meeting_config(1), params)

    def all_reduce_max(self, x: Tensor) -> None:
        params = AllReduceMaxParams(x, self._boxes, x.size, self.index, self.size, self._patience)
        self._launch(ALL_REDUCE_MAX, (), meeting_config(x.size), params)

    @property
    def _patience(self) -> int:
        """In nanoseconds."""
        patient = self.starting and not self._device.is_capturing
        return int(max(self.patience, START_PATIENCE if patient else 0.0) * 1e9)

    def _launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        self._device.launch(spec, template, config, params)
