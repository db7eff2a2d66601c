"""Settings of speculative decoding: how tokens are drafted, which the model then verifies several at a time."""

from __future__ import annotations

from typing import Literal

import msgspec

from tessera.options.errors import OptionError

SpeculationMode = Literal["off", "auto", "on"]
SpeculationMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]

DEFAULT_DRAFT_TOKENS = 7  # that are looked up
DEFAULT_MODEL_DRAFT_TOKENS = 5  # that a model computes one after the other
DEFAULT_MTP_DRAFT_TOKENS = 3  # of a layer that was trained for one
MAX_DRAFT_TOKENS = 64
MAX_STEP_DRAFTS = 256  # draft tokens of a step, for whose logits there is memory
MAX_LOOKUP = 64
FOLDER_METHODS: tuple[SpeculationMethod, ...] = ("draft_model", "eagle3")  # which need a folder of their own
MODEL_METHODS: tuple[SpeculationMethod, ...] = (*FOLDER_METHODS, "mtp")  # whose drafts are computed on the device
STATE_METHODS: tuple[SpeculationMethod, ...] = ("eagle3", "mtp")  # which read hidden states of the served model
DRAFT_TOKENS_OF: dict[SpeculationMethod, int] = {
    **dict.fromkeys(FOLDER_METHODS, DEFAULT_MODEL_DRAFT_TOKENS),
    "mtp": DEFAULT_MTP_DRAFT_TOKENS,
}
DRAFT_STEP_TOKENS = 2048  # of texts that a draft model reads in a step


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drafted.

    Attributes:
        method: `ngram`, what followed the same last tokens before in prompt and completion; `suffix`, the longest
            end of the text that has occurred before, in it or in earlier completions; `draft_model`, what a smaller
            model of the same vocabulary says; `eagle3`, what an EAGLE-3 head says; `mtp`, what the model's own layer of
            multi-token prediction says.
        model: path of the draft model's folder, or of the head's; empty for the other methods.
        num_tokens: most draft tokens of a sequence in a step.
        lookup_min, lookup_max: fewest and most last tokens that `ngram` looks for.
        always: draft in every step, not only where it pays.
        max_model_len: longest text that a draft model reads; None: as far as its context goes.
    """

    method: SpeculationMethod = "suffix"
    model: str = ""
    num_tokens: int = DEFAULT_DRAFT_TOKENS
    lookup_min: int = 2
    lookup_max: int = 4
    always: bool = False
    max_model_len: int | None = None

    @property
    def uses_model(self) -> bool:
        return self.method in MODEL_METHODS

    @property
    def reads_states(self) -> bool:
        return self.method in STATE_METHODS


OPTION_NAMES = ("--num-speculative-tokens", "--prompt-lookup-min", "--prompt-lookup-max", "--speculative-model")


def make_speculation(
    method: SpeculationMethod,
    num_tokens: int | None,
    lookup_min: int | None,
    lookup_max: int | None,
    *,
    model: str = "",
    always: bool = False,
    source: str = "",
    names: tuple[str, str, str, str] = OPTION_NAMES,
) -> Speculation:
    """Fill in defaults: of two bounds of the look-up, one alone is both. Raises: OptionError, which uses `names`."""
    defaults = Speculation()
    if method in FOLDER_METHODS and not model:
        raise OptionError(f"{source}the method {method} needs {names[3]}, a folder or hub id")
    if model and method == "mtp":
        raise OptionError(f"{source}the method mtp takes no {names[3]}: its layer is in the served model's folder")
    if model and method not in FOLDER_METHODS:
        raise OptionError(f"{source}{names[3]} is for the method {' or '.join(FOLDER_METHODS)}, not for {method}")
    low = lookup_min if lookup_min is not None else min(lookup_max or defaults.lookup_min, defaults.lookup_min)
    high = lookup_max if lookup_max is not None else max(low, defaults.lookup_max)
    if num_tokens is None:
        num_tokens = DRAFT_TOKENS_OF.get(method, DEFAULT_DRAFT_TOKENS)
    for name, number, most in zip(
        names, (num_tokens, low, high), (MAX_DRAFT_TOKENS, MAX_LOOKUP, MAX_LOOKUP), strict=False
    ):
        if not 1 <= number <= most:
            raise OptionError(f"{source}{name} must be a whole number from 1 to {most}, not {number}")
    if low > high:
        raise OptionError(f"{source}{names[1]} ({low}) must be at most {names[2]} ({high})")
    return Speculation(
        method=method, model=model, num_tokens=num_tokens, lookup_min=low, lookup_max=high, always=always
    )
