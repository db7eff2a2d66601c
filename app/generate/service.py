"""What the routes share: from a checked request to token ids, and from token ids to a running generation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request

from tessera.app.generate.generation import Choice, Delta, FinishReason, Generation, TextOptions, TokenEntry
from tessera.app.generate.reader import AnswerReader
from tessera.app.generate.sampling import (
    bad_word_ids,
    checked_prompt,
    checked_token_ids,
    load_sampling_defaults,
    sampling_params,
    truncate_prompt,
)
from tessera.app.http.access_log import trace_of
from tessera.app.http.streaming import run_while_connected
from tessera.app.schema.chat import ChatCompletionRequest, ConversationFields
from tessera.app.schema.common import GenerationRequest
from tessera.app.settings import AppSettings
from tessera.app.text.chat_template import check_kwargs, load_chat_template
from tessera.app.text.detokenizer import DetokenizerFactory, token_offsets
from tessera.app.text.reasoning import BEGIN, END, ReasoningSplitter, ReasoningStart, reasoning_start, thinks_aloud
from tessera.app.text.tokenizer import check_text_length, load_tokenizer
from tessera.app.text.workers import TextWorkers
from tessera.app.tools.choice import tool_grammar
from tessera.app.tools.formats import choose_format
from tessera.app.tools.parts import Part
from tessera.engine.contract.errors import EngineUnavailableError, InvalidRequestError, NotFoundError
from tessera.engine.contract.messages import EngineInfo
from tessera.engine.contract.sampling_params import Grammar
from tessera.engine.ipc.client import EngineClient, RequestStream

TEXT_TIMEOUT = 60.0  # seconds for a prompt to be prepared, waiting for a thread included
MAX_INLINE_CHARS = 512  # texts up to this length are encoded on the event loop, in well under a millisecond
TEMPLATE_OVERHEAD = 2**20  # characters that a template may add to the messages


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    """A conversation as the model reads it, and what reasoning the answer begins with."""

    token_ids: list[int]
    reasoning: ReasoningStart

    @property
    def opens_reasoning(self) -> bool:
        return self.reasoning == "open"


@dataclass(slots=True)
class Answer:
    """One finished choice. `parts` is the text as its reader understood it; None without a reader."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    parts: list[Part] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        if delta.parts is not None:
            self.parts = (self.parts or []) + delta.parts


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
        sources = self.template.sources.values() if self.template is not None else ()
        self.tool_format = choose_format(settings.tool_call_parser, sources)
        self.thinks_aloud = thinks_aloud(settings.reasoning_parser, sources)
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
        if name in self.settings.embedding_model_names:
            raise InvalidRequestError(
                f"The model {name[:100]!r} makes embeddings, not text: use /v1/embeddings.", param="model"
            )
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
        """The token ids alone of `prepare_chat`."""
        return (await self.prepare_chat(request, add_special_tokens=add_special_tokens)).token_ids

    async def prepare_chat(
        self, request: ConversationFields, *, add_special_tokens: bool, param: str = "messages"
    ) -> ChatPrompt:
        """A conversation through the chat template; `param` is the field that it comes from, for errors.

        Raises:
            InvalidRequestError: the model has no template, or it cannot render these messages or tools.
            ContextLengthError: the messages cannot fit the context.
        """
        self._check_generates()
        template = self.template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
                code="no_chat_template",
            )
        kwargs = request.chat_template_kwargs or {}
        check_kwargs(kwargs)
        tools = [tool.for_template() for tool in request.shown_tools]
        if tools and self.tool_format is None:
            raise InvalidRequestError(
                "tools are not supported by this model: its chat template shows no format of calls that is known"
                " here (see --tool-call-parser).",
                param="tools",
            )
        max_model_len = self.info.max_model_len
        num_chars = sum(len(message.content or "") for message in request.messages)
        check_text_length(self.tokenizer, num_chars, max_model_len, param)

        def render_and_encode() -> ChatPrompt:
            assert template is not None
            text = template.render(
                [message.for_template() for message in request.messages],
                tools=tools or None,
                add_generation_prompt=request.opens_answer,
                continue_final_message=request.continue_final_message,
                extra=kwargs,
                seconds=self.settings.template_timeout,
                max_chars=max_model_len * self.tokenizer.max_token_chars + TEMPLATE_OVERHEAD,
            )
            check_text_length(self.tokenizer, len(text), max_model_len, param)
            continued = request.messages[-1].content if request.continue_final_message else None
            token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ChatPrompt(token_ids, reasoning_start(text, continued) if self.thinks_aloud else "none")

        return await self.workers.run(render_and_encode, timeout=TEXT_TIMEOUT)

    def make_reader(self, request: ChatCompletionRequest, prompt: ChatPrompt) -> AnswerReader | None:
        """What tells reasoning and tool calls from an answer's text; None where the text is all there is."""
        tools = {tool.function.name: tool.function.parameters or {} for tool in request.shown_tools}
        if not tools and not self.thinks_aloud:
            return None
        parser = None
        if tools and self.tool_format is not None:
            is_one = request.parallel_tool_calls is False or request.choice_of_tools.mode == "function"
            parser = self.tool_format.parser(tools, max_calls=1 if is_one else None)
        splitter = ReasoningSplitter(opened=prompt.opens_reasoning) if self.thinks_aloud else None
        return AnswerReader(splitter, parser, calls_are_forced=request.choice_of_tools.mode == "function")

    def start_chat(
        self, http_request: Request, request: ChatCompletionRequest, prompt: ChatPrompt, *, param: str = "messages"
    ) -> Generation:
        """`start` for a conversation, whichever of the APIs it came by."""
        return self.start(
            http_request,
            request,
            [prompt.token_ids],
            param=param,
            standalone=[not request.continue_final_message],
            make_reader=lambda: self.make_reader(request, prompt),
            grammar=self._grammar_of_tools(request, prompt) or self._grammar_after_reasoning(request, prompt),
        )

    def _grammar_of_tools(self, request: ChatCompletionRequest, prompt: ChatPrompt) -> Grammar | None:
        if self.tool_format is None:
            return None
        return tool_grammar(request, self.tool_format, prompt.reasoning, self._token_id_of)

    def _token_id_of(self, text: str) -> int | None:
        """The token that is spelled by all of a text."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return next((token_id for token_id in token_ids if self.tokenizer.token_string(token_id) == text), None)

    def _grammar_after_reasoning(self, request: ChatCompletionRequest, prompt: ChatPrompt) -> Grammar | None:
        """The request's grammar, from the end of the reasoning on where the prompt has begun one or the model does."""
        grammar = request.grammar
        if grammar is None or prompt.reasoning == "none":
            return grammar
        begin, end = self._token_id_of(BEGIN), self._token_id_of(END)
        if prompt.opens_reasoning:
            if end is None:
                raise InvalidRequestError(
                    f"{grammar.param} cannot be used while this model reasons: turn its thinking off.",
                    param=grammar.param,
                )
            return msgspec.structs.replace(grammar, start_token_id=end)
        if begin is None or end is None:
            return grammar
        return msgspec.structs.replace(grammar, start_token_id=end, section_token_id=begin)

    def start(
        self,
        http_request: Request,
        request: GenerationRequest,
        prompts: list[list[int]],
        *,
        param: str,
        standalone: list[bool],
        text_offsets: list[int] | None = None,
        make_reader: Callable[[], AnswerReader | None] = lambda: None,
        grammar: Grammar | None = None,
    ) -> Generation:
        """Submit `n` sequences for each prompt.

        Args:
            param: the request field that the prompts come from, for errors.
            standalone: per prompt, whether its answers are texts of their own and not continuations.
            text_offsets: per prompt, where its answers begin in the text that is returned.
            make_reader: makes each answer's reader.
            grammar: what each answer must match; None leaves it to the request.

        Raises:
            RequestError: a prompt or a field is wrong, or the engine takes no requests.
        """
        self._check_generates()
        info = self.info
        num_choices = len(prompts) * request.num_choices
        if num_choices > self.settings.max_choices:
            raise InvalidRequestError(
                f"The request asks for {num_choices} answers, but at most {self.settings.max_choices} are accepted.",
                param="n",
            )
        checked = [checked_prompt(token_ids, info, param) for token_ids in prompts]
        grammar = grammar if grammar is not None else request.grammar
        bad_words = bad_word_ids(request.bad_words, self.tokenizer)
        prepared = [
            sampling_params(
                request, len(token_ids), info, self.defaults, grammar, bad_words, default_seed=self.settings.seed
            )
            for token_ids in prompts
        ]
        options = TextOptions(
            stops=request.stop,
            include_stop=request.include_stop_str_in_output,
            min_tokens=request.min_tokens or 0,
            wants_logprobs=request.num_logprobs is not None,
            scores_only=request.token_limit[0] == 0,
        )
        salt = self._cache_salt(request, tenant_of(http_request))
        # A refusal on the way drops the streams made so far, which takes their requests back.
        choices: list[Choice] = []
        streams: list[RequestStream] = []
        for row, token_ids in enumerate(checked):
            for params in prepared[row]:
                reader = make_reader()
                detokenizer = self._detokenizers.make(
                    skip_special_tokens=request.skip_special_tokens,
                    at_start=standalone[row],
                    markers=reader.markers if reader is not None else frozenset(),
                )
                offset = text_offsets[row] if text_offsets is not None else 0
                choices.append(Choice(len(choices), detokenizer, options, text_offset=offset, reader=reader))
                streams.append(self.client.submit(token_ids, params, priority=request.priority or 0, cache_salt=salt))
        generation = Generation(choices, streams, sum(map(len, prompts)), request.num_choices)
        trace = trace_of(http_request.scope)
        trace.model, trace.stream, trace.generation = request.model, request.stream, generation
        if self.settings.log_prompts:
            trace.prompts = [self.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        return generation

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

    def token_offsets(self, token_ids: list[int], *, skip_special_tokens: bool) -> list[int]:
        """Where each token's text begins in the text of all, in characters."""
        return token_offsets(self._detokenizers.make(skip_special_tokens=skip_special_tokens, at_start=True), token_ids)

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        checked_token_ids(token_ids, self.info, param)

    def truncate(self, request: GenerationRequest, token_ids: list[int]) -> list[int]:
        return truncate_prompt(request, token_ids, self.info)

    def _check_generates(self) -> None:
        if not self.info.generates:
            raise InvalidRequestError("This model makes embeddings, not text: use /v1/embeddings.", param="model")

    def _cache_salt(self, request: GenerationRequest, tenant: str) -> str:
        """Separates the prefix caches of API keys, and of the salts that requests bring."""
        owner = "" if self.settings.share_prefix_cache else tenant
        if not owner and not request.cache_salt:
            return ""
        return hashlib.sha256(f"{owner}|{request.cache_salt or ''}".encode()).hexdigest()


def tenant_of(request: Request) -> str:
    """A name for the holder of the request's API key; empty where no key is needed."""
    tenant: Any = request.scope.get("state", {}).get("tenant", "")
    assert isinstance(tenant, str)
    return tenant


def service_of(request: Request) -> Service:
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service
