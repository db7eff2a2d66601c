"""The objects that answers are made of: ids, usage, log-probabilities."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera import __version__
from tessera.app.generate.generation import TokenEntry, Usage
from tessera.app.text.tokenizer import Tokenizer, printable_token
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning
from tessera.engine.contract.messages import EngineInfo

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for an impossible token


@dataclass(slots=True)
class AnswerHead:
    """The fields that all chunks of an answer, and the answer as a whole, have in common."""

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str, info: EngineInfo) -> AnswerHead:
        return cls(f"{prefix}-{secrets.token_hex(16)}", model, system_fingerprint(info))

    def as_dict(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": None,
            "system_fingerprint": self.system_fingerprint,
        }


def system_fingerprint(info: EngineInfo) -> str:
    """Changes when equal seeds may give other tokens: with the program, the model's numbers or the device."""
    facts = f"{__version__}|{info.architecture}|{info.num_parameters}|{info.dtype}|{info.device_name}"
    return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:10]}"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def chat_message(text: str, parts: Sequence[Part] | None) -> dict[str, Any]:
    """`message` of a chat choice. `parts` is the text as it was read; None where it is all content."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if parts is None:
        return message
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls = tool_calls(parts)
    message["content"] = content or (None if calls or reasoning else "")
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def tool_calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The calls of an answer, each with its arguments whole."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    return [
        {
            "id": start.id,
            "type": "function",
            "function": {"name": start.name, "arguments": "".join(arguments[start.index])},
        }
        for start in starts
    ]


def chat_delta(part: Part) -> dict[str, Any]:
    """`delta` of a chat chunk."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    call: dict[str, Any] = {"index": part.index}
    if isinstance(part, CallStart):
        call |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
    else:
        call["function"] = {"arguments": part.text}
    return {"tool_calls": [call]}


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice; `bytes` are the token's own, whole characters or not."""
    return {
        "content": [
            {
                **_chat_token(entry.logprobs.token_id, entry.logprobs.logprob, tokenizer),
                "top_logprobs": [
                    _chat_token(token_id, logprob, tokenizer)
                    for token_id, logprob in zip(
                        entry.logprobs.top_token_ids[:num_top], entry.logprobs.top_logprobs[:num_top], strict=True
                    )
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a text completion: four parallel lists."""
    top = []
    for entry in entries:
        found = entry.logprobs
        ranked = zip(found.top_token_ids[:num_top], found.top_logprobs[:num_top], strict=True)
        top.append({completion_token(token_id, tokenizer): finite(logprob) for token_id, logprob in ranked})
        top[-1].setdefault(completion_token(found.token_id, tokenizer), finite(found.logprob))
    return {
        "tokens": [completion_token(entry.logprobs.token_id, tokenizer) for entry in entries],
        "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": printable_token(raw), "logprob": finite(logprob), "bytes": list(raw)}


def completion_token(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text; where its bytes are no characters, `bytes:` says so."""
    raw = tokenizer.token_bytes(token_id)
    text = printable_token(raw)
    return text if text.encode() == raw else f"bytes:{text}"


def finite(logprob: float) -> float:
    """As JSON can say it: neither an infinity nor what is no number at all."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
