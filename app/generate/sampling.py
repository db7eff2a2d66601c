"""Sampling parameters: a request's fields over the model's defaults."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tessera.app.schema.generation_fields import ALL_LOGPROBS, MAX_ALL_LOGPROBS, GenerationRequest
from tessera.app.text.tokenizer import Tokenizer, load_json
from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError
from tessera.engine.contract.messages import EngineInfo
from tessera.engine.contract.sampling_params import (
    MAX_LOGPROBS,
    MAX_SEED,
    ROW_PARAMETERS,
    Grammar,
    ReasoningBudget,
    SamplingParams,
)
from tessera.engine.gguf.names import is_gguf

logger = logging.getLogger("tessera.serve")

SEED_BITS = 64


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for the fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults in the model's generation_config.json, if it has one: greedy where `do_sample` is false. In a GGUF
    file they are metadata.

    A value that no request may have is left out, which the log says.

    Raises:
        ModelError: the file cannot be read.
    """
    source = folder if is_gguf(folder) else folder / "generation_config.json"
    config = _gguf_defaults(folder) if is_gguf(folder) else load_json(source)
    given: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        if config.get(name) is None:
            continue
        value = 0 if name == "top_k" and config[name] == -1 else config[name]
        try:
            defaults = msgspec.convert({name: value}, SamplingDefaults)
            SamplingParams(max_tokens=1, **msgspec.structs.asdict(defaults)).verify(vocab_size=1)
        except (msgspec.ValidationError, InvalidRequestError) as error:
            logger.warning("%s: %s is left out: %s", source, name, error)
            continue
        given[name] = value
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    return msgspec.convert(given, SamplingDefaults)


def _gguf_defaults(path: Path) -> dict[str, Any]:
    from tessera.engine.gguf.sampling import read_gguf_sampling

    found, left_out = read_gguf_sampling(path)
    if left_out:
        logger.warning("%s: the sampling parameters %s are left out", path, ", ".join(left_out))
    return dict(found)


def spellings_of(words: Collection[str]) -> list[str]:
    """Each word at the beginning of a text and after a space."""
    bodies = [word.lstrip(" ") for word in words]
    return [text for body in bodies for text in (body, f" {body}")]


def bad_word_ids(words: Collection[str], spellings: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of the words' spellings.

    Raises:
        InvalidRequestError: a word has no tokens.
    """
    found = [tuple(token_ids) for token_ids in tokenizer.encode_all(spellings, add_special_tokens=False)]
    for word, *both in zip(words, found[::2], found[1::2], strict=True):
        if not any(both):
            raise InvalidRequestError(f"bad_words has {word!r}, which is no token of this model.", param="bad_words")
    return tuple(dict.fromkeys(filter(None, found)))


def check_all_logprobs(request: GenerationRequest, prompts: Sequence[Sequence[int]], info: EngineInfo) -> None:
    """Raise InvalidRequestError where `prompt_logprobs: -1` would report too many log-probabilities."""
    if request.num_prompt_logprobs != ALL_LOGPROBS:
        return
    asked = sum(len(prompt) - 1 for prompt in prompts) * info.vocab_size
    if asked > MAX_ALL_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs -1 reports the whole vocabulary, {info.vocab_size} tokens, for each token of the prompt"
            f" but the first; that may be at most {MAX_ALL_LOGPROBS} log-probabilities, not {asked}: ask for up to"
            f" {MAX_LOGPROBS} per token, or send a shorter prompt.",
            param="prompt_logprobs",
        )


def sampling_params(
    request: GenerationRequest,
    prompt_lengths: Sequence[int],
    info: EngineInfo,
    defaults: SamplingDefaults,
    grammar: Grammar | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    default_seed: int | None = None,
    reasoning_budget: ReasoningBudget | None = None,
) -> list[list[SamplingParams]]:
    """Parameters of each prompt's `n` sequences. They are verified once, and share whatever is large.

    Args:
        prompt_lengths: in tokens.
        grammar: what the completions must match.
        bad_words: token ids of texts that they must not have.
        default_seed: seed of requests without one; sequence i of a prompt takes seed + i.

    Raises:
        InvalidRequestError: a field is out of range, or prompt and completion exceed the context.
    """
    rooms = [info.max_model_len - length for length in prompt_lengths]
    limit, limit_name = request.token_limit
    if limit is not None and limit > info.max_model_len and not request.always_clamps:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens: input length and `max_tokens` exceed"
            f" context limit: {prompt_lengths[0]} + {limit} > {info.max_model_len}.",
            param=limit_name,
        )
    for room in rooms:
        asked = room if limit is None else limit
        if request.min_tokens is not None and request.min_tokens > asked:
            raise InvalidRequestError(
                f"min_tokens ({request.min_tokens}) must be at most {limit_name} ({asked}).", param="min_tokens"
            )
    # The prompt's logits come with a token, wanted or not.
    most = [max(min(room if limit is None else limit, room), 1) for room in rooms]
    base = SamplingParams(
        max_tokens=max(most),
        **_row_parameters(request, defaults, max(most)),
        logit_bias=request.logit_bias,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=0 if request.logprob_token_ids else request.num_logprobs,
        logprob_token_ids=request.logprob_token_ids,
        prompt_logprobs=info.vocab_size if request.num_prompt_logprobs == ALL_LOGPROBS else request.num_prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=request.allowed_token_ids or None,
        bad_words=bad_words,
        reasoning_budget=reasoning_budget,
    )
    base.verify(info.vocab_size)
    seeds = _seeds(default_seed if request.seed is None else request.seed, request.num_choices, len(most))
    return [
        [
            msgspec.structs.replace(
                base,
                seed=row[index],
                max_tokens=max_tokens,
                min_tokens=min(base.min_tokens, max_tokens),
                # Streamed choices each need the prompt's log-probabilities with their first token; otherwise one copy
                # will do.
                prompt_logprobs=base.prompt_logprobs if request.stream or index == 0 else None,
            )
            for index in range(request.num_choices)
        ]
        for max_tokens, row in zip(most, seeds, strict=True)
    ]


def _row_parameters(request: GenerationRequest, defaults: SamplingDefaults, max_tokens: int) -> dict[str, Any]:
    """The parameters of the engine's rows that the request or the model's defaults give; seeds differ by choice."""
    values = msgspec.structs.asdict(defaults)
    for name in ROW_PARAMETERS:
        value = getattr(request, name)
        if value is not None and name != "seed":
            values[name] = value
    values["top_k"] = max(0, values["top_k"])
    if values["top_p"] == 0:  # the smallest set of tokens: one
        values |= {"top_p": 1.0, "top_k": 1}
    if values.get("min_tokens"):
        values["min_tokens"] = min(values["min_tokens"], max_tokens)
    return values


def _seeds(seed: int | None, num_choices: int, num_prompts: int) -> list[Sequence[int]]:
    """Of each prompt's choices. Random ones are no secrets; the operating system's bytes may wait for a lock."""
    if seed is None:
        return [[random.getrandbits(SEED_BITS) for _ in range(num_choices)] for _ in range(num_prompts)]
    return [[(seed + index) & MAX_SEED for index in range(num_choices)]] * num_prompts
