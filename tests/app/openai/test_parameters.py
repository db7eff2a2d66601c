"""Every parameter that OpenAI's API and vLLM describe has its effect, is a hint that the log names, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.ollama.schema import OllamaChatRequest
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.embeddings.schema import EmbeddingRequest
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.schema.chat import ChatMessage
from tessera.app.schema.request import RequestModel, parse_request
from tessera.engine.contract.errors import InvalidRequestError

SAMPLING = """temperature top_p top_k min_p top_n_sigma repetition_penalty presence_penalty frequency_penalty
    logit_bias seed stop stop_token_ids include_stop_str_in_output min_tokens ignore_eos skip_special_tokens
    allowed_token_ids bad_words structured_outputs guided_json guided_regex guided_choice guided_grammar
    priority cache_salt"""
VLLM = """use_beam_search length_penalty early_stopping spaces_between_special_tokens truncate_prompt_tokens
    prompt_logprobs add_special_tokens echo guided_decoding_backend guided_whitespace_pattern structural_tag request_id
    logits_processors return_tokens_as_token_ids return_token_ids kv_transfer_params vllm_xargs truncation_side
    logprob_token_ids return_token_offsets stream_interval prompt_embeds session_id padding watermarking
    ec_transfer_params return_mm_kwargs routed_experts_prompt_start"""
KNOWN: dict[type[RequestModel], str] = {
    ChatCompletionRequest: f"""{SAMPLING} {VLLM} messages model audio function_call functions logprobs
        max_completion_tokens max_tokens metadata modalities n parallel_tool_calls prediction prompt_cache_key
        prompt_cache_retention reasoning_effort response_format safety_identifier service_tier store stream
        stream_options tool_choice tools top_logprobs user verbosity web_search_options add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs
        include_reasoning thinking_token_budget repetition_detection return_prompt_text""",
    CompletionRequest: f"""{SAMPLING} {VLLM} echo model prompt best_of logprobs max_tokens n stream stream_options
        suffix user response_format""",
    EmbeddingRequest: """input model dimensions encoding_format user truncate_prompt_tokens add_special_tokens priority
        normalize embed_dtype endianness messages additional_data mm_processor_kwargs request_id cache_salt
        use_activation chat_template chat_template_kwargs padding truncation_side""",
    ResponsesRequest: f"""{SAMPLING} background context_management conversation include input instructions
        max_output_tokens max_tool_calls metadata model parallel_tool_calls previous_response_id prompt prompt_cache_key
        prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options text tool_choice
        tools top_logprobs truncation user request_id mm_processor_kwargs prompt_logprobs enable_response_messages
        previous_input_messages""",
}
NEEDED: dict[type[RequestModel], dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"model": "m", "prompt": "a"},
    EmbeddingRequest: {"model": "m", "input": "a"},
    ResponsesRequest: {"model": "m", "input": "a"},
}
ABSURD = [["value"]]  # wrong for every parameter that there is


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model, names in KNOWN.items() for name in names.split()],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_known_parameter_is_not_ignored(model: type[RequestModel], name: str) -> None:
    """A value without sense is noticed, and null is not: it means that the parameter was left out."""
    if name in model.hints:
        assert name not in model.refused
        parse_request(model, {**NEEDED[model], name: ABSURD})
        return
    with pytest.raises(InvalidRequestError) as refused:
        parse_request(model, {**NEEDED[model], name: ABSURD})
    assert (refused.value.param or "").startswith(name)
    assert name in refused.value.message
    if name not in NEEDED[model]:
        parse_request(model, {**NEEDED[model], name: None})


def test_whole_floats_are_integers() -> None:
    """As libraries write them whose numbers are all floats."""
    needed = NEEDED[CompletionRequest]
    found = parse_request(CompletionRequest, {**needed, "max_tokens": 5.0, "stop_token_ids": [7.0, 8, 9.0], "seed": 2})
    assert isinstance(found, CompletionRequest)
    assert repr((found.max_tokens, found.stop_token_ids, found.seed)) == "(5, (7, 8, 9), 2)"
    options = parse_request(OllamaChatRequest, {"model": "m", "messages": [], "options": {"num_predict": 5.0}}).options
    assert options is not None
    assert repr(options.num_predict) == "5"
    with pytest.raises(InvalidRequestError, match=r"^seed must be an integer"):  # as -2^63 - 1 is parsed
        parse_request(CompletionRequest, {**needed, "seed": -9.223372036854775808e18})
    for wrong in (5.5, "5.0", True, -1.0, 1e300):
        with pytest.raises(InvalidRequestError, match=r"^max_tokens must be") as refused:
            parse_request(CompletionRequest, {**needed, "max_tokens": wrong})
        assert len(refused.value.message) < 400


OPENAI, ANTHROPIC = openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")
# Of the client itself, headers, who pays, and caching, which is automatic.
NOT_IN_BODIES = {
    "self",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
    "betas",
    "user_profile_id",
    "workspace_id",
}
WITHOUT_MEANING = {"billing_policy", "cache_control", "fallback_credit_token"}


@pytest.mark.parametrize(
    ("method", "model"),
    [
        (OPENAI.chat.completions.create, ChatCompletionRequest),
        (OPENAI.completions.create, CompletionRequest),
        (OPENAI.embeddings.create, EmbeddingRequest),
        (OPENAI.responses.create, ResponsesRequest),
        (ANTHROPIC.messages.create, MessagesRequest),
        (ANTHROPIC.beta.messages.create, MessagesRequest),
        (ANTHROPIC.messages.count_tokens, MessagesPrompt),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_every_parameter_of_the_sdks_is_known(method: Callable[..., Any], model: type[RequestModel]) -> None:
    """One that changes the meaning of a request must not be ignored."""
    known = model.model_fields.keys() | model.refused.keys() | model.hints.keys()
    assert inspect.signature(method).parameters.keys() - NOT_IN_BODIES - WITHOUT_MEANING <= known


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.__name__)
def test_a_hint_is_logged_once_for_each_name(
    model: type[RequestModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tessera.app.schema.request._logged", set())
    for name, neutral in model.hints.items():
        for value in (*neutral, None, ABSURD, ABSURD):
            parse_request(model, {**NEEDED[model], name: value})
    names = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert names == list(model.hints)


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.__name__)
def test_what_is_refused_is_not_accepted_as_well(model: type[RequestModel]) -> None:
    assert not set(model.refused) & set(model.model_fields)
    for name, neutral in model.refused.items():
        for value in neutral:
            parse_request(model, {**NEEDED[model], name: value})


@pytest.mark.parametrize("field", ["audio"])
def test_parts_of_a_message_that_would_be_lost_are_refused(field: str) -> None:
    message = {"role": "assistant", "content": "a", field: {"id": "x"}}
    with pytest.raises(InvalidRequestError) as refused:
        parse_request(ChatCompletionRequest, {"model": "m", "messages": [message]})
    assert refused.value.param == f"messages[0].{field}"
    assert ChatMessage.model_validate({**message, field: None}).content == "a"


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_obfuscation_of_a_stream_is_refused(model: type[RequestModel]) -> None:
    body = {**NEEDED[model], "stream": True}
    parse_request(model, {**body, "stream_options": {"include_obfuscation": False}})
    with pytest.raises(InvalidRequestError) as refused:
        parse_request(model, {**body, "stream_options": {"include_obfuscation": True}})
    assert refused.value.param == "stream_options.include_obfuscation"
