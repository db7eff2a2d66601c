"""`--speculative-config`: vLLM's SpeculativeConfig, each field of it used, taken without effect or refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import msgspec

from tessera.engine.contract.speculation.settings import (
    FOLDER_METHODS,
    MODEL_METHODS,
    Speculation,
    SpeculationMethod,
    make_speculation,
)
from tessera.options.errors import OptionError

SOURCE = "--speculative-config: "
METHODS: dict[str, SpeculationMethod] = {
    **{method: method for method in get_args(SpeculationMethod)},
    "ngram_gpu": "ngram",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
    "ernie_mtp": "mtp",
}
LOOK_UP_MODELS = ("ngram", "[ngram]")  # what `model` is where older versions look up

MEASURED = "--speculation auto measures where drafts pay"
OWN_INDEX = "the suffix index has bounds of its own"
NO_CHOICE = "there is nothing to choose here"
HINTS = {
    "quantization": "a draft model's files say how it is quantised",
    "kv_cache_dtype": "--kv-cache-dtype holds for draft models too",
    "enforce_eager": "--enforce-eager holds for draft models too",
    "draft_load_config": "--load-format holds for draft models too",
    "code_revision": "no code of a model's folder is run",
    "moe_backend": NO_CHOICE,
    "attention_backend": NO_CHOICE,
    "disable_by_batch_size": MEASURED,
    "num_speculative_tokens_per_batch_size": MEASURED,
    "enable_adaptive_verification": MEASURED,
    "disable_padded_drafter_batch": NO_CHOICE,
    "disable_eagle_block_drop": NO_CHOICE,
    "use_local_argmax_reduction": NO_CHOICE,
    "index_share_for_mtp_iteration": NO_CHOICE,
    "disable_mqa_scorer": NO_CHOICE,
    "disable_logprobs": "log-probabilities are as without drafts",
    "draft_sample_method": "no way of choosing drafts changes the tokens",
    "suffix_decoding_max_tree_depth": OWN_INDEX,
    "suffix_decoding_max_cached_requests": OWN_INDEX,
    "suffix_decoding_max_spec_factor": OWN_INDEX,
    "suffix_decoding_min_token_prob": MEASURED,
}


class Refusal(NamedTuple):
    """Of a field that has another value than these; null is always accepted."""

    accepted: tuple[object, ...]
    reason: str


INEXACT = "tokens are never accepted but as the model itself chooses them"
REFUSED = {
    "draft_tensor_parallel_size": Refusal((1,), "a draft model is on one device"),
    "tensor_parallel_size": Refusal((), "vLLM's name for it is draft_tensor_parallel_size, and that must be 1"),
    "use_heterogeneous_vocab": Refusal((False,), "a draft model must have the served model's vocabulary"),
    "parallel_drafting": Refusal((False,), "a draft's tokens are computed one after the other"),
    "speculative_token_tree": Refusal((), "drafts are no trees"),
    "rejection_sample_method": Refusal(("standard",), INEXACT),
    "acceptance_method": Refusal(("rejection_sampler",), INEXACT),
    "synthetic_acceptance_rates": Refusal((), INEXACT),
    "synthetic_acceptance_length": Refusal((), INEXACT),
    "posterior_threshold": Refusal((), INEXACT),
    "posterior_alpha": Refusal((), INEXACT),
    "dspark_draft_topk": Refusal((), "the method dspark is not supported"),
}


class _Used(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that have an effect."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    max_model_len: int | None = None
    revision: str | None = None


def read_speculative_config(value: dict[str, Any]) -> Speculation:
    """`--speculative-config`; without a method it is `ngram`, or by the model's name `eagle3` or `draft_model`.

    Raises: OptionError.
    """
    _refuse_others(value)
    used = {name: each for name, each in value.items() if name not in HINTS and name not in REFUSED}
    try:
        config = msgspec.convert(used, _Used)
    except msgspec.ValidationError as error:
        names = ", ".join(_Used.__struct_fields__)
        raise OptionError(f"{SOURCE}{error}; it takes {names}, and without effect {', '.join(HINTS)}") from None
    if config.method is not None and config.method not in METHODS:
        raise OptionError(f"{SOURCE}method must be one of {', '.join(METHODS)}, not {config.method!r}")
    model = "" if config.model in LOOK_UP_MODELS else config.model or ""
    method = METHODS[config.method] if config.method is not None else _method_of(model)
    if config.max_model_len is not None and config.max_model_len < 1:
        raise OptionError(f"{SOURCE}max_model_len must be at least 1, not {config.max_model_len}")
    if config.revision and model:
        model = f"{model}@{config.revision}"
    found = make_speculation(
        method,
        config.num_speculative_tokens,
        config.prompt_lookup_min,
        config.prompt_lookup_max,
        model=model,
        source=SOURCE,
        names=("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model"),
    )
    return msgspec.structs.replace(found, max_model_len=config.max_model_len if found.uses_model else None)


def _method_of(model: str) -> SpeculationMethod:
    if not model:
        return "ngram"
    return "eagle3" if "eagle3" in model.lower() else "draft_model"


def unused_hints(value: dict[str, Any]) -> list[str]:
    """A sentence for each field that is given without effect. `value` is one that `read_speculative_config` takes."""
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    method = read_speculative_config(value).method
    found = [f"{name} has no effect: {reason}" for name, reason in HINTS.items() if name in given]
    if "max_model_len" in given and method not in MODEL_METHODS:
        found.append(f"max_model_len has no effect: the method {method} has no model of its own")
    if "revision" in given and method not in FOLDER_METHODS:
        found.append(f"revision has no effect: the method {method} has no folder of its own")
    return [f"{SOURCE}{sentence}" for sentence in found]


def _refuse_others(value: dict[str, Any]) -> None:
    for name, (accepted, reason) in REFUSED.items():
        given = value.get(name)
        # bool is int, and a true size is no 1
        if given is None or any(given == each and type(given) is type(each) for each in accepted):
            continue
        texts = " or ".join([*(msgspec.json.encode(each).decode() for each in accepted), "absent"])
        shown = msgspec.json.encode(given).decode()
        raise OptionError(f"{SOURCE}{name} must be {texts}, not {shown}: {reason}")
