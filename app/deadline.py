"""Waiting with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled at the end of the time or with its caller.

    Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes together with the result.

    Raises:
        asyncio.TimeoutError: no result within `seconds`.
    """
    future = asyncio.ensure_future(work)
    try:
        await asyncio.wait({future}, timeout=seconds)
        if not future.done():
            raise asyncio.TimeoutError
        return future.result()
    finally:
        if not future.done():
            future.cancel()
            await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # retrieved, so that one that came too late is not logged
