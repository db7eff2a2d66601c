"""Sampling parameters: how a sequence's tokens are chosen and when it ends."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

from tessera.engine.contract.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_GRAMMAR_LENGTH = 2**18
MAX_ALLOWED_TOKEN_IDS = 2**16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024  # tokens
MIN_REPETITION_PENALTY = 1e-4  # logits are divided by it, and must stay finite

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True):
    """A grammar that the completion must match from its first token to its last.

    Attributes:
        kind: the notation of `text`: `json_schema`, a schema as JSON; `json_object`, any object,
            the text is empty; `regex`, in Rust's syntax, matching the whole completion; `choice`, a JSON list
            of strings; `lark`, a grammar in llguidance's dialect of Lark; `gbnf`, one in llama.cpp's notation.
        text: at most MAX_GRAMMAR_LENGTH characters.
        param: the request field that it comes from, for errors.
        start_token_id: it holds from after this token (the end of a section of reasoning), which must
            come before the completion may end; None: from the start.
        section_token_id: if set, the grammar waits for `start_token_id` only where the completion begins with this
            token (the start of such a section); after any other first token it holds from the start.
    """

    kind: GrammarKind
    text: str = ""
    param: str = "response_format"
    start_token_id: int | None = None
    section_token_id: int | None = None

    def verify(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a text that is too long or a token that does not exist."""
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequestError(
                f"{self.param} has {len(self.text)} characters of grammar, but may have at most {MAX_GRAMMAR_LENGTH}",
                param=self.param,
            )
        for token_id in (self.start_token_id, self.section_token_id):
            if token_id is not None:
                _token_ids(self.param, (token_id,), vocab_size)


