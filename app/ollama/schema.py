"""The bodies of /api/chat, /api/generate, /api/embed, /api/embeddings, /api/show and /api/pull."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool

from tessera.app.engines.keep_alive import FORM, MAX_LENGTH, seconds_of
from tessera.app.ollama.messages import Images, OllamaMessage, check_images
from tessera.app.ollama.options import OllamaOptions
from tessera.app.schema.chat import MAX_MESSAGES
from tessera.app.schema.examples import HELLO, WEATHER_PARAMETERS
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_KEYS,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    MAX_TOKEN_ID,
    Entries,
    JsonObject,
    ModelName,
    Off,
    On,
    Text,
    at_most,
    ids_from,
    integer,
    wrong,
)
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.app.schema.structured_output import JsonObjectFormat
from tessera.app.schema.tools import Tools
from tessera.engine.contract.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
LEVELS = ("low", "medium", "high", "max")


def _format(value: Any) -> JsonObjectFormat | None:
    if value is None or value == "":
        return None
    if value == "json":
        return JsonObjectFormat(type="json_object")
    if type(value) is not dict or len(value) > MAX_KEYS:
        raise wrong(f'must be "json" or a JSON schema of at most {MAX_KEYS} keys')
    return JsonObjectFormat(type="json_object", schema=value)


def _think(value: Any) -> bool | str | None:
    if value is None or type(value) is bool or (type(value) is str and value in LEVELS):
        return value
    raise wrong(f"must be true, false, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")


def _keep_alive(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) in (int, float) and abs(value) <= MAX_INT32:
        return math.inf if value < 0 else float(value)
    if type(value) is str:
        try:
            return seconds_of(value)
        except ValueError:
            pass
    raise wrong(f"must be {FORM}")


KeepAlive = Annotated[
    float | None,
    PlainValidator(
        _keep_alive,
        json_schema_input_type=Annotated[str, Field(max_length=MAX_LENGTH)]
        | Annotated[float, Field(ge=-MAX_INT32, le=MAX_INT32)]
        | None,
    ),
    Field(
        description="How long the model stays loaded without requests from now on: a duration such as `5m`, seconds, "
        "or -1 for ever. It counts on a server that unloads models, from keys that may administer."
    ),
]
Format = Annotated[
    JsonObjectFormat | None,
    PlainValidator(_format, json_schema_input_type=Literal["", "json"] | JsonObject | None),
    Field(description="`json` for any JSON object, or a JSON schema that the completion matches."),
]
Think = Annotated[
    bool | str | None,
    PlainValidator(_think, json_schema_input_type=StrictBool | Literal["low", "medium", "high", "max"] | None),
    Field(description="Whether the model reasons first, or how much, where its chat template can switch that."),
]
Context = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(max_length=MAX_PROMPT_IDS, description="What an earlier response returned as its `context`."),
    at_most(MAX_PROMPT_IDS),
    ids_from(0),
]


class OllamaRequest(RequestModel):
    """Fields of both generating endpoints."""

    hints: ClassVar[FieldValues] = {"shift": (), "truncate": ()}

    model: ModelName = ""
    stream: On = Field(default=True, description="Lines of JSON as the text grows, unless it is false.")
    options: OllamaOptions | None = Field(default=None, description="Sampling and stopping.")
    format: Format = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: Off = False
    top_logprobs: int | None = integer(0, MAX_TOP_LOGPROBS, "Alternatives to report per token; needs logprobs.")

    def check(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")


class OllamaChatRequest(OllamaRequest):
    """A conversation, one completion of it. Without messages nothing is generated."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "messages": HELLO, "options": {"num_predict": 64}},
        "tools": {
            "model": "MODEL",
            "messages": HELLO,
            "stream": False,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}],
        },
    }

    messages: Annotated[Entries[OllamaMessage], at_most(MAX_MESSAGES)] = Field(default=[], max_length=MAX_MESSAGES)
    tools: Tools | None = None

    def check(self) -> None:
        super().check()
        check_images(self.messages)


class OllamaGenerateRequest(OllamaRequest):
    """A prompt, one completion of it. Without a prompt nothing is generated."""

    refused: ClassVar[FieldValues] = {"suffix": ("",), "template": ("",)}

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "prompt": "Why is the sky blue?", "options": {"num_predict": 64}},
        "raw": {"model": "MODEL", "prompt": "Once upon a time", "raw": True, "stream": False},
    }

    prompt: Text | None = Field(default=None, description="What the user says; with `raw` the text to continue.")
    system: Text | None = None
    raw: Off = Field(default=False, description="Take the prompt as it is, without the chat template.")
    context: Context | None = None
    images: Images | None = None

    def check(self) -> None:
        super().check()
        if self.images:
            raise InvalidRequestError("images cannot be used: this model reads text only.", param="images")
        if self.raw and (self.system or self.context):
            param = "system" if self.system else "context"
            raise InvalidRequestError(f"{param} cannot be used together with raw.", param=param)


def _texts(value: Any) -> list[str]:
    texts = [value] if type(value) is str else value
    if type(texts) is not list or len(texts) > MAX_PROMPTS or any(type(text) is not str for text in texts):
        raise wrong(f"must be a string or a list of at most {MAX_PROMPTS} strings")
    return texts


class OllamaEmbedRequest(RequestModel):
    """One or several texts; the response has an embedding for each, in their order."""

    hints: ClassVar[FieldValues] = {"options": ({},)}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "input": ["One", "Two"]}}

    model: ModelName = ""
    input: Annotated[
        list[Text],
        BeforeValidator(_texts, json_schema_input_type=Text | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]),
        Field(max_length=MAX_PROMPTS, description="A text or several; none for an empty one."),
    ]
    keep_alive: KeepAlive = None
    truncate: On = Field(default=True, description="Cut a text that is too long; it is refused if this is false.")
    dimensions: int | None = integer(1, MAX_INT32, "Shorter embeddings, of models that were trained for it.")


class OllamaEmbeddingsRequest(RequestModel):
    """One text, for the older of the endpoints."""

    hints: ClassVar[FieldValues] = {"options": ({},)}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "prompt": "One"}}

    model: ModelName = ""
    prompt: Text | None = Field(default=None, description="The text.")
    keep_alive: KeepAlive = None


class NamedModel(RequestModel):
    """The name of a model, in `model` or in the older `name`."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL"}}

    model: ModelName = ""
    name: ModelName = ""


class OllamaShowRequest(NamedModel):
    """The model to tell of."""

    hints: ClassVar[FieldValues] = {"verbose": (False,)}


class OllamaPullRequest(NamedModel):
    """The model that a client wants to be there."""

    hints: ClassVar[FieldValues] = {"insecure": (False,), "stream": (True, False)}
