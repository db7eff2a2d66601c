"""Specifications of the blocks that a model is made of: what `registry` and `config` make of config.json.

They hold what the forwards implement and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.engine.ops.linear_interface import Activation, is_gated
from tessera.engine.ops.moe_interface import Routing

HeadActivation = Literal["tanh", "gelu", "relu"]
HeadNormForm = Literal["head", "each_head", "width", "rotated_head"]
PoolingKind = Literal["mean", "last", "cls"]
ScoreFunction = Literal["identity", "sigmoid", "softmax", "tanh"]


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm, or LayerNorm with or without a bias."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    bias: bool = False


@dataclass(frozen=True)
class HalfNorms:
    """Norms around one half f of a layer: x becomes of_sum(x + after(f(before(x)))), each where there is one."""

    before: NormSpec | None = None
    after: NormSpec | None = None
    of_sum: NormSpec | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023).

    Attributes:
        scale: factor of q k^T.
        rope: index of the rotary embedding in `ModelConfig.ropes`, None rotates nothing.
        sliding_window: tokens that a query sees, itself included; in an encoder those that it sees on either side.
            None is all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None leaves them.
        qk_norm: of queries and keys, without a bias.
        qk_norm_form: what it is over: each head with one weight for all, or with a weight of its own for each head; all
            heads together; or each head after the rotation instead of before it.
        sinks: each query head has one more logit, a weight, in the denominator of its softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norms: HalfNorms
    rope: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    qk_norm: NormSpec | None = None
    qk_norm_form: HeadNormForm = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        norm, form = self.qk_norm, self.qk_norm_form
        in_place = form in ("each_head", "width")
        assert self.soft_cap is None or not self.sinks, "no attention has a soft cap and sinks"
        assert norm is None or not norm.bias, "norms of queries and keys have no bias"
        assert norm is None or in_place or norm.kind == "rmsnorm", "one weight for all heads goes with an RMSNorm"

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(up(x))); where the activation is gated, up makes gate and up."""

    inner_size: int
    activation: Activation
    norms: HalfNorms
    up_bias: bool = False
    down_bias: bool = False

    @property
    def up_size(self) -> int:
        """Rows of the up projection."""
        return self.inner_size * (2 if is_gated(self.activation) else 1)


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts (Shazeer et al. 2017): the weighted sum of the chosen experts, each an MLP of `inner_size`.

    Attributes:
        routing: how a token's experts and their weights follow from its router logits.
        router_bias: added to these logits.
        correction: added to the scores for the choice alone (DeepSeek-AI 2024, section 2.1.2).
        shared: an MLP that every token passes as well; its norms are those of the mixture.
        shared_gate: its output is multiplied by the sigmoid of a number for each token.
    """

    num_experts: int
    routing: Routing
    inner_size: int
    activation: Activation
    norms: HalfNorms
    up_bias: bool = False
    down_bias: bool = False
    router_bias: bool = False
    correction: bool = False
    shared: MLPSpec | None = None
    shared_gate: bool = False

    @property
    def up_size(self) -> int:
        """Rows of one expert's up projection."""
        return self.inner_size * (2 if is_gated(self.activation) else 1)


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        parallel: both halves see the layer's input (Wang and Komatsuzaki 2021). An MLP that has no norm before it
            then takes the attention's.
        residual_multiplier: of what each half adds.
    """

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    parallel: bool = False
    residual_multiplier: float = 1.0

    def __post_init__(self) -> None:
        sums = self.attention.norms.of_sum or self.mlp.norms.of_sum
        assert not (self.parallel and sums), "parallel halves have one sum"
        assert not (self.parallel and isinstance(self.mlp, MoESpec)), "a mixture of experts follows its attention"

    def adds_product(self, norms: HalfNorms) -> bool:
        """Whether what the half with these norms adds is its last product as it is."""
        return norms.after is None and norms.of_sum is None and self.residual_multiplier == 1.0

    def adds_norm(self, norms: HalfNorms) -> bool:
        """Whether what the half with these norms adds is an RMSNorm of its last product."""
        return norms.after is not None and norms.after.kind == "rmsnorm" and self.residual_multiplier == 1.0

    @property
    def leaves_sum(self) -> bool:
        """Whether the MLP's first product may add what attention leaves it: an RMSNorm before another RMSNorm."""
        if self.parallel or isinstance(self.mlp, MoESpec):
            return False
        attention, mlp = self.attention.norms, self.mlp.norms
        adds = self.adds_norm(attention) and self.adds_norm(mlp) and attention.of_sum is None and mlp.of_sum is None
        return adds and mlp.before is not None and mlp.before.kind == "rmsnorm"


@dataclass(frozen=True)
class ClassifierSpec:
    """Head of a sequence classifier: out(norm(activation(dense(pooled)))), the inner parts where there are any.

    Attributes:
        labels: a name for each logit.
        scores: function of the logits that makes the scores of the classes.
        pooling: how a text's token vectors become the one that the head takes.
        activation: of the dense layer [H, H]; None where the head has none.
        dense: name of that layer in the table of architectures.
        dense_bias, bias: of the dense layer and of the last projection.
        norm: after the activation.
    """

    labels: tuple[str, ...]
    scores: ScoreFunction
    pooling: PoolingKind
    activation: HeadActivation | None = None
    dense: str = "classifier_dense"
    dense_bias: bool = True
    norm: NormSpec | None = None
    bias: bool = True
