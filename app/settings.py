"""What one app process needs to know; crosses the process boundary to worker processes as JSON."""

from __future__ import annotations

import msgspec


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP side. Times are seconds.

    Attributes:
        model_folder: local folder with tokenizer.json, tokenizer_config.json, generation_config.json.
        served_model_names: names that requests may use; answers carry the name that was asked for.
        api_keys: accepted bearer keys; empty leaves every route open.
        chat_template: path of a Jinja file that replaces the model's own template, or None.
        metrics_prefix: prefix of every metric's name on /metrics, without the colon.
        max_body_bytes: larger request bodies are refused with 413.
        body_timeout: a request body that takes longer to arrive is refused with 408.
        request_timeout: longest time from a request's arrival to the end of its answer.
        stall_timeout: a reader that takes nothing for this long loses its answer.
        template_timeout: longest time for rendering one chat template.
        text_threads: threads that render templates and encode long texts.
        max_text_jobs: most renderings and encodings waiting for those threads; beyond it 429.
        max_choices: most sequences of one request, prompts times n.
        share_prefix_cache: whether holders of different API keys share cached prompt prefixes.
    """

    model_folder: str
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    metrics_prefix: str = "tessera"
    max_body_bytes: int = 16 * 2**20
    body_timeout: float = 60.0
    request_timeout: float = 3600.0
    stall_timeout: float = 60.0
    template_timeout: float = 5.0
    text_threads: int = 2
    max_text_jobs: int = 512
    max_choices: int = 1024
    share_prefix_cache: bool = False
