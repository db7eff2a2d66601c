"""In which words config.json describes a mixture of experts, and how checkpoints store its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.engine.models.fields import Fields
from tessera.engine.models.specs import HalfNorms, MLPSpec, MoESpec
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import MAX_EXPERT_GROUPS, MAX_EXPERTS, MAX_TOP_K, Routing

MAX_INNER = 2**20

LayerRule = Callable[[Fields, int], tuple[bool, ...]]  # number of layers -> which are mixtures
RoutingRule = Callable[[Fields, int, int], Routing]  # number of experts, experts of a token
SizeRule = Callable[[Fields], int | None]


@dataclass(frozen=True)
class ExpertForm:
    """One way to store the experts of a layer, by whole tensor names: `{i}` is the layer, `{e}` the expert.

    A name without `{e}` is that of all experts, [E, rows, columns].

    Attributes:
        up: gate and up, or one tensor of both.
        transposed: matrices are stored [in, out].
        interleaved: rows of gate and up alternate.
        mxfp4: NAME_blocks [E, rows, columns / 32, 16] has pairs of four-bit numbers, NAME_scales [E, rows,
            columns / 32] the exponents of 32 each (Open Compute Project 2023, MX formats).
    """

    up: tuple[str, ...]
    down: tuple[str, ...]
    up_bias: tuple[str, ...] = ()
    down_bias: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False
    mxfp4: bool = False


@dataclass(frozen=True)
class ExpertsRule:
    """What an architecture's mixtures are; config keys by their names there.

    Attributes:
        forms: the first of which the checkpoint has a tensor counts; of two by the same names, which differ in
            `transposed`, the one whose shape it has.
        num_experts, inner_size: config keys.
        routing: how experts are chosen.
        layers: which layers are mixtures.
        activation: None is that of dense layers.
        expert_bias, router_bias, correction: whether there are such weights, see `MoESpec`.
        shared_size: inner size of the shared expert, None without one.
        shared_gate: it has a gate.
    """

    forms: tuple[ExpertForm, ...]
    routing: RoutingRule
    num_experts: str = "num_experts"
    inner_size: str = "moe_intermediate_size"
    layers: LayerRule = lambda config, num_layers: (True,) * num_layers
    activation: Activation | None = None
    expert_bias: bool = False
    router_bias: bool = False
    correction: bool = False
    shared_size: SizeRule = lambda config: None
    shared_gate: bool = False

    @property
    def expert_modules(self) -> list[str]:
        """Of matrices that checkpoints have for each expert by itself."""
        names = [name for form in self.forms for name in (*form.up, *form.down)]
        return [name.removesuffix(".weight") for name in names if "{e}" in name]


def parse_experts(config: Fields, rule: ExpertsRule, activation: Activation, norms: HalfNorms) -> MoESpec:
    """The mixture of an architecture's layers; `activation` is that of its dense ones.

    Raises: ModelError naming the key at fault.
    """
    num_experts = config.integer(rule.num_experts, 1, MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", 1, min(num_experts, MAX_TOP_K))
    shared_size = rule.shared_size(config)
    return MoESpec(
        num_experts=num_experts,
        routing=rule.routing(config, num_experts, top_k),
        inner_size=config.integer(rule.inner_size, 1, MAX_INNER),
        activation=rule.activation or activation,
        norms=norms,
        up_bias=rule.expert_bias,
        down_bias=rule.expert_bias,
        router_bias=rule.router_bias,
        correction=rule.correction,
        shared=None if shared_size is None else MLPSpec(shared_size, activation, HalfNorms()),
        shared_gate=rule.shared_gate,
    )


# -- which layers ---------------------------------------------------------------------------------


def sparse_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    step = config.integer("decoder_sparse_step", 1, 2**31)
    dense = config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        config.refuse("mlp_only_layers", "a list of layer numbers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def layers_after_dense(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """All but the first first_k_dense_replace."""
    first = config.integer("first_k_dense_replace", 0, 2**31)
    return tuple(layer >= first for layer in range(num_layers))


def layers_between(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index, where -1 is the last."""
    first, step = config.integer("moe_layer_start_index", 0, 2**31), config.integer("moe_layer_interval", 1, 2**31)
    last = config.integer("moe_layer_end_index", -1, 2**31)
    last = num_layers - 1 if last == -1 else last
    return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(num_layers))


# -- routing --------------------------------------------------------------------------------------


def softmax(config: Fields, num_experts: int, top_k: int) -> Routing:
    return Routing("softmax", top_k, normalised=config.boolean("norm_topk_prob"))


def softmax_normalised(config: Fields, num_experts: int, top_k: int) -> Routing:
    return Routing("softmax", top_k, normalised=True)


def softmax_of_chosen(config: Fields, num_experts: int, top_k: int) -> Routing:
    return Routing("softmax_of_chosen", top_k)


def sparsemixer(config: Fields, num_experts: int, top_k: int) -> Routing:
    return Routing("sparsemixer", top_k, jitter=config.number("router_jitter_noise", 0.0, 1.0))


def grouped_sigmoid(config: Fields, num_experts: int, top_k: int) -> Routing:
    groups = config.integer("n_group", 1, min(num_experts, MAX_EXPERT_GROUPS))
    size = num_experts // groups
    if num_experts % groups or (groups > 1 and size < 2):
        config.refuse("n_group", f"1, or a divisor of {num_experts} that leaves two experts in a group")
    chosen = config.integer("topk_group", 1, groups)
    if chosen * size < top_k:
        config.refuse("topk_group", f"groups with {top_k} experts together")
    return Routing(
        "sigmoid",
        top_k,
        normalised=config.boolean("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1e-6, 1e6),
        groups=groups,
        chosen_groups=chosen,
    )
