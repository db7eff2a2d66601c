"""The router of a step of few tokens: norm, logits, choice of experts and order of pairs in one kernel.

A token's choice depends neither on the other tokens nor on their number: every logit's sum runs over the same eight
interleaved parts of k in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InT, Int32, OutFloat, OutInt, OutT
from tessera.engine.ops.cuda.linear.decode import HALF_K, SEGMENT_BYTES, THREADS, UNIT, WARPS
from tessera.engine.ops.cuda.moe.routing import KINDS, launch_order
from tessera.engine.ops.cuda.types import HALF_BYTES, WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.ops.linear_interface import RMSNorm
from tessera.engine.ops.moe_interface import MAX_TOP_K, Routed, Routing
from tessera.engine.tensor import Tensor


class RouteRowsParams(NamedTuple):
    x: InT
    norm: InT
    weight: InT
    bias: InT
    correction: InFloat
    normed: OutT
    experts: OutInt
    weights: OutFloat
    offsets: OutInt
    pairs: OutInt
    places: OutInt
    num_tokens: Int32
    num_experts: Int32
    in_features: Int32
    top_k: Int32
    kind: Int32
    normalised: Int32
    groups: Int32
    chosen_groups: Int32
    eps: Float32
    scale: Float32
    jitter: Float32


ROUTE_ROWS = KernelSpec(
    file="moe/route_rows.cu",
    name="route_rows_kernel",
    template=("T", "TOKENS", "UNITS", "HALVES"),
    params=RouteRowsParams,
    min_arch=90,
    overlaps=True,
    on_demand=True,
)
SPECS = (ROUTE_ROWS,)

BLOCKS = Constant(8, "of a cluster, which share the experts")
declare_header(
    "route_rows",
    __name__,
    {"ROUTER_BLOCKS": BLOCKS, "ROUTER_TOP_K": Constant(MAX_TOP_K, "experts of a token at most")},
    (RouteRowsParams,),
)

MOST_TOKENS = 128  # beyond, products for many rows are faster
STATIC_BYTES = 21 * 1024  # of a block's shared memory, at most


@dataclass(frozen=True)
class RouterTile:
    """A variant of the kernel: tokens of a cluster, units of 8 experts of a block, halves of a row that a warp has."""

    tokens: int
    units: int
    halves: int

    def template(self, dtype: str) -> tuple[str, ...]:
        return (dtype, str(self.tokens), str(self.units), str(self.halves))

    @property
    def most_experts(self) -> int:
        return self.units * UNIT * BLOCKS

    @property
    def most_features(self) -> int:
        return self.halves * HALF_K * WARPS

    @property
    def groups(self) -> int:
        """Of up to 8 tokens."""
        return ceil_div(self.tokens, 8)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        weights = self.units * self.halves * THREADS * SEGMENT_BYTES
        sums = self.groups * WARPS * self.units * WARP_SIZE * 8
        return weights + self.most_features * HALF_BYTES + sums


TOKENS = (1, 8, 16)
TILES = tuple(RouterTile(tokens, units, halves) for tokens in TOKENS for units in (1, 2) for halves in (8, 12))


def tiles_of(num_experts: int, in_features: int) -> list[RouterTile]:
    """The variants for routers of these weights, one for each of TOKENS, or none."""
    able = [tile for tile in TILES if num_experts <= tile.most_experts and in_features <= tile.most_features]
    return [next(tile for tile in able if tile.tokens == tokens) for tokens in TOKENS] if able else []


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(ROUTE_ROWS, tile.template(dtype)) for dtype in dtypes if dtype != "float" for tile in TILES]


def router_kernels(num_experts: int, in_features: int, dtype: str) -> list[Instantiation]:
    """Those for routers of these weights."""
    if dtype == "float":
        return []
    return [(ROUTE_ROWS, tile.template(dtype)) for tile in tiles_of(num_experts, in_features)]


def choose_tile(num_tokens: int, num_experts: int, in_features: int, shared_limit: int) -> RouterTile | None:
    """None where none fits. One cluster orders the pairs too."""
    if num_tokens > MOST_TOKENS:
        return None
    # Of more than 16 tokens the order takes a kernel of its own in any case: more clusters are as good.
    tokens = 1 if num_tokens == 1 else 16 if 8 < num_tokens <= 16 else 8
    tiles = tiles_of(num_experts, in_features)
    return next((t for t in tiles if t.tokens == tokens and t.shared_bytes + STATIC_BYTES <= shared_limit), None)


def launch_router(
    device: CudaDevice,
    x: Tensor,
    norm: RMSNorm | None,
    router: Tensor,
    routing: Routing,
    out: Routed,
    bias: Tensor | None,
    correction: Tensor | None,
) -> bool:
    """Submit norm, product, choice and order; False, and nothing done, where the kernel cannot."""
    (num_tokens, in_features), num_experts = x.shape, router.shape[0]
    normed, gains = (None, None) if norm is None else (norm.scratch, norm.weight)
    if not ROUTE_ROWS.supports(device.arch) or x.dtype.itemsize != HALF_BYTES or router.dtype != x.dtype:
        return False
    if in_features % 8 or not aligned(16, x, router, normed, gains) or (bias is not None and bias.dtype != x.dtype):
        return False
    tile = choose_tile(num_tokens, num_experts, in_features, device.max_shared_bytes)
    if tile is None:
        return False
    params = RouteRowsParams(
        x=x,
        norm=gains,
        weight=router,
        bias=bias,
        correction=correction,
        normed=normed,
        experts=out.experts,
        weights=out.weights,
        offsets=out.offsets,
        pairs=out.pairs,
        places=out.places,
        num_tokens=num_tokens,
        num_experts=num_experts,
        in_features=in_features,
        top_k=routing.top_k,
        kind=KINDS[routing.kind],
        normalised=routing.normalised,
        groups=routing.groups,
        chosen_groups=routing.chosen_groups,
        eps=0.0 if norm is None else norm.eps,
        scale=routing.scale,
        jitter=routing.jitter,
    )
    clusters = ceil_div(num_tokens, tile.tokens)
    config = LaunchConfig((clusters * BLOCKS, 1, 1), (tile.groups * THREADS, 1, 1), tile.shared_bytes)
    device.launch(ROUTE_ROWS, tile.template(cuda_type(x.dtype)), config, params)
    if clusters > 1:
        launch_order(device, out)
    return True
