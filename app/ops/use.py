"""Use by model and by key since the server's start, for the dashboard."""

from __future__ import annotations

from typing import Any

from tessera.app.http.counts import HttpCounts
from tessera.app.keys.key_ring import KeyHolder, KeyRing
from tessera.app.limits.key_use import Cell, KeyUse, Rate


def use_object(counts: HttpCounts, ring: KeyRing | None, use: KeyUse, holder: KeyHolder | None) -> dict[str, Any]:
    """All models, and the keys of the keys file: all of them for `holder`s who may administer, else their own."""
    keys = [
        {
            "name": key.name,
            "requests": use.total(key.slot, Cell.NUM_REQUESTS),
            "requests_under_way": use.total(key.slot, Cell.REQUESTS_UNDER_WAY),
            "refused": use.total(key.slot, Cell.NUM_REFUSED),
            "prompt_tokens": use.total(key.slot, Cell.NUM_PROMPT_TOKENS),
            "generation_tokens": use.total(key.slot, Cell.NUM_GENERATED_TOKENS),
            "tokens_last_minute": round(use.in_last_minute(key.slot, Rate.TOKENS)),
        }
        for key in (ring.named if ring is not None else ())
        if holder is not None and (holder.key is None or holder.key.may_administer or holder.key.name == key.name)
    ]
    return {"models": counts.use_by_model(), "keys": keys}
