"""POST /v1/responses, and reading and deleting stored responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import admit, tenant_of
from tessera.app.generate.completion import complete, num_values
from tessera.app.generate.generation import Generation
from tessera.app.generate.sealing import seal_of
from tessera.app.generate.served_models import model_of
from tessera.app.http.body import built, built_json, json_response
from tessera.app.http.description import Description, PathName
from tessera.app.http.streaming import EventStream, run_while_connected
from tessera.app.openai.conversations.objects import ItemList
from tessera.app.openai.pages import PageParameters, page_of
from tessera.app.openai.responses.background import BackgroundJob, RecordedEvents
from tessera.app.openai.responses.events import ResponseEvents
from tessera.app.openai.responses.journal import AskedEvents, Journal
from tessera.app.openai.responses.journal_reader import POLL, JournalReader, JournalWatch
from tessera.app.openai.responses.objects import DeletedResponse, InputTokenCount, ResponseEvent, ResponseObject
from tessera.app.openai.responses.prompt import response_prompt
from tessera.app.openai.responses.response import ResponseStates
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import responses_of
from tessera.app.openai.responses.turn import Turn, read_turn
from tessera.app.openai.storing import StoringSource
from tessera.app.schema.fields import MAX_INT32
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

NUM_CANCEL_POLLS = 50
STREAM_QUERY = {
    "stream": {"type": "boolean", "default": False, "description": "The events, of a response in the background."},
    "starting_after": {
        "type": "integer",
        "minimum": -1,
        "maximum": MAX_INT32,
        "description": "Only events with a greater number.",
    },
}

PAGES = PageParameters()
router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/responses",
    operation_id="createResponse",
    summary="A response to items, stored for the next turn",
    openapi_extra=Description(ResponsesRequest, returns=ResponseObject, events=ResponseEvent),
)
async def create_response(http_request: Request) -> Response:
    admission = await admit(http_request, ResponsesRequest)
    request, model, tenant = admission.request, admission.model, admission.tenant
    turn = await read_turn(http_request, admission)
    if request.background and not turn.is_stored:
        raise InvalidRequestError("background is not supported: this server keeps no responses.", param="background")
    prompt = await response_prompt(model, request, turn.chat)
    generation = await admission.start_chat(turn.chat, prompt, param="input")
    states = ResponseStates(request, model.defaults, stored=turn.is_stored)
    seal = seal_of(http_request)
    events = ResponseEvents(
        states,
        generation,
        model.tokenizer,
        tools=turn.tools.by_name,
        seal=(lambda text: seal.close(text, tenant)) if request.wants_sealed_reasoning else None,
        num_logprobs=turn.chat.num_logprobs,
    )
    if request.background:
        await run_while_connected(http_request.receive, generation.wait_accepted(), model.settings.request_timeout)
        journal = journal_of(http_request)
        await _begin_job(http_request, journal, turn, generation, events, states.in_progress())
        if request.stream:
            reader = JournalReader(watch_of(http_request), tenant, states.id)
            return EventStream(reader, RecordedEvents(), model.settings)
        return json_response(states.in_progress())
    if request.stream:
        source = StoringSource(generation, lambda: turn.store_response(events.last_state()))
        return EventStream(source, events, model.settings)
    (completion,) = await complete(http_request, generation, model.settings.request_timeout)
    response = await built(num_values(generation, [completion]), partial(events.whole, completion))
    await turn.store_response(response)
    return await built_json(num_values(generation, [completion]), lambda: response)


async def _begin_job(
    http_request: Request,
    journal: Journal,
    turn: Turn,
    generation: Generation,
    events: ResponseEvents,
    response: dict[str, Any],
) -> None:
    """Let the generation go on without its client, as the job of a stored response."""
    settings = model_of(http_request).settings
    try:
        seq = await journal.begin(turn.tenant, turn.stored(response))
    except BaseException:
        await generation.abort()
        raise

    async def end(last: dict[str, Any], first: int, data: bytes) -> None:
        if last["status"] in ("completed", "incomplete"):
            await turn.extend_conversation(last)
        await journal.end(turn.tenant, seq, turn.stored(last), first, data)

    job = BackgroundJob(seq, generation, events, end)
    http_request.app.state.background.start(job, settings.request_timeout)


@router.post(
    "/v1/responses/input_tokens",
    operation_id="countInputTokens",
    summary="The number of tokens of a response's prompt",
    openapi_extra=Description(ResponsesRequest, returns=InputTokenCount),
)
async def count_input_tokens(http_request: Request) -> Response:
    admission = await admit(http_request, ResponsesRequest)
    turn = await read_turn(http_request, admission)
    prompt = await response_prompt(admission.model, admission.request, turn.chat)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(http_request: Request) -> Response:
    """Not found, rather than a method that a response with this id does not accept."""
    raise NotFoundError("There is no POST /v1/responses/compact here.", code="unknown_url")


@router.get(
    "/v1/responses/{response_id}",
    operation_id="retrieveResponse",
    summary="A stored response",
    openapi_extra=Description(returns=ResponseObject, events=ResponseEvent, query=STREAM_QUERY),
)
async def retrieve_response(http_request: Request, response_id: PathName) -> Response:
    query = http_request.query_params
    if query.get("stream", "false") != "true":
        return json_response(await _stored_response(http_request, response_id))
    after = query.get("starting_after", "-1")
    if not (after == "-1" or (after.isascii() and after.isdigit() and len(after) <= 10 and int(after) <= MAX_INT32)):
        raise InvalidRequestError("starting_after must be the sequence_number of an event.", param="starting_after")
    if not (await _stored_response(http_request, response_id))["background"]:
        raise InvalidRequestError("stream is only allowed for responses in the background.", param="stream")
    reader = JournalReader(watch_of(http_request), tenant_of(http_request), response_id, int(after))
    return EventStream(reader, RecordedEvents(), model_of(http_request).settings)


@router.delete(
    "/v1/responses/{response_id}",
    operation_id="deleteResponse",
    summary="Delete a stored response",
    openapi_extra=Description(returns=DeletedResponse),
)
async def delete_response(http_request: Request, response_id: PathName) -> Response:
    if not await responses_of(http_request).delete(tenant_of(http_request), response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    operation_id="listInputItems",
    summary="The input items of a stored response",
    openapi_extra=Description(returns=ItemList, query=PAGES.query),
)
async def list_input_items(http_request: Request, response_id: PathName) -> Response:
    page = PAGES.read(http_request.query_params)
    found = await responses_of(http_request).find(tenant_of(http_request), response_id)
    if found is None:
        raise _not_found(response_id)
    return json_response(page_of(found.input_items, page, "response's input items"))


@router.post(
    "/v1/responses/{response_id}/cancel",
    operation_id="cancelResponse",
    summary="End a response in the background",
    openapi_extra=Description(returns=ResponseObject),
)
async def cancel_response(http_request: Request, response_id: PathName) -> Response:
    found = await _stored_response(http_request, response_id)
    if not found["background"]:
        raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")
    await journal_of(http_request).cancel(tenant_of(http_request), response_id)
    for _ in range(NUM_CANCEL_POLLS):
        found = await _stored_response(http_request, response_id)
        if found["status"] != "in_progress":
            break
        await asyncio.sleep(POLL)
    return json_response(found)


def watch_of(request: Request) -> JournalWatch:
    watch: Any = request.app.state.journal_watch
    assert isinstance(watch, JournalWatch)
    return watch


def journal_of(request: Request) -> Journal:
    return watch_of(request).journal


async def _stored_response(http_request: Request, response_id: str) -> dict[str, Any]:
    """Raises NotFoundError. A response whose process has died has failed."""
    responses, tenant = responses_of(http_request), tenant_of(http_request)
    found = await responses.find_response(tenant, response_id)
    if found is not None and found["status"] == "in_progress":
        journal = journal_of(http_request)
        (part,) = await journal.read([AskedEvents(tenant, response_id, MAX_INT32)])
        if part is not None and await journal.settle(tenant, response_id, part):
            found = await responses.find_response(tenant, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"There is no response {response_id[:100]!r} here.", code="response_not_found")
