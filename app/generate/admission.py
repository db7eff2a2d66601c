"""Admission: a request is read, checked and handed to the engine, or refused with the reason.

Every generating route begins with `admit` and goes on with `Admission.start` or `Admission.start_chat`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Request

from tessera.app.generate.chat_grammar import chat_grammar
from tessera.app.generate.generation import Choice, Generation, TextOptions
from tessera.app.generate.prompt import ChatPrompt, checked_prompt, encode_bad_words
from tessera.app.generate.reader import CompletionReader, reader_maker
from tessera.app.generate.reasoning_budget import reasoning_budget
from tessera.app.generate.sampling import check_all_logprobs, sampling_params
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import model_for, model_of
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import read_json_object, run_in_turn
from tessera.app.http.limits import account_of, lease_of
from tessera.app.schema.chat import ChatRequest
from tessera.app.schema.generation_fields import GenerationRequest
from tessera.app.schema.request import RequestModel, parse_request
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import TokenIds
from tessera.engine.contract.sampling_params import Grammar, ReasoningBudget

CHOICES_AT_A_TIME = 128  # that are made in one turn of the event loop, in about a millisecond
BACKGROUND_PRIORITY = 2**32  # beyond all that requests can ask for

R = TypeVar("R", bound=RequestModel)


async def receive(http_request: Request, schema: type[R]) -> R:
    """The request in a body: read within bounds, parsed, checked.

    Raises:
        RequestError: the body cannot be read, or a field is wrong.
    """
    body = await read_json_object(http_request, model_of(http_request).settings)
    return await run_in_turn(http_request, partial(checked_request, schema), body)


def checked_request(schema: type[R], body: dict[str, Any]) -> R:
    """The request in a parsed body. Raises InvalidRequestError naming the field at fault."""
    request = parse_request(schema, body)
    request.check()
    return request


async def admit(http_request: Request, schema: type[R]) -> Admission[R]:
    """`receive` for requests that name the generating model, with what they need to go on.

    Raises:
        RequestError: also where the model is not served.
    """
    request = await receive(http_request, schema)
    model = await model_for(http_request, request.requested_model)
    if not request.requested_model:
        request = request.model_copy(update={"model": model.default_name})
    model.check_name(request.requested_model or "")
    return Admission(request, model, http_request, request.requested_model or model.default_name)


@dataclass(slots=True, frozen=True)
class Admission(Generic[R]):
    """A checked request and the model that it asks for, by one of its served names."""

    request: R
    model: ServedModel
    http_request: Request
    name: str

    @property
    def tenant(self) -> str:
        return tenant_of(self.http_request)

    async def start_chat(
        self,
        chat: ChatRequest,
        prompt: ChatPrompt,
        *,
        param: str = "messages",
        prediction: TokenIds | None = None,
    ) -> Generation:
        """`start` for a conversation; `chat` is what the request amounts to in Chat Completions."""
        model = self.model
        reads_parts = model.reasoning is not None or bool(chat.shown_tools)
        grammar = None
        if reads_parts:  # of hundreds of tools it takes tens of milliseconds
            grammar = await run_in_turn(self.http_request, partial(chat_grammar, model, chat), prompt)
        return await self.start(
            chat,
            [prompt.token_ids],
            param=param,
            standalone=[not chat.continue_final_message],
            make_reader=reader_maker(model, chat, prompt) if reads_parts else None,
            grammar=grammar,
            budget=reasoning_budget(model, chat, prompt) if model.reasoning is not None else None,
            prediction=prediction,
        )

    async def start(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        *,
        param: str,
        standalone: Sequence[bool],
        text_offsets: Sequence[int] | None = None,
        make_reader: Callable[[], CompletionReader] | None = None,
        grammar: Grammar | None = None,
        budget: ReasoningBudget | None = None,
        prediction: TokenIds | None = None,
    ) -> Generation:
        """Submit `n` sequences for each prompt.

        Args:
            param: the request field that the prompts come from, for errors.
            standalone: per prompt, whether its completions are texts of their own rather than continuations.
            text_offsets: per prompt, where its completions begin in the text that is returned.
            make_reader: makes the reader of each completion.
            grammar: what each completion must match; None leaves it to the request.
            budget: of each completion's reasoning.
            prediction: a text that the completions are expected to repeat.

        Raises:
            RequestError: a prompt or a field is wrong, or the engine takes no requests.
        """
        model = self.model
        model.check_generates()
        num_choices = len(prompts) * request.num_choices
        if num_choices > model.settings.max_choices:
            raise InvalidRequestError(
                f"The request asks for {num_choices} choices, but at most {model.settings.max_choices} are accepted.",
                param="n",
            )
        checked = [checked_prompt(token_ids, model.info, param) for token_ids in prompts]
        check_all_logprobs(request, prompts, model.info)
        params = sampling_params(
            request,
            [len(token_ids) for token_ids in prompts],
            model.info,
            model.defaults,
            grammar if grammar is not None else request.grammar,
            await encode_bad_words(model, request.bad_words) if request.bad_words else (),
            default_seed=model.settings.seed,
            reasoning_budget=budget,
        )
        options = _text_options(request)
        choices: list[Choice] = []
        for row in range(len(prompts)):
            for _ in params[row]:
                reader = make_reader() if make_reader is not None else None
                detokenizer = model.detokenizers.make(
                    skip_special_tokens=request.skip_special_tokens,
                    at_start=standalone[row],
                    markers=reader.markers if reader is not None else frozenset(),
                )
                offset = text_offsets[row] if text_offsets is not None else 0
                choices.append(Choice(len(choices), detokenizer, options, text_offset=offset, reader=reader))
                if len(choices) % CHOICES_AT_A_TIME == 0:
                    await asyncio.sleep(0)  # others' requests first
        lease = lease_of(self.http_request.scope)
        num_prompt_tokens = sum(map(len, prompts))
        hold = lease.hold_sequences(len(choices), num_prompt_tokens) if lease is not None else None
        submitted = time.monotonic()
        streams = model.client.submit_all(
            [(token_ids, each) for token_ids, row in zip(checked, params, strict=True) for each in row],
            priority=(request.priority or 0) + _priority_offset(self.http_request),
            cache_salt=_cache_salt(request, self.tenant, shared=model.settings.share_prefix_cache),
            num_choices=request.num_choices,
            account=account_of(self.http_request.scope),
            adapter=self.name if self.name in model.adapter_names else "",
            prediction=prediction,
        )
        generation = Generation(choices, streams, num_prompt_tokens, request.num_choices, hold, params[0][0], submitted)
        self._trace(request, prompts, generation)
        return generation

    def _trace(self, request: GenerationRequest, prompts: list[list[int]], generation: Generation) -> None:
        trace = trace_of(self.http_request.scope)
        trace.model, trace.generation = request.model, generation
        trace.stream = getattr(self.request, "stream", False)
        if self.model.settings.log_prompts:
            decode = self.model.tokenizer.decode
            trace.prompts = [decode(prompt, skip_special_tokens=False) for prompt in prompts]


def _priority_offset(request: Request) -> int:
    """Requests in the background, such as those of batches, run after all others."""
    return BACKGROUND_PRIORITY if request.scope.get("state", {}).get("in_background") else 0


def tenant_of(request: Request) -> str:
    """The name of the API key's owner; empty where no key is needed."""
    tenant: Any = request.scope.get("state", {}).get("tenant", "")
    assert isinstance(tenant, str)
    return tenant


def _text_options(request: GenerationRequest) -> TextOptions:
    return TextOptions(
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        min_tokens=request.min_tokens or 0,
        wants_logprobs=request.num_logprobs is not None,
        scores_only=request.token_limit[0] == 0,
    )


def _cache_salt(request: GenerationRequest, tenant: str, *, shared: bool) -> str:
    """Separates the prefix caches of API keys, unless `shared`, and of the salts that requests bring."""
    owner = "" if shared else tenant
    if not owner and not request.cache_salt:
        return ""
    return hashlib.sha256(f"{owner}|{request.cache_salt or ''}".encode()).hexdigest()
