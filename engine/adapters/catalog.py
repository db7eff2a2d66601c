"""The adapters that are served, by name, and those of them that are in host memory; the others are in their folders."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tessera.engine.adapters.reader import Adapter, read_adapter
from tessera.engine.contract.errors import ConfigError, EngineError, InvalidRequestError, NotFoundError, TesseraError
from tessera.engine.models.config import ModelConfig

logger = logging.getLogger("tessera.engine.adapters")

MAX_ADAPTERS = 4096


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter under a name. After `remove` it is still that of the sequences that have begun with it.

    Attributes:
        folder: where it is read again when host memory has given it up.
        digest: see `Adapter`; it must still be that of the folder then.
        base: see `AdapterConfig`.
        created: Unix time.
    """

    name: str
    folder: Path
    rank: int
    digest: bytes
    base: str
    created: int


def unknown_model(name: str) -> NotFoundError:
    """The error for a name that is not served."""
    return NotFoundError(f"The model {name[:100]!r} does not exist here; see /v1/models.", param="model")


class AdapterCatalog:
    """Reads folders in a thread of its own; all methods are called from one thread.

    Host memory holds at most `max_in_memory` adapters, those used last. One that is in a device slot counts as used
    when it was placed there.
    """

    def __init__(self, model: ModelConfig, *, max_rank: int, max_in_memory: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._max_in_memory = max_in_memory
        self._by_name: dict[str, ServedAdapter] = {}
        self._in_memory: OrderedDict[bytes, Adapter] = OrderedDict()  # by digest, the one used last at the end
        self._reading: dict[ServedAdapter, Future[Adapter]] = {}
        self._thread = ThreadPoolExecutor(1, "adapters")

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> ServedAdapter:
        """Raises: NotFoundError."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise unknown_model(name)
        return adapter

    def read(self, folder: Path, on_done: Callable[[], None] | None = None) -> Future[Adapter]:
        """Begin to read a folder; `on_done` is called in the other thread."""
        future = self._thread.submit(read_adapter, folder, self._model, max_rank=self._max_rank)
        if on_done is not None:
            future.add_done_callback(lambda _: on_done())
        return future

    def register(self, name: str, folder: Path, adapter: Adapter, *, replace: bool = False) -> ServedAdapter:
        """Serve what was read from a folder.

        Raises: InvalidRequestError where the name is taken and not to be replaced, or there are too many.
        """
        if name in self._by_name and not replace:
            raise InvalidRequestError(
                f"The adapter {name[:100]!r} is loaded already: unload it first, or give load_inplace.",
                param="lora_name",
            )
        if name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
            raise InvalidRequestError(f"There are {MAX_ADAPTERS} adapters already, and no more are taken.")
        served = ServedAdapter(name, folder, adapter.rank, adapter.digest, adapter.base, int(time.time()))
        self._by_name[name] = served
        self._keep(adapter)
        return served

    def remove(self, name: str) -> None:
        """Requests that have begun go on. Raises: NotFoundError."""
        if self._by_name.pop(name, None) is None:
            raise NotFoundError(f"There is no adapter {name[:100]!r}.", param="lora_name")

    # -- host memory ----------------------------------------------------------------------------

    def in_memory(self, served: ServedAdapter) -> Adapter | None:
        """The adapter; None where it is being read from its folder, which this call begins."""
        adapter = self._in_memory.get(served.digest)
        if adapter is not None:
            self._in_memory.move_to_end(served.digest)
            return adapter
        if served not in self._reading:
            self._reading[served] = self.read(served.folder)
        return None

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def num_in_memory(self) -> int:
        return len(self._in_memory)

    def wait(self, seconds: float) -> None:
        """For one of the adapters that are being read."""
        wait(self._reading.values(), seconds, return_when="FIRST_COMPLETED")

    def finish_reads(self) -> dict[ServedAdapter, EngineError]:
        """Keep what has been read; -> those that could not be, with the reason."""
        failed: dict[ServedAdapter, EngineError] = {}
        for served, future in [pair for pair in self._reading.items() if pair[1].done()]:
            del self._reading[served]
            try:
                adapter = future.result()
                if adapter.digest != served.digest:
                    raise ConfigError(f"{served.folder} has changed since it was loaded; load it again")
            except (TesseraError, OSError) as error:
                logger.error("the adapter %s cannot be read again: %s", served.name, error)
                failed[served] = EngineError(f"The adapter {served.name[:100]!r} cannot be read again: {error}")
            else:
                self._keep(adapter)
        return failed

    def _keep(self, adapter: Adapter) -> None:
        self._in_memory[adapter.digest] = adapter
        self._in_memory.move_to_end(adapter.digest)
        while len(self._in_memory) > self._max_in_memory:
            self._in_memory.popitem(last=False)