class ReasoningBudget(msgspec.Struct, frozen=True):
    """Most tokens of the reasoning at the beginning of a completion.

    Attributes:
        max_tokens: after this many the end is forced; 0 lets none come.
        end_token_id: ends the reasoning.
        begin_token_id: begins it, among the first tokens of the completion; None: the prompt has begun it.
        param: the request field that it comes from, for errors.
    """

    max_tokens: int
    end_token_id: int
    begin_token_id: int | None = None
    param: str = "thinking_token_budget"

    def verify(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a negative budget or a token that does not exist."""
        _in_range(self.param, self.max_tokens, 0, MAX_INT32)
        for token_id in (self.end_token_id, self.begin_token_id):
            if token_id is not None:
                _token_ids(self.param, (token_id,), vocab_size)


class RowFlag(enum.IntEnum):
    """Bits for the work that a row of logits needs beyond the choice of a token.

    No IntFlag, whose operators take a microsecond; sets of flags are plain integers.
    """

    PENALIZED = 1  # by the tokens in its prompt and output
    FILTERED = 2  # not all tokens can be chosen
    BIASED = 4
    SUPPRESSED = 8  # its end ids, until min_tokens
    CONSTRAINED = 16  # by a token mask
    LOGPROBS = 32  # are reported

    ADJUSTED = PENALIZED | BIASED | SUPPRESSED  # logits change


class RowParameter(NamedTuple):
    """Annotation that makes a field of SamplingParams a field of `SAMPLING_ROW`, which kernels read by the same name.

    Attributes:
        type: of the field in the row, by NumPy's name, which the processes that only pass parameters on do not import.
        low, high: the values accepted; `open_low` excludes `low` itself.
        flag: set on a row whose value is not the field's default, which must mean off.
    """

    type: Literal["int32", "uint64", "float32"]
    low: float
    high: float
    flag: RowFlag | None = None
    open_low: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one sequence, complete: every default has been filled in.

    Order of application to a row of logits: `logit_bias`; stop ids suppressed until `min_tokens`;
    repetition, frequency and presence penalties; tokens that `grammar`, `allowed_token_ids` or `bad_words`
    exclude; temperature, which makes probabilities p = softmax(logit / temperature); the filters, each of what the
    one before has left: top_n_sigma; min_p; top_k; top_p.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: end-of-sequence and stop ids cannot be chosen before this many tokens.
        temperature: 0 is greedy.
        top_k: 0 is off; keeps the k most probable tokens and all ties of the k-th.
        top_p: 1 is off; keeps the smallest set of the most probable tokens that has this share of the probability that
            other filters have left, and all ties of the last (Holtzman et al. 2020).
        min_p: 0 is off; keeps tokens with p >= min_p * max(p) (Nguyen et al. 2024).
        top_n_sigma: 0 is off; keeps logits of at least max - n * sigma, with sigma the standard deviation of the row's
            logits that are not -inf, before temperature (Tang et al. 2024, arXiv 2411.07641; as in llama.cpp).
        repetition_penalty: 1 is off; over prompt and output (Keskar et al. 2019).
        presence_penalty, frequency_penalty: 0 is off; over the output, as OpenAI defines them.
        logit_bias: token id to an addend; -100 or less and 100 or more decide the choice in practice.
        seed: key of the counter-based generator; always set (drawn where the user gave none).
        stop_token_ids: end the sequence with `stop`; the model's own end ids are added by the engine.
        ignore_eos: the model's own end ids do not end the sequence.
        logprobs: number of alternatives to report per token; None reports nothing, 0 the token's own.
        logprob_token_ids: report these ids, in this order, as the alternatives; needs `logprobs`.
        prompt_logprobs: alternatives per token of the prompt, all but the first; the vocabulary's size reports all.
        grammar: what the completion must match; once nothing can follow, the sequence ends with `stop`, whatever
            `min_tokens` and `ignore_eos` say.
        allowed_token_ids: no other ids can be chosen; None allows all.
        bad_words: sequences of ids that cannot come one after the other in the output.
        reasoning_budget: where the reasoning must end, whatever else constrains it.
    """

    max_tokens: int
    min_tokens: Annotated[int, RowParameter("int32", 0, MAX_INT32, RowFlag.SUPPRESSED)] = 0
    temperature: Annotated[float, RowParameter("float32", 0.0, 2.0)] = 1.0
    top_k: Annotated[int, RowParameter("int32", 0, MAX_INT32, RowFlag.FILTERED)] = 0
    top_p: Annotated[float, RowParameter("float32", 0.0, 1.0, RowFlag.FILTERED, open_low=True)] = 1.0
    min_p: Annotated[float, RowParameter("float32", 0.0, 1.0, RowFlag.FILTERED)] = 0.0
    top_n_sigma: Annotated[float, RowParameter("float32", 0.0, 100.0, RowFlag.FILTERED)] = 0.0
    repetition_penalty: Annotated[float, RowParameter("float32", MIN_REPETITION_PENALTY, 10.0, RowFlag.PENALIZED)] = 1.0
    presence_penalty: Annotated[float, RowParameter("float32", -2.0, 2.0, RowFlag.PENALIZED)] = 0.0
    frequency_penalty: Annotated[float, RowParameter("float32", -2.0, 2.0, RowFlag.PENALIZED)] = 0.0
    seed: Annotated[int, RowParameter("uint64", 0, MAX_SEED)] = 0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    reasoning_budget: ReasoningBudget | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens cannot be chosen, or not everywhere."""
        return (
            self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.grammar is not None
            or self.reasoning_budget is not None
        )

    @property
    def flags(self) -> int:
        """RowFlags of the work that a row with these settings needs."""
        flags = 0
        for name, flag, off in _FLAGGED:
            if getattr(self, name) != off:
                flags |= flag
        if self.greedy:
            flags &= ~RowFlag.FILTERED  # which never excludes the most probable token
        if self.logit_bias:
            flags |= RowFlag.BIASED
        if self.logprobs is not None:
            flags |= RowFlag.LOGPROBS
        return flags

    def verify(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first field that is out of range or not finite."""
        _in_range("max_tokens", self.max_tokens, 1, MAX_INT32)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, parameter in ROW_PARAMETERS.items():
            _in_range(name, getattr(self, name), parameter.low, parameter.high, open_low=parameter.open_low)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _at_most("logprob_token_ids", len(self.logprob_token_ids), MAX_LOGPROB_TOKEN_IDS)
        _token_ids("logprob_token_ids", self.logprob_token_ids, vocab_size)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if self.prompt_logprobs is not None and self.prompt_logprobs != vocab_size:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _token_ids("logit_bias", self.logit_bias, vocab_size)
        for bias in self.logit_bias.values():
            _in_range("logit_bias", bias, -100.0, 100.0)
        _token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            _at_most("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
            _token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            _in_range("the number of tokens of each of bad_words", len(word), 1, MAX_BAD_WORD_LENGTH)
            _token_ids("bad_words", word, vocab_size)
        if self.grammar is not None:
            self.grammar.verify(vocab_size)
        if self.reasoning_budget is not None:
            self.reasoning_budget.verify(vocab_size)


def _row_parameters() -> dict[str, RowParameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    annotations = ((name, getattr(hint, "__metadata__", ())) for name, hint in hints.items())
    return {name: found[0] for name, found in annotations if found and isinstance(found[0], RowParameter)}


# By name, in the order of SamplingParams.
ROW_PARAMETERS = _row_parameters()
_DEFAULTS = SamplingParams(max_tokens=1)
# Name, flag and the value that is off, of those that have a flag.
_FLAGGED = [
    (name, parameter.flag, getattr(_DEFAULTS, name)) for name, parameter in ROW_PARAMETERS.items() if parameter.flag
]


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Compared before isfinite: an integer beyond float's range would make that overflow.
    if not (low <= value <= high) or not math.isfinite(value) or (open_low and value == low):
        lower = f"greater than {low}" if open_low else f"at least {low}"
        raise InvalidRequestError(f"{name} must be {lower} and at most {high}, not {value}", param=name)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} may have at most {limit} entries, not {count}", param=name)


def _token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(f"{name} has token id {wrong}, but ids go from 0 to {vocab_size - 1}", param=name)
