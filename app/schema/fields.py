"""Field types that several requests share, each with its bounds and one sentence for a value outside of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from tessera.app.schema.request import MAX_WHOLE_FLOATS
from tessera.engine.contract.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
)

MAX_INT32 = 2**31 - 1
MAX_TEXT = 2**23  # characters, more than any context holds; the model's context is checked later
MAX_KEYS = 1024
MAX_NAME = 256
MAX_PARTS = 1024
MAX_METADATA = 16

MAX_STOPS = 64  # OpenAI takes 4; evaluation harnesses and chat front ends send more
MAX_STOP_LENGTH = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_PROMPT_IDS = 2**20
MAX_TOKEN_ID = 2**63
ENTRIES_AT_A_TIME = 2**14  # that are looked at in one call, in less than a millisecond

T = TypeVar("T")

_INTEGER = re.compile(r"-?[0-9]{1,19}\Z")


def wrong(message: str) -> PydanticCustomError:
    """An error whose text continues the field's name."""
    return PydanticCustomError("field", "{text}", {"text": message})


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list or any(type(stop) is not str for stop in stops):
        raise wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"may have at most {MAX_STOPS} strings, not {len(stops)}")
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise wrong(f"must have strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if type(value) is not dict:
        raise wrong("must be an object that maps token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise wrong(f"may have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    biases = {}
    for key, bias in value.items():
        if not _INTEGER.match(key):
            raise wrong(f"has the key {key[:40]!r}, which is not a token id")
        if type(bias) not in (int, float) or not math.isfinite(bias) or not -100 <= bias <= 100:
            raise wrong("must have numbers from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _prompts(value: Any) -> list[str | list[int]]:
    """One or several prompts, each text or token ids, always as a list of prompts."""
    if type(value) is list and len(value) > MAX_PROMPT_IDS:  # before each of them is looked at
        raise wrong(f"may have at most {MAX_PROMPTS} prompts, or {MAX_PROMPT_IDS} token ids")
    if type(value) is list and value and _is_token_ids(value):
        return [value]
    prompts: list[str | list[int]]
    if type(value) is str:
        prompts = [value]
    elif type(value) is list and value:
        prompts = value
    else:
        raise wrong("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")
    if len(prompts) > MAX_PROMPTS:
        raise wrong(f"may have at most {MAX_PROMPTS} prompts, not {len(prompts)}")
    for prompt in prompts:
        if type(prompt) is not str and not (type(prompt) is list and (not prompt or _is_token_ids(prompt))):
            raise wrong("must be a string, a list of strings, a list of token ids or a list of such lists")
        if not prompt:
            raise wrong("must not be empty")
        if type(prompt) is str and len(prompt) > MAX_TEXT:
            raise wrong(f"may have at most {MAX_TEXT} characters, not {len(prompt)}")
        if type(prompt) is list and len(prompt) > MAX_PROMPT_IDS:
            raise wrong(f"may have at most {MAX_PROMPT_IDS} token ids, not {len(prompt)}")
    return prompts


def _is_token_ids(values: list[Any]) -> bool:
    """Whether all are integers, which booleans are not."""
    return _all_fit(values, list[int])


def _all_fit(values: list[Any], kind: Any) -> bool:
    """Whether entries are what a list of this type has. Of a million at once the call keeps the interpreter's lock."""
    try:
        for begin in range(0, len(values), ENTRIES_AT_A_TIME):
            msgspec.convert(values[begin : begin + ENTRIES_AT_A_TIME], kind)
    except msgspec.ValidationError:
        return False
    return True


def _empty_for_null(value: Any) -> Any:
    return () if value is None else tuple(value) if type(value) is list else value


def _ids_or_none(value: Any) -> Any:
    if type(value) is list and not _are_ids(value, -MAX_TOKEN_ID):
        value = _cut_after_wrong_ids(value, -MAX_TOKEN_ID)
    return _empty_for_null(value)


def _are_ids(values: list[Any], least: int) -> bool:
    # msgspec has integers of 64 bits.
    return _all_fit(values, list[Annotated[int, msgspec.Meta(ge=least, le=MAX_TOKEN_ID - 1)]])


def _cut_after_wrong_ids(values: list[Any], least: int) -> list[Any]:
    """All entries, or those up to one that pydantic refuses, as it does `MAX_WHOLE_FLOATS` before.

    It makes an error of each, for 5 us in which no other thread runs. Those before may be integers written as floats.
    """
    wrong = (at for at, entry in enumerate(values) if type(entry) is not int or not least <= entry <= MAX_TOKEN_ID)
    last = next(islice(wrong, MAX_WHOLE_FLOATS, None), None)
    return values if last is None else values[: last + 1]


def ids_from(least: int) -> WrapValidator:
    """Token ids, for a million of which pydantic holds the interpreter's lock for 50 ms; errors are pydantic's."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if type(value) is list and len(value) <= MAX_PROMPT_IDS:
            if _are_ids(value, least):
                return value
            value = _cut_after_wrong_ids(value, least)
        return validate(value)

    return WrapValidator(check)


def at_most(most: int) -> BeforeValidator:
    """Refuses a longer list or object before its entries are validated; pydantic would only count valid entries."""

    def check(value: Any) -> Any:
        if type(value) in (list, dict) and len(value) > most:
            raise wrong(f"may have at most {most} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


# A list of which the first wrong entry ends the validation: pydantic makes an error of each, 5 us in which no other
# thread runs, and a response tells of the first alone. Not for numbers, of which several may have to be made integers.
Entries = Annotated[list[T], Field(fail_fast=True)]

Text = Annotated[str, Field(max_length=MAX_TEXT)]
JsonObject = Annotated[dict[str, Any], Field(max_length=MAX_KEYS)]

# Inputs of the validators above, for /openapi.json.
StopInput = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopsInput = StopInput | Annotated[list[StopInput], Field(max_length=MAX_STOPS)] | None
LogitBiasInput = (
    Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,19}$")], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_LOGIT_BIAS),
    ]
    | None
)
PromptText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
PromptIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1, max_length=MAX_PROMPT_IDS)
]
PromptsInput = (
    PromptText
    | PromptIds
    | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS)]
)

Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stops, json_schema_input_type=StopsInput),
    Field(description=f"A string or up to {MAX_STOPS} of them, 1 to {MAX_STOP_LENGTH} characters each."),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias, json_schema_input_type=LogitBiasInput),
    Field(description=f"Token ids to addends from -100 to 100; at most {MAX_LOGIT_BIAS}."),
]
Prompts = Annotated[
    list[Any],
    PlainValidator(_prompts, json_schema_input_type=PromptsInput),
    Field(description=f"Text, token ids, or a list of either; at most {MAX_PROMPTS} prompts."),
]
TokenId = Annotated[int, Field(ge=-MAX_TOKEN_ID, le=MAX_TOKEN_ID)]
StopTokenIdsInput = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None
AllowedTokenIdsInput = Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None
StopTokenIds = Annotated[
    tuple[TokenId, ...],
    Field(max_length=MAX_STOP_TOKEN_IDS),
    BeforeValidator(_ids_or_none, json_schema_input_type=StopTokenIdsInput),
    Field(description=f"At most {MAX_STOP_TOKEN_IDS} ids of the vocabulary."),
]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
BadWordsInput = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None
BadWords = Annotated[
    tuple[BadWord, ...],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
    BeforeValidator(_empty_for_null, json_schema_input_type=BadWordsInput),
    Field(description=f"Up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters that are not generated."),
]
LogprobTokenIdsInput = Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None
LogprobTokenIds = Annotated[
    tuple[TokenId, ...],
    Field(max_length=MAX_LOGPROB_TOKEN_IDS),
    BeforeValidator(_ids_or_none, json_schema_input_type=LogprobTokenIdsInput),
    Field(
        description=f"Up to {MAX_LOGPROB_TOKEN_IDS} ids of the vocabulary to report in place of the best tokens;"
        " needs logprobs.",
    ),
]
AllowedTokenIds = Annotated[
    tuple[TokenId, ...],
    Field(max_length=MAX_ALLOWED_TOKEN_IDS),
    BeforeValidator(_ids_or_none, json_schema_input_type=AllowedTokenIdsInput),
    Field(
        description=f"At most {MAX_ALLOWED_TOKEN_IDS} ids of the vocabulary, the only ones to choose from; none: all.",
    ),
]


def number(low: float, high: float, meaning: str, *, open_low: bool = False) -> Any:
    """A Field for a finite number within [low, high], or (low, high] with `open_low`."""
    lower: dict[str, Any] = {"gt" if open_low else "ge": low}
    return Field(default=None, le=high, allow_inf_nan=False, description=meaning, **lower)


def integer(low: int, high: int, meaning: str, *, default: int | None = None) -> Any:
    """A Field for an integer within [low, high]."""
    return Field(default=default, ge=low, le=high, description=meaning)


def _empty_name_for_null(value: Any) -> Any:
    return "" if value is None else value


def _false_for_null(value: Any) -> Any:
    return False if value is None else value


def _true_for_null(value: Any) -> Any:
    return True if value is None else value


def _false_or_null(value: Any) -> None:
    if value is not None and value is not False:
        raise wrong("is not supported by this server")


Off = Annotated[StrictBool, BeforeValidator(_false_for_null, json_schema_input_type=bool | None)]
On = Annotated[StrictBool, BeforeValidator(_true_for_null, json_schema_input_type=bool | None)]
NotSupported = Annotated[None, PlainValidator(_false_or_null, json_schema_input_type=Literal[False] | None)]
ModelName = Annotated[
    str,
    BeforeValidator(_empty_name_for_null, json_schema_input_type=Annotated[str, Field(max_length=MAX_NAME)] | None),
    Field(max_length=MAX_NAME, description="A name of /v1/models; the served model if omitted or empty."),
]
Label = Annotated[str, Field(max_length=1024)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    at_most(MAX_METADATA),
]


class TextPart(BaseModel):
    """A part of a message in Chat Completions and in Anthropic's Messages."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]
    text: Text


TextContent = Text | Annotated[Entries[TextPart], Field(max_length=MAX_PARTS)]


def text_of(value: Any, keys: Mapping[str, str]) -> str:
    """Message content: a string as it is, text parts joined by line ends; other parts are refused.

    Args:
        keys: the types of part that are accepted, each with the name of the field that has its text.
    """
    if type(value) is str:
        return _bounded(value)
    if type(value) is not list or len(value) > MAX_PARTS:
        raise wrong(f"must be a string or a list of at most {MAX_PARTS} text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if type(part) is dict else None
        if type(kind) is not str:
            raise wrong(f"has a part, number {index}, that is not an object with a type, such as '{next(iter(keys))}'")
        if kind not in keys:
            raise wrong(f"has a part of type '{kind[:40]}', but this model reads text parts only")
        text = part.get(keys[kind])
        if type(text) is not str:
            raise wrong(f"has a {kind} part whose '{keys[kind]}' is not a string")
        texts.append(text)
    return _bounded("\n".join(texts))


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise wrong(f"may have at most {MAX_TEXT} characters, not {len(text)}")
    return text
