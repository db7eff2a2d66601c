"""Log-probabilities as chat completions and responses report them, and those of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.app.generate.generation import TokenEntry
from tessera.app.schema.generation_fields import ALL_LOGPROBS
from tessera.app.text.tokenizer import Tokenizer, printable_token
from tessera.engine.contract.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for an impossible token


def chat_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """`logprobs` of a chat choice; `bytes` are the token's own and need not be whole characters.

    `as_ids` calls the tokens `token_id:ID`.
    """

    def scored(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        token = token_id_name(token_id) if as_ids else printable_token(raw)
        return {"token": token, "logprob": finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            {
                **scored(entry.logprobs.token_id, entry.logprobs.logprob),
                "top_logprobs": [
                    scored(token_id, logprob)
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
    """null for the first token, then for each token its own log-probability and those of the `num_top` best, or all."""
    best = slice(None if num_top == ALL_LOGPROBS else num_top)
    rows: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in found:
        row = {str(entry.token_id): _ranked_token(entry.token_id, entry.logprob, entry.rank, tokenizer)}
        ranked = zip(entry.top_token_ids[best], entry.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(ranked, start=1):
            row.setdefault(str(token_id), _ranked_token(token_id, logprob, rank, tokenizer))
        rows.append(row)
    return rows


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: neither infinite nor NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def token_id_name(token_id: int) -> str:
    """A token's name with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def _ranked_token(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": printable_token(tokenizer.token_bytes(token_id)),
    }
