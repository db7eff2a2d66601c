"""The choice of experts, and the order of pairs by expert."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutFloat, OutInt
from tessera.engine.ops.cuda.types import MAX_CACHED_CONFIGS, WARP_SIZE, ceil_div, cuda_type
from tessera.engine.ops.moe_interface import MAX_EXPERTS, Routed, Routing
from tessera.engine.tensor import Tensor, int32


class RouteParams(NamedTuple):
    logits: InFloat
    bias: InT
    correction: InFloat
    experts: OutInt
    weights: OutFloat
    num_tokens: Int32
    num_experts: Int32
    top_k: Int32
    kind: Int32
    normalised: Int32
    groups: Int32
    chosen_groups: Int32
    scale: Float32
    jitter: Float32


class GroupPairsParams(NamedTuple):
    experts: InInt
    offsets: OutInt
    pairs: OutInt
    places: OutInt
    num_pairs: Int32
    num_experts: Int32


ROUTE = KernelSpec(
    file="moe/route.cu",
    name="route_kernel",
    template=("T", "PER_LANE"),
    params=RouteParams,
    overlaps=True,
    on_demand=True,
)
GROUP_PAIRS = KernelSpec(
    file="moe/route.cu",
    name="group_pairs_kernel",
    template=(),
    params=GroupPairsParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (ROUTE, GROUP_PAIRS)

ROUTE_WARPS = Constant(4, "tokens of a block")
KINDS = {
    kind: Constant(number) for number, kind in enumerate(("softmax", "softmax_of_chosen", "sigmoid", "sparsemixer"))
}
declare_header(
    "route",
    __name__,
    {"ROUTE_WARPS": ROUTE_WARPS, **{f"ROUTE_{kind.upper()}": number for kind, number in KINDS.items()}},
    (RouteParams, GroupPairsParams),
)

PER_LANE = (1, 2, 4, 8, 16)  # experts
assert PER_LANE[-1] * WARP_SIZE >= MAX_EXPERTS
MOST_GROUP_WARPS = 32
PAIRS_A_WARP = 64  # before another warp is taken
MOST_COUNTS = 11 * 1024  # of warps and experts, in 48 KB


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    routes: list[Instantiation] = [(ROUTE, (dtype, str(count))) for dtype in dtypes for count in PER_LANE]
    return [*routes, (GROUP_PAIRS, ())]


def per_lane(num_experts: int) -> int:
    return next(count for count in PER_LANE if count * WARP_SIZE >= num_experts)


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def group_config(num_pairs: int, num_experts: int) -> LaunchConfig:
    """As many warps as have PAIRS_A_WARP pairs, and counts in shared memory."""
    wanted = ceil_div(num_pairs, PAIRS_A_WARP)
    warps = max(min(wanted, MOST_GROUP_WARPS, MOST_COUNTS // num_experts - 1), 1)
    shared_bytes = ((warps + 1) * num_experts + 1) * int32.itemsize
    return LaunchConfig((1, 1, 1), (warps * WARP_SIZE, 1, 1), shared_bytes)


def launch_route(
    device: CudaDevice,
    logits: Tensor,
    routing: Routing,
    out: Routed,
    bias: Tensor | None,
    correction: Tensor | None,
) -> None:
    """Submit the choice, then the order."""
    num_tokens, num_experts = logits.shape
    params = RouteParams(
        logits=logits,
        bias=bias,
        correction=correction,
        experts=out.experts,
        weights=out.weights,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=routing.top_k,
        kind=KINDS[routing.kind],
        normalised=routing.normalised,
        groups=routing.groups,
        chosen_groups=routing.chosen_groups,
        scale=routing.scale,
        jitter=routing.jitter,
    )
    template = ("float" if bias is None else cuda_type(bias.dtype), str(per_lane(num_experts)))
    config = LaunchConfig((ceil_div(num_tokens, ROUTE_WARPS), 1, 1), (ROUTE_WARPS * WARP_SIZE, 1, 1))
    device.launch(ROUTE, template, config, params)
    launch_order(device, out)


def launch_order(device: CudaDevice, out: Routed) -> None:
    """Submit the order of pairs by the experts chosen."""
    num_pairs, num_experts = out.pairs.size, out.offsets.size - 1
    params = GroupPairsParams(
        experts=out.experts,
        offsets=out.offsets,
        pairs=out.pairs,
        places=out.places,
        num_pairs=num_pairs,
        num_experts=num_experts,
    )
    device.launch(GROUP_PAIRS, (), group_config(num_pairs, num_experts), params)
