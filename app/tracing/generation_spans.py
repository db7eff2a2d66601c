"""The spans below a request's, written once it has ended, from the times that the engine reported.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), and beside them those of vLLM (`gen_ai.latency.*`,
`gen_ai.request.n`, `gen_ai.request.id`, `gen_ai.usage.prompt_tokens`, ...), which its users' dashboards read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from tessera.app.generate.generation import Choice, Generation
from tessera.app.http.access_log import RequestTrace
from tessera.engine.contract.sampling_params import SamplingParams

OPERATIONS = {  # by the end of the route's path; all others are chats
    "/completions": "text_completion",
    "/chat/completions": "chat",
    "/api/generate": "text_completion",
    "/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/rerank": "rerank",
    "/score": "score",
    "/classify": "classify",
}
MAX_CHOICES = 16  # of one request, with spans of their own
PROVIDER = "tessera"


@dataclass(frozen=True)
class WallClock:
    """Turns times of `time.monotonic()` into nanoseconds since 1970, none of them outside `bounds`."""

    bounds: tuple[int, int]
    offset: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def nanoseconds(self, monotonic: float) -> int:
        begin, end = self.bounds
        return min(max(int(1e9 * monotonic) + self.offset, begin), end)


def write_spans(tracer: Tracer, parent: Context, trace: RequestTrace, path: str, bounds: tuple[int, int]) -> None:
    """Write the spans of a request that has named a model.

    Args:
        parent: with the request's own span.
        path: of the request's route.
        bounds: nanoseconds since 1970, of its beginning and the end of its response.
    """
    if trace.model is None:
        return
    clock = WallClock(bounds)
    operation = operation_of(path)
    generation = trace.generation if isinstance(trace.generation, Generation) else None
    attributes = _request_attributes(trace, operation)
    if generation is not None:
        attributes |= _generation_attributes(trace, generation)
    name = f"{operation} {trace.model}"
    span = tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, start_time=clock.nanoseconds(trace.arrival))
    if trace.error is not None:
        span.set_attribute("error.type", trace.error.code or trace.error.type)
        span.set_status(Status(StatusCode.ERROR))
    if generation is not None:
        inside = set_span_in_context(span, parent)
        for choice in generation.choices[:MAX_CHOICES]:
            _write_phases(tracer, inside, generation, choice, clock)
    span.end(bounds[1])


def operation_of(path: str) -> str:
    """`gen_ai.operation.name` of a route; the conventions name chat, text_completion and embeddings."""
    found = [end for end in OPERATIONS if path.endswith(end)]
    return OPERATIONS[max(found, key=len)] if found else "chat"


def _write_phases(tracer: Tracer, parent: Context, generation: Generation, choice: Choice, clock: WallClock) -> None:
    """Queue, prefill and decode of one sequence, as far as it came."""
    attributes = {"tessera.choice.index": choice.index} if len(generation.choices) > 1 else {}
    at = generation.submitted
    for name, seconds in phases(choice):
        span = tracer.start_span(name, parent, attributes=attributes, start_time=clock.nanoseconds(at))
        if name == "prefill":
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", choice.num_cached_tokens)
        elif name == "decode":
            span.set_attribute("gen_ai.usage.output_tokens", choice.num_tokens)
        at += seconds
        span.end(clock.nanoseconds(at))


def phases(choice: Choice) -> list[tuple[str, float]]:
    """(name, seconds) of the phases that a sequence has come to, one after the other.

    A sequence that a stop string or its client ended has no last time of the engine's; its decoding lasted until the
    last token came.
    """
    if choice.queue_time is None:
        return []
    found = [("queue", choice.queue_time)]
    if choice.prefill_time is not None and choice.first_token_at is not None:
        decode_time = choice.decode_time
        if decode_time is None:
            decode_time = choice.last_token_at - choice.first_token_at
        found += [("prefill", choice.prefill_time), ("decode", decode_time)]
    return found


def _request_attributes(trace: RequestTrace, operation: str) -> dict[str, Any]:
    known = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.request.stream": trace.stream,
        "gen_ai.request.id": trace.context.get("id"),
        "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.prompt_tokens": trace.num_prompt_tokens,
        "tessera.key.name": trace.context.get("key"),
    }
    return _without_none(known)


def _generation_attributes(trace: RequestTrace, generation: Generation) -> dict[str, Any]:
    usage, timing = generation.usage(), generation.timing()
    first = min(generation.choices, key=lambda choice: choice.first_token_at or float("inf"))
    times = dict(phases(first))
    begun = timing.first_token_at
    num_prompts = len(generation.choices) // generation.choices_per_prompt
    seconds: Mapping[str, float | None] = {
        "gen_ai.latency.time_in_queue": times.get("queue"),
        "gen_ai.latency.time_in_model_prefill": times.get("prefill"),
        "gen_ai.latency.time_in_model_decode": times.get("decode"),
        "gen_ai.latency.time_in_model_inference": times["prefill"] + times["decode"] if "prefill" in times else None,
        "gen_ai.latency.time_to_first_token": begun - trace.arrival if begun is not None else None,
        "gen_ai.response.time_to_first_chunk": begun - trace.arrival if begun is not None and trace.stream else None,
        "gen_ai.latency.e2e": first.last_token_at - trace.arrival if begun is not None else None,
    }
    return _sampling_attributes(generation.params) | _without_none(
        {
            "gen_ai.request.choice.count": generation.choices_per_prompt,
            "gen_ai.request.n": generation.choices_per_prompt,
            "gen_ai.usage.num_sequences": num_prompts * generation.choices_per_prompt,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.prompt_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_completion_tokens,
            "gen_ai.usage.completion_tokens": usage.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.num_reasoning_tokens or None,
            "gen_ai.response.finish_reasons": [choice.reported_reason or "abort" for choice in generation.choices],
            **seconds,
        }
    )


def _sampling_attributes(params: SamplingParams | None) -> dict[str, Any]:
    """The parameters that were used, with the defaults for those that the request did not give."""
    if params is None:
        return {}
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
