"""What the routes share: from a checked request to token ids, and from token ids to a running generation."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from app.chat_template import check_kwargs, load_chat_template
from app.detokenizer import DetokenizerFactory
from app.generation import Choice, Delta, FinishReason, Generation, TextOptions, TokenEntry
from app.protocol.chat import ConversationFields
from app.protocol.common import GenerationRequest
from app.sampling import check_prompt, check_token_ids, load_sampling_defaults, sampling_params, truncate_prompt
from app.settings import AppSettings
from app.streaming import run_while_connected
from app.text_workers import TextWorkers
from app.tokenizer import check_text_length, load_tokenizer
from engine.client import EngineClient, RequestStream
from engine.errors import EngineUnavailableError, InvalidRequestError, NotFoundError
from engine.messages import EngineInfo

TEXT_TIMEOUT = 60.0  # seconds for a prompt to be prepared, waiting for a thread included
MAX_INLINE_CHARS = 512  # texts up to this length are encoded on the event loop, in well under a millisecond
TEMPLATE_OVERHEAD = 2**20  # characters that a template may add to the messages


@dataclass(slots=True)
class Answer:
    """One finished choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason


class Service:
    """One model behind one engine, as this app process serves it."""

    def __init__(self, client: EngineClient, settings: AppSettings) -> None:
        """Read the model's tokenizer, chat template and sampling defaults.

        Raises:
            ConfigError: one of them cannot be used.
        """
        folder = Path(settings.model_folder)
        self.client = client
        self.settings = settings
        self.tokenizer = load_tokenizer(folder)
        self.template = load_chat_template(folder, settings.chat_template, self.tokenizer.special_tokens)
        self.defaults = load_sampling_defaults(folder)
        self.workers = TextWorkers(settings.text_threads, settings.max_text_jobs)
        config = folder / "config.json"
        self.created = int(config.stat().st_mtime if config.is_file() else time.time())
        self._detokenizers = DetokenizerFactory(self.tokenizer)

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailableError while the engine has not said what it serves."""
        info = self.client.info
        if info is None:
            raise EngineUnavailableError("The model is still being loaded; please try again later.")
        return info

    def check_model(self, name: str) -> None:
        if name not in self.settings.served_model_names:
            raise NotFoundError(f"The model {name[:100]!r} does not exist here; see /v1/models.", param="model")

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text. Raises ContextLengthError for one that cannot fit the context."""
        check_text_length(self.tokenizer, len(text), self.info.max_model_len, param)
        if len(text) <= MAX_INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.workers.run(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens, timeout=TEXT_TIMEOUT
        )

    async def encode_chat(self, request: ConversationFields, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a conversation through the chat template.

        Raises:
            InvalidRequestError: the model has no template, or it cannot render these messages.
            ContextLengthError: the messages cannot fit the context.
        """
        template = self.template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
                code="no_chat_template",
            )
        kwargs = request.chat_template_kwargs or {}
        check_kwargs(kwargs)
        max_model_len = self.info.max_model_len
        num_chars = sum(len(message.content or "") for message in request.messages)
        check_text_length(self.tokenizer, num_chars, max_model_len, "messages")

        def render_and_encode() -> list[int]:
            assert template is not None
            text = template.render(
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.opens_answer,
                continue_final_message=request.continue_final_message,
                extra=kwargs,
                deadline=time.monotonic() + self.settings.template_timeout,
                max_chars=max_model_len * self.tokenizer.max_token_chars + TEMPLATE_OVERHEAD,
            )
            check_text_length(self.tokenizer, len(text), max_model_len, "messages")
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self.workers.run(render_and_encode, timeout=TEXT_TIMEOUT)

    def start(
        self,
        http_request: Request,
        request: GenerationRequest,
        prompts: list[list[int]],
        *,
        param: str,
        standalone: list[bool],
        text_offsets: list[int] | None = None,
    ) -> Generation:
        """Submit `n` sequences for each prompt.

        Args:
            param: the request field that the prompts come from, for errors.
            standalone: per prompt, whether its answers are texts of their own and not continuations.
            text_offsets: per prompt, where its answers begin in the text that is returned.

        Raises:
            RequestError: a prompt or a field is wrong, or the engine takes no requests.
        """
        info = self.info
        num_choices = len(prompts) * request.num_choices
        if num_choices > self.settings.max_choices:
            raise InvalidRequestError(
                f"The request asks for {num_choices} answers, but at most {self.settings.max_choices} are accepted.",
                param="n",
            )
        for token_ids in prompts:
            check_prompt(token_ids, info, param)
        prepared = [sampling_params(request, len(token_ids), info, self.defaults) for token_ids in prompts]
        options = TextOptions(
            stops=request.stop,
            include_stop=request.include_stop_str_in_output,
            min_tokens=request.min_tokens or 0,
            wants_logprobs=request.num_logprobs is not None,
        )
        salt = self._cache_salt(request, http_request.scope.get("state", {}).get("tenant", ""))
        # A refusal on the way drops the streams made so far, which takes their requests back.
        choices: list[Choice] = []
        streams: list[RequestStream] = []
        for row, token_ids in enumerate(prompts):
            for params in prepared[row]:
                detokenizer = self._detokenizers.make(
                    skip_special_tokens=request.skip_special_tokens, at_start=standalone[row]
                )
                offset = text_offsets[row] if text_offsets is not None else 0
                choices.append(Choice(len(choices), detokenizer, options, text_offset=offset))
                streams.append(self.client.submit(token_ids, params, priority=request.priority or 0, cache_salt=salt))
        return Generation(choices, streams, sum(map(len, prompts)), request.num_choices)

    async def finish(self, http_request: Request, generation: Generation) -> list[Answer]:
        """All answers, whole. The engine stops working when the client leaves.

        Raises:
            RequestError: the engine failed, or the answer took too long.
        """
        answers = [Answer() for _ in generation.choices]

        async def collect() -> None:
            async for delta in generation.deltas():
                answers[delta.index].add(delta)

        try:
            await run_while_connected(http_request.receive, collect(), self.settings.request_timeout)
        finally:
            await generation.abort()
        return answers

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        check_token_ids(token_ids, self.info, param)

    def truncate(self, request: GenerationRequest, token_ids: list[int]) -> list[int]:
        return truncate_prompt(request, token_ids, self.info)

    def _cache_salt(self, request: GenerationRequest, tenant: str) -> str:
        """Separates the prefix caches of API keys, and of the salts that requests bring."""
        owner = "" if self.settings.share_prefix_cache else tenant
        if not owner and not request.cache_salt:
            return ""
        return hashlib.sha256(f"{owner}|{request.cache_salt or ''}".encode()).hexdigest()


def service_of(request: Request) -> Service:
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service
