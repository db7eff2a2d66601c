"""The response object in each of its states."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal

from tessera.app.generate.generation import FinishReason, Usage
from tessera.app.generate.sampling import SamplingDefaults
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.schema.structured_output import JsonObjectFormat
from tessera.engine.contract.errors import RequestError

FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]


class ResponseStates:
    """One response; its states share the id, the time and the request's settings."""

    def __init__(self, request: ResponsesRequest, defaults: SamplingDefaults, *, stored: bool) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time())}
        self._settings = _settings(request, defaults, stored)

    def in_progress(self) -> dict[str, Any]:
        return self._in_state("in_progress", output=[])

    def finished(
        self, output: list[dict[str, Any]], finish_reason: FinishReason | None, usage: Usage
    ) -> dict[str, Any]:
        """Completed, or cut by the token limit."""
        whole = finish_reason != "length"
        return self._in_state(
            "completed" if whole else "incomplete",
            completed_at=int(time.time()) if whole else None,
            incomplete_details=None if whole else {"reason": "max_output_tokens"},
            output=output,
            usage=responses_usage(usage),
        )

    def cancelled(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return self._in_state("cancelled", output=output)

    def failed(self, output: list[dict[str, Any]], error: RequestError) -> dict[str, Any]:
        code: FailureCode = "server_error"
        if error.status == 429:
            code = "rate_limit_exceeded"
        elif error.status < 500:
            code = "invalid_prompt"
        return self._in_state("failed", error={"code": code, "message": error.message}, output=output)

    def _in_state(
        self,
        status: str,
        *,
        output: list[dict[str, Any]],
        completed_at: int | None = None,
        error: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": output,
            "usage": usage,
            **self._settings,
        }


def responses_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _settings(request: ResponsesRequest, defaults: SamplingDefaults, stored: bool) -> dict[str, Any]:
    """The request's own fields, with their defaults."""
    effort = request.reasoning_effort
    text_format = request.text.format if request.text is not None else None
    return {
        "background": request.background,
        "conversation": {"id": request.conversation} if request.conversation is not None else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": request.temperature if request.temperature is not None else defaults.temperature,
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_none=isinstance(text_format, JsonObjectFormat))
            if text_format is not None
            else {"type": "text"},
            "verbosity": request.text.verbosity or "medium" if request.text is not None else "medium",
        },
        "tool_choice": request.tool_choice.given if request.tool_choice is not None else "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p if request.top_p is not None else defaults.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
