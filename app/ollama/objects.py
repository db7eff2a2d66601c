"""Models of Ollama's objects, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.ollama.errors import OllamaErrorObject

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaCalledFunction(ApiObject):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallObject(ApiObject):
    id: str
    function: OllamaCalledFunction


class OllamaMessageObject(ApiObject):
    """Empty fields are left out, but for `content`."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCallObject] | None = None


class OllamaTopLogprob(ApiObject):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(ApiObject):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OllamaTopLogprob]


class OllamaAnswer(ApiObject):
    """Counts, times in nanoseconds and `done_reason` are on the last line of a stream alone."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int | None = None
    load_duration: int | None = Field(default=None, description="Until the engine's first step: the queue as well.")
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[OllamaLogprob] | None = None


class OllamaChatObject(OllamaAnswer):
    """An answer of /api/chat, or a line of it."""

    message: OllamaMessageObject


class OllamaChatLine(RootModel[OllamaChatObject | OllamaErrorObject]):
    """A line of /api/chat; a stream that breaks off ends with an error."""


class OllamaGenerateObject(OllamaAnswer):
    """An answer of /api/generate, or a line of it."""

    response: str
    thinking: str | None = None
    context: list[int] | None = Field(default=None, description="All tokens so far, for the next request.")


class OllamaGenerateLine(RootModel[OllamaGenerateObject | OllamaErrorObject]):
    """A line of /api/generate; a stream that breaks off ends with an error."""


class OllamaEmbedObject(ApiObject):
    """Embeddings of unit length; no times for an empty input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class OllamaEmbeddingObject(ApiObject):
    embedding: list[float]


class OllamaVersionObject(ApiObject):
    version: str = Field(description="Of Ollama's API as it is spoken here.")


class OllamaDetails(ApiObject):
    """Empty texts while the model is being loaded."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelObject(ApiObject):
    """`expires_at`, `size_vram` and `context_length` in /api/ps, `modified_at` in /api/tags."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModelList(ApiObject):
    models: list[OllamaModelObject]


class OllamaStatusObject(ApiObject):
    status: Literal["success"]


class OllamaShowObject(ApiObject):
    modelfile: str
    parameters: str
    template: str = Field(description="The chat template, in Jinja.")
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str
