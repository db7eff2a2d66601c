"""Text completions' `logprobs`, and the prompts that `echo` puts before the completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tessera.app.generate.generation import TokenEntry
from tessera.app.openai.logprobs import finite
from tessera.app.text.tokenizer import Tokenizer, printable_token
from tessera.engine.contract.messages import TokenLogprobs


@dataclass(slots=True, frozen=True)
class Echo:
    """A prompt to be returned before its completions; `offsets[i]` is where the text of token i begins in `text`."""

    text: str
    token_ids: list[int]
    offsets: list[int]


def echo_logprobs(echo: Echo, found: Sequence[TokenLogprobs], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of the echoed tokens, null for the first."""
    first = {
        "tokens": [_token_text(echo.token_ids[0], tokenizer)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    entries = [TokenEntry(each, offset) for each, offset in zip(found, islice(echo.offsets, 1, None), strict=True)]
    return joined_logprobs(first, completion_logprobs(entries, tokenizer, num_top))


def joined_logprobs(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    return {name: earlier[name] + later[name] for name in earlier}


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """`logprobs` of a text completion: four parallel lists."""
    top = []
    for entry in entries:
        found = entry.logprobs
        ranked = zip(found.top_token_ids[:num_top], found.top_logprobs[:num_top], strict=True)
        top.append({_token_text(token_id, tokenizer): finite(logprob) for token_id, logprob in ranked})
        top[-1].setdefault(_token_text(found.token_id, tokenizer), finite(found.logprob))
    return {
        "tokens": [_token_text(entry.logprobs.token_id, tokenizer) for entry in entries],
        "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text, or `bytes:` and escapes for bytes that are not whole characters."""
    raw = tokenizer.token_bytes(token_id)
    text = printable_token(raw)
    return text if text.encode() == raw else f"bytes:{text}"
