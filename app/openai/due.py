"""Waiting for work that may be there at once, and is looked for now and then in any case."""

from __future__ import annotations

import asyncio


async def wait_until_due(due: asyncio.Event, interval: float) -> None:
    """Return once `due` is set, or after `interval` seconds."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the result.
    waiting = asyncio.ensure_future(due.wait())
    try:
        await asyncio.wait({waiting}, timeout=interval)
    finally:
        waiting.cancel()
