"""One call as it is read and written: the base of its readers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from tessera.app.tools.parts import PartWriter, new_call_id

MAX_CALLED_NAME = 128
MAX_KEY = 256  # characters of an argument's name as it is written
CALLED_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_CALLED_NAME}}}")


class Call(ABC):
    """Writes a call's arguments as they come. Before it has begun nothing is written, so that text that only
    resembles a call can still become content. Arguments that break later stay the call's: OpenAI's may be broken
    JSON as well.

    Attributes:
        begun: it has been written, at least its beginning.
        done: it is whole.
        failed: it is no call; nothing was written.
        broken: its arguments stopped being JSON in their middle.
    """

    def __init__(self, writer: PartWriter, new_id: Callable[[], str] = new_call_id) -> None:
        self.begun = False
        self.done = False
        self.failed = False
        self.broken = False
        self._writer = writer
        self._new_id = new_id

    @property
    def ended(self) -> bool:
        return self.done or self.failed or self.broken

    @abstractmethod
    def read_call(self, text: str, start: int) -> int:
        """Read on from `start`; -> the first position that was not read."""

    def _write_call(self, name: str, *arguments: str) -> None:
        """Pieces of the arguments' JSON text, after the call's beginning if that is not written yet."""
        if not self.begun:
            self.begun = True
            self._writer.begin_call(name, self._new_id())
        for piece in arguments:
            self._writer.write_arguments(piece)

    def _fail(self) -> None:
        if self.begun:
            self.broken = True
        else:
            self.failed = True
