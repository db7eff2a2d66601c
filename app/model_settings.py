"""Settings of one model, of which a server may have several."""

from __future__ import annotations

from typing import Annotated, Literal

from tessera.engine.contract.config import ProcessSettings
from tessera.options.declaration import Option

ToolParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "gemma",
    "glm4",
    "glm45",
    "granite",
    "harmony",
    "internlm",
    "olmo3",
    "phi4_mini",
    "xlam",
    "none",
]
ReasoningParserName = Literal[
    "auto", "think", "deepseek_r1", "granite_3.2", "granite_3.3", "harmony", "mistral", "none"
]


class ModelSettings(ProcessSettings, frozen=True, kw_only=True):
    """Settings of one model. The fields without an Option:

    Attributes:
        model_folder: local folder with tokenizer.json, tokenizer_config.json, generation_config.json.
        served_model_names: names that requests may use; a completion carries the name that was asked for.
        embedding_folder: local folder of the encoder that makes embeddings beside the model, or None.
        embedding_model_names: names of that encoder.
        reranker_folder: local folder of the cross-encoder that scores pairs beside the model, or None.
        reranker_model_names: names of that cross-encoder.
        adapter_names: names of the LoRA adapters that are served from the start.
    """

    model_folder: str
    served_model_names: tuple[str, ...]
    embedding_folder: str | None = None
    embedding_model_names: tuple[str, ...] = ()
    reranker_folder: str | None = None
    reranker_model_names: tuple[str, ...] = ()
    adapter_names: tuple[str, ...] = ()
    data_parallel_size: Annotated[
        int,
        Option(
            "engines of the model, each with a GPU and a KV cache of its own; a request goes where most of its prompt "
            "is cached, weighed against load",
            group="device and memory",
            metavar="N",
            low=1,
            high=64,
        ),
    ] = 1
    chat_template: Annotated[
        str | None,
        Option(
            "Jinja file that replaces the model's own chat template",
            group="model",
            metavar="FILE",
            default="the model's own",
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Option("take a chat template that a request brings, and render it in the sandbox", group="model"),
    ] = False
    tool_call_parser: Annotated[
        ToolParserName,
        Option("format of the model's tool calls; auto: as its chat template shows", group="model"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParserName,
        Option(
            "how reasoning is told from the content; think: by <think>...</think>; deepseek_r1: the same, begun before "
            "the completion; auto: as the chat template shows",
            group="model",
        ),
    ] = "auto"
