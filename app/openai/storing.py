"""Generations whose results are stored."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Delta, Generation


class StoringSource:
    """A generation as the source of a stream, with something to do between its last delta and the stream's end.

    So what is stored can be read as soon as the client has seen the end.

    Args:
        completions: gather the deltas of each choice.
    """

    def __init__(
        self,
        generation: Generation,
        store_result: Callable[[], Awaitable[None]],
        completions: Sequence[Completion] = (),
    ) -> None:
        self._generation = generation
        self._store_result = store_result
        self._completions = completions

    async def wait_accepted(self, seconds: float) -> None:
        await self._generation.wait_accepted(seconds)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        async with contextlib.aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if self._completions:
                    self._completions[delta.index].append_delta(delta)
                yield delta
        await self._store_result()

    @property
    def num_values(self) -> Callable[[Delta], int] | None:
        return self._generation.num_values

    async def abort(self) -> None:
        await self._generation.abort()
