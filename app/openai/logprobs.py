"""Log-probabilities as chat completions and responses report them, and those of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.app.generate.generation import TokenEntry
from tessera.app.text.tokenizer import Tokenizer, printable_token
from tessera.engine.contract.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for an impossible token


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice; `bytes` are the token's own and need not be whole characters."""
    return {
        "content": [
            {
                **_scored_token(entry.logprobs.token_id, entry.logprobs.logprob, tokenizer),
                "top_logprobs": [
                    _scored_token(token_id, logprob, tokenizer)
                    for token_id, logprob in zip(
                        entry.logprobs.top_token_ids[:num_top], entry.logprobs.top_logprobs[:num_top], strict=True
                    )
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    found: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """null for the first token, then for each token its own log-probability and those of the `num_top` best."""
    rows: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in found:
        row = {str(entry.token_id): _ranked_token(entry.token_id, entry.logprob, entry.rank, tokenizer)}
        ranked = zip(entry.top_token_ids[:num_top], entry.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(ranked, start=1):
            row.setdefault(str(token_id), _ranked_token(token_id, logprob, rank, tokenizer))
        rows.append(row)
    return rows


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: neither infinite nor NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _scored_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": printable_token(raw), "logprob": finite(logprob), "bytes": list(raw)}


def _ranked_token(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": printable_token(tokenizer.token_bytes(token_id)),
    }
