"""Layers of multi-token prediction (MTP), which some checkpoints have beside those of the model: each predicts a token
more than the one before it (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2).

With h[p] the model's hidden state of token p, and E[p + 1] the embedding of the token after it:

    x[p] = join [norm(E[p + 1]); norm(h[p])]
    y[p] = the decoder layer of x[0] ... x[p]
    logits of token p + 2 = the model's head of final_norm(y[p])

Checkpoints differ in their names, in which half of `join` comes first, and in which of h and y have passed a final norm
before they are read: `PredictorRule`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.engine.models.registry.architecture import Architecture

LAYER = "model.layers.{i}."
NUM_PREDICTORS = "num_nextn_predict_layers"  # config key


@dataclass(frozen=True)
class PredictorRule:
    """Modules by their names; `{n}` is the number of the model's own layers.

    Attributes:
        layer: begins the names of the decoder layer, in the place of `LAYER`.
        token_norm, state_norm: of the embedding and of the hidden state.
        join: the matrix [H, 2 H] of both.
        final_norm: before the head.
        states_first: the columns for hidden states are the first half of `join`.
        reads_normed: h has passed the model's final norm.
        passes_normed: y passes `final_norm` before a further token is predicted from it.
        sparse: the layer is a mixture of experts.
    """

    layer: str
    token_norm: str
    state_norm: str
    join: str
    final_norm: str
    states_first: bool = False
    reads_normed: bool = False
    passes_normed: bool = False
    sparse: bool = False

    def prefixes(self, num_layers: int) -> tuple[str, ...]:
        """Prefixes of its tensors' names in a checkpoint of so many layers."""
        names = (self.layer, f"{self.token_norm}.", f"{self.state_norm}.", f"{self.join}.")
        return tuple(name.format(n=num_layers) for name in names)


DEEPSEEK_FORM = PredictorRule(
    layer="model.layers.{n}.",
    token_norm="model.layers.{n}.enorm",
    state_norm="model.layers.{n}.hnorm",
    join="model.layers.{n}.eh_proj",
    final_norm="model.layers.{n}.shared_head.norm",
    reads_normed=True,
    passes_normed=True,
    sparse=True,
)
ERNIE_FORM = PredictorRule(
    layer="model.mtp_block.0.",
    token_norm="model.mtp_emb_norm.0",
    state_norm="model.mtp_hidden_norm.0",
    join="model.mtp_linear_proj.0",
    final_norm="model.norm",  # the model's own
)
MIMO_FORM = PredictorRule(
    layer="model.mtp_layers.0.",
    token_norm="model.mtp_layers.0.token_layernorm",
    state_norm="model.mtp_layers.0.hidden_layernorm",
    join="model.mtp_layers.0.input_proj",
    final_norm="model.mtp_layers.0.final_layernorm",
    states_first=True,
    passes_normed=True,
)


def predictor_architecture(architecture: Architecture, num_layers: int) -> Architecture:
    """The first such layer of an architecture that has them, as a model of one layer with the model's embedding and
    head; `num_layers`: of the model."""
    rule = architecture.predictor
    assert rule is not None, "only some architectures have such layers"
    layer = rule.layer.format(n=num_layers)

    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace(LAYER, layer) for name in names)

    weights = {name: named(modules) for name, modules in architecture.weights.items()}
    for field in ("token_norm", "state_norm", "join", "final_norm"):
        weights[field] = (getattr(rule, field).format(n=num_layers),)
    experts = architecture.experts
    if experts is not None:
        forms = (replace(form, up=named(form.up), down=named(form.down)) for form in experts.forms)
        experts = replace(experts, forms=tuple(forms))
    return replace(architecture, weights=weights, experts=experts, predictor=None, ignored=(".*",))
