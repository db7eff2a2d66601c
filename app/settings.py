"""What one app process needs to know; crosses the process boundary to worker processes as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from tessera.engine.contract.logs import LogFormat, LogLevel

ToolParserName = Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "none"]
ReasoningParserName = Literal["auto", "think", "none"]


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP side. Times are seconds.

    Attributes:
        model_folder: local folder with tokenizer.json, tokenizer_config.json, generation_config.json.
        served_model_names: names that requests may use; answers carry the name that was asked for.
        api_keys: accepted bearer keys; empty leaves every route open.
        chat_template: path of a Jinja file that replaces the model's own template, or None.
        tool_call_parser: name of the format of tool calls; auto finds it in the chat template.
        reasoning_parser: whether reasoning is told from the answer: auto (by the chat template), think or none.
        embedding_folder: local folder of the encoder that makes embeddings beside the model, or None.
        embedding_model_names: names of that encoder.
        seed: of requests without one of their own; None draws one for each answer.
        metrics_prefix: prefix of every metric's name on /metrics, without the colon.
        max_body_bytes: larger request bodies are refused with 413.
        body_timeout: a request whose head or whose body takes longer to arrive is refused with 408.
        request_timeout: longest time from a request's arrival to the end of its answer.
        stall_timeout: a reader that takes nothing for this long loses its answer.
        template_timeout: most CPU seconds for rendering one chat template.
        text_threads: threads that render templates and encode long texts.
        max_text_jobs: most renderings and encodings waiting for those threads; beyond it 429.
        max_choices: most sequences of one request, prompts times n.
        max_stored_responses: most answers of /v1/responses that are kept per API key; 0 keeps none.
        max_stored_bytes: and the most memory that they take.
        response_file: file that several app processes keep them in; None: each in its own memory.
        cors_origins: origins whose pages may call this server from a browser; empty allows none.
        ui: whether there is a status page at /.
        log_format: form of the log lines.
        log_level: lines below it are left out; those of single requests are of level info.
        log_prompts: whether a request's line has its prompt, as the model reads it.
        num_app_processes: of this server; `app_process` is the number of this one, from 0.
        count_fd: descriptor of the memory that several app processes count HTTP requests in; None: each for itself.
        max_connections: most open connections of one app process, and a few more for health checks.
        share_prefix_cache: whether holders of different API keys share cached prompt prefixes.
    """

    model_folder: str
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    embedding_folder: str | None = None
    embedding_model_names: tuple[str, ...] = ()
    seed: int | None = None
    metrics_prefix: str = "tessera"
    max_body_bytes: int = 16 * 2**20
    body_timeout: float = 60.0
    request_timeout: float = 3600.0
    stall_timeout: float = 60.0
    template_timeout: float = 5.0
    text_threads: int = 2
    max_text_jobs: int = 512
    max_choices: int = 1024
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    response_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    ui: bool = True
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    log_prompts: bool = False
    num_app_processes: int = 1
    app_process: int = 0
    count_fd: int | None = None
    max_connections: int = 1024
    share_prefix_cache: bool = False
