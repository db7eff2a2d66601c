"""Fields that all generating requests share: sampling, stopping, structured output, stream options, labels."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from tessera.app.schema.fields import (
    MAX_CHOICES,
    MAX_INT32,
    MAX_NAME,
    AllowedTokenIds,
    BadWords,
    Label,
    LogitBias,
    LogprobTokenIds,
    ModelName,
    NotSupported,
    Off,
    On,
    Stops,
    StopTokenIds,
    integer,
    number,
)
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.app.schema.structured_output import (
    GuidedChoice,
    GuidedJson,
    GuidedText,
    OtherJson,
    OtherText,
    ResponseFormat,
    StructuredOutputs,
    other_grammar,
    response_format_grammar,
    structured_outputs_grammar,
)
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_LOGPROBS, MIN_REPETITION_PENALTY, Grammar

MAX_ALL_LOGPROBS = 2**18  # of one response
ALL_LOGPROBS = -1
# Fields that mean the same as `structured_outputs`: the kind of each, and its name in the request.
OTHER_STRUCTURED_OUTPUTS = {
    "guided_json": ("json", "guided_json"),
    "guided_regex": ("regex", "guided_regex"),
    "guided_choice": ("choice", "guided_choice"),
    "guided_grammar": ("grammar", "guided_grammar"),
    "json_schema": ("json", "json_schema"),
    "regex": ("regex", "regex"),
    "ebnf": ("grammar", "ebnf"),
    "gbnf": ("grammar", "grammar"),
}


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: the usage so far in every chunk."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: Off = False
    continuous_usage_stats: Off = False
    include_obfuscation: NotSupported = None


class SamplingFields(RequestModel):
    """Sampling and stopping, in every API. None means that the model's default applies."""

    min_tokens: int | None = integer(0, MAX_INT32, "No end of text and no stop before this many tokens.")
    temperature: float | None = number(0, 2, "0 is greedy.")
    top_p: float | None = number(0, 1, "Nucleus sampling; 1 is off, 0 takes the most probable token.")
    top_k: int | None = integer(-1, MAX_INT32, "Most probable tokens to choose from; 0 and -1 are off.")
    min_p: float | None = number(0, 1, "Least probability relative to the most probable token; 0 is off.")
    top_n_sigma: float | None = number(0, 100, "Standard deviations of the logits below the best; 0 is off.")
    repetition_penalty: float | None = number(MIN_REPETITION_PENALTY, 10, "Over prompt and completion; 1 is off.")
    presence_penalty: float | None = number(-2, 2, "Per token that has occurred in the completion.")
    frequency_penalty: float | None = number(-2, 2, "Per occurrence in the completion.")
    logit_bias: LogitBias = Field(default={})
    seed: int | None = integer(-(2**63), 2**64 - 1, "Equal seeds give equal completions; choice i takes seed + i.")
    stop: Stops = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: Off = False
    ignore_eos: Off = False
    skip_special_tokens: On = True
    priority: int | None = integer(-(2**31), MAX_INT32, "Lower runs first.")
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_NAME, description="Prompt prefixes are shared between equal salts."
    )
    allowed_token_ids: AllowedTokenIds = ()
    bad_words: BadWords = ()
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="Structured output beyond the API's own; only one kind may be given."
    )
    guided_json: GuidedJson = None
    guided_regex: GuidedText = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedText = None
    json_schema: OtherJson = Field(default=None, description="As structured_outputs.json, by llama.cpp's name.")
    regex: OtherText = Field(default=None, description="As structured_outputs.regex, by SGLang's name.")
    ebnf: OtherText = Field(default=None, description="As structured_outputs.grammar, by SGLang's name.")
    gbnf: OtherText = Field(
        default=None, alias="grammar", description="As structured_outputs.grammar, by llama.cpp's name."
    )


class GenerationRequest(SamplingFields):
    """Fields of chat and text completions.

    Attributes:
        response_format_param: the API's own name for `response_format`, for errors.
        always_clamps: a token limit beyond the context is cut to it, rather than refused.
    """

    response_format_param: ClassVar[str] = "response_format"
    always_clamps: ClassVar[bool] = False
    refused: ClassVar[FieldValues] = {
        "early_stopping": (False,),
        "guided_whitespace_pattern": (),
        "length_penalty": (1.0, 1),
        "logits_processors": ([],),
        "padding": (False,),
        "prompt_embeds": ([],),
        "repetition_detection": (),
        "return_token_offsets": (False,),
        "spaces_between_special_tokens": (True,),
        "structural_tag": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    hints: ClassVar[FieldValues] = {
        "ec_transfer_params": ({},),
        "guided_decoding_backend": (),
        "kv_transfer_params": ({},),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "request_id": (),
        "return_mm_kwargs": (True,),
        "routed_experts_prompt_start": (0,),
        "service_tier": ("auto", "default"),
        "session_id": (),
        "stream_interval": (1,),
    }

    model: ModelName = ""
    max_tokens: int | None = integer(1, MAX_INT32, "Most tokens to generate; the rest of the context if omitted.")
    n: int | None = integer(1, MAX_CHOICES, "Completions per prompt.")
    stream: Off = False
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = integer(
        -1, MAX_INT32, "Keep only this many tokens of the prompt; -1 as many as the context holds."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Where truncate_prompt_tokens takes tokens away; left if omitted."
    )
    prompt_logprobs: int | None = integer(
        -1,
        MAX_LOGPROBS,
        f"Alternatives to report per token of the prompt; not with stream. -1 reports the whole vocabulary, where that"
        f" is at most {MAX_ALL_LOGPROBS} log-probabilities.",
    )
    logprob_token_ids: LogprobTokenIds = ()
    response_format: ResponseFormat | None = Field(
        default=None, description="Text, any JSON object, or JSON that matches a schema."
    )
    return_token_ids: Off = False
    return_tokens_as_token_ids: Off = Field(
        default=False, description="Tokens of log-probabilities are called token_id:ID."
    )
    add_special_tokens: StrictBool | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """Most tokens to generate, None for the rest of the context, and the name of the field that set it."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None reports nothing."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens; ALL_LOGPROBS reports the whole vocabulary."""
        return self.prompt_logprobs

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that completions must match. Raises InvalidRequestError where it is not valid."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[Grammar]:
        """A grammar for each field that asks for one; `check` refuses more than one."""
        found = []
        if self.response_format is not None:
            grammar = response_format_grammar(self.response_format, self.response_format_param)
            found += [grammar] if grammar is not None else []
        if self.structured_outputs is not None:
            found.append(structured_outputs_grammar(self.structured_outputs))
        for field, (kind, name) in OTHER_STRUCTURED_OUTPUTS.items():
            if (value := getattr(self, field)) is not None:
                found.append(other_grammar(kind, value, name))
        return found

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        params = [grammar.param for grammar in self._grammars()]
        if len(params) > 1:
            raise InvalidRequestError(f"{params[0]} and {params[1]} cannot both be given.", param=params[1])
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not allowed when stream is true.", param="prompt_logprobs")
        if self.logprob_token_ids and self.num_logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids is only allowed together with logprobs.", param="logprob_token_ids"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1 or at least 1, not 0.", param="truncate_prompt_tokens"
            )
