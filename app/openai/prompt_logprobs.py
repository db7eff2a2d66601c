"""What a model makes of a prompt's own tokens, in the form of vLLM's `prompt_logprobs` and of OpenAI's `echo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tessera.app.generate.generation import TokenEntry
from tessera.app.openai.objects import completion_logprobs, completion_token, finite
from tessera.app.text.tokenizer import Tokenizer, printable_token
from tessera.engine.contract.messages import TokenLogprobs


@dataclass(slots=True, frozen=True)
class Echo:
    """A prompt as it goes before its answers; `offsets` say where each token's text begins in `text`."""

    text: str
    token_ids: list[int]
    offsets: list[int]


def echo_logprobs(echo: Echo, found: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of the echoed tokens; nothing comes before the first, so it has null."""
    first = {
        "tokens": [completion_token(echo.token_ids[0], tokenizer)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    entries = [TokenEntry(each, offset) for each, offset in zip(found, islice(echo.offsets, 1, None), strict=True)]
    return joined_logprobs(first, completion_logprobs(entries, tokenizer, num_top))


def joined_logprobs(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    return {name: earlier[name] + later[name] for name in earlier}


def prompt_logprobs(
    found: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """null for the first token, then per token its own log-probability and the `num_top` most probable ones'."""
    rows: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in found:
        row = {str(entry.token_id): _scored(entry.token_id, entry.logprob, entry.rank, tokenizer)}
        ranked = zip(entry.top_token_ids[:num_top], entry.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(ranked, start=1):
            row.setdefault(str(token_id), _scored(token_id, logprob, rank, tokenizer))
        rows.append(row)
    return rows


def _scored(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": printable_token(tokenizer.token_bytes(token_id)),
    }
