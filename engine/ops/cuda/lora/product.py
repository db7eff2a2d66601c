"""The product of few rows that adds those of their adapters itself, behind the product with A."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.tensor_map import as_lines_map, box_map
from tessera.engine.formats import AdapterRows, LoraStack
from tessera.engine.ops.cuda.candidates import Chooser
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.problem import LinearOperands, LinearProblem
from tessera.engine.ops.cuda.linear.sm90_kernels import TILE_K, WGMMA_M
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.lora.expand import BegunAdapters
from tessera.engine.ops.cuda.lora.kernels import LORA_RANKS, SM90_ADAPTED_MATMUL, Sm90AdaptedMatmulParams
from tessera.engine.ops.cuda.lora.shapes import fits_tensor_cores, part_starts
from tessera.engine.ops.cuda.lora.shrink import inverses_of, shrink_config_of
from tessera.engine.ops.cuda.types import WARP_SIZE, aligned, cuda_type
from tessera.engine.tensor import bfloat16

BFLOAT16 = cuda_type(bfloat16)
WARPGROUP_COLUMNS = tuple(tile.warpgroup_n for tile in sm90.TILES if tile.warpgroups_m == 1)
LINE_ROWS = TILE_K // LORA_RANKS  # of B, that are 64 elements


def template_of(warpgroup_n: int, *, gated: bool) -> tuple[str, ...]:
    return (BFLOAT16, str(warpgroup_n), "true" if gated else "false")


def choose_adapted(
    kernels: Chooser[LinearProblem, LinearOperands], problem: LinearProblem, stack: LoraStack
) -> sm90.Plan | None:
    """The plan of the product without adapters, if it can add them: then rows without one have the same bits."""
    num_slots, _, max_rank, _ = stack.a.shape
    fits = problem.num_rows <= WGMMA_M and num_slots <= WARP_SIZE and max_rank == LORA_RANKS
    if not choices.FUSES_PRODUCTS or (problem.gated and not choices.FUSES_GATES) or not fits:
        return None
    choice = kernels.choose(problem)
    if choice is None or choice.candidate.name != "sm90" or {problem.dtype, problem.out_dtype} != {BFLOAT16}:
        return None
    plan: sm90.Plan = choice.plan
    inner = problem.features
    if problem.gated:
        divided = stack.part_rows == (inner, inner)
    else:
        divided = all(start == inner or start % plan.tile.warpgroup_n == 0 for start in part_starts(stack))
    return plan if divided and plan.tile.warpgroups_m == 1 else None


def launch_adapted(
    device: CudaDevice,
    kernels: Chooser[LinearProblem, LinearOperands],
    problem: LinearProblem,
    operands: LinearOperands,
    stack: LoraStack,
    rows: AdapterRows,
    *,
    of_norm: bool,
    begun: BegunAdapters | None,
) -> bool:
    """The product of `operands` and its adapters, of which `launch_shrink`, or what `of_norm` and `begun` say, has done
    the product with A; False, and nothing done, where no kernel does that."""
    x, weight, bias, out, *_ = operands
    plan = choose_adapted(kernels, problem, stack)
    if plan is None or not fits_tensor_cores(x, stack, out):
        return False
    num_rows, num_slots, parts = problem.num_rows, stack.a.shape[0], stack.a.shape[1]
    shrunk = stack.selection.shrunk if begun is None else begun.sums
    if not aligned(16, shrunk):
        return False
    slices = shrink_config_of(device, x, stack).grid[2] if begun is None else begun.slices
    second, third = part_starts(stack)
    params = Sm90AdaptedMatmulParams(
        x_map=box_map(x, plan.tile.m),
        x_tail_map=sm90.tail_map(x, plan),
        weight_map=box_map(weight, plan.weight_box_rows(silu_mul=problem.gated)),
        b_map=as_lines_map(stack.b, plan.tile.n // (2 if problem.gated else 1) // LINE_ROWS),
        bias=bias,
        shrunk=shrunk,
        inverses=inverses_of(stack, num_rows, slices) if of_norm else None,
        factors=stack.factors,
        ranks=stack.selection.ranks,
        slots=rows.slots,
        out=out,
        num_rows=num_rows,
        num_slots=num_slots,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        parts=parts,
        second=second,
        third=third,
        slices=slices,
        splits=plan.splits,
        stages=plan.stages(problem.out_itemsize, device.max_shared_bytes),
        accumulate=problem.accumulates,
        gated=problem.gate,
    )
    template = template_of(plan.tile.warpgroup_n, gated=problem.gated)
    device.launch(SM90_ADAPTED_MATMUL, template, sm90.config_of(device, problem, plan), params)
    return True
