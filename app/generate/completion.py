"""Completions as a whole, for responses that are not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from tessera.app.generate.generation import (
    Delta,
    FinishReason,
    Generation,
    TokenEntry,
    values_of_entries,
    values_of_scores,
)
from tessera.app.http.streaming import run_while_connected
from tessera.app.tools.parts import Part


@dataclass(slots=True)
class Completion:
    """One finished choice. `parts` is the text as its reader understood it; None without a reader."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    parts: list[Part] | None = None

    def append_delta(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        if delta.parts is not None:
            self.parts = (self.parts or []) + delta.parts

    def as_delta(self) -> Delta:
        """All of it as one delta, for writers of events that also write whole responses."""
        return Delta(0, self.text, self.token_ids, self.entries, self.finish_reason, self.parts)


def num_values(generation: Generation, completions: Sequence[Completion]) -> int:
    """Tokens and log-probabilities that a response may list: what it takes to build it."""
    total = sum(1 + len(completion.token_ids) for completion in completions)
    total += sum(values_of_entries(completion.entries) for completion in completions)
    return total + sum(values_of_scores(choice.prompt_logprobs) for choice in generation.choices)


async def complete(http_request: Request, generation: Generation, timeout: float) -> list[Completion]:
    """All choices to their ends. The engine stops working when the client leaves.

    Raises:
        RequestError: the engine failed, or it took longer than `timeout` seconds.
    """
    completions = [Completion() for _ in generation.choices]

    async def collect() -> None:
        async for delta in generation.deltas():
            completions[delta.index].append_delta(delta)

    try:
        await run_while_connected(http_request.receive, collect(), timeout)
    finally:
        await generation.abort()
    return completions
