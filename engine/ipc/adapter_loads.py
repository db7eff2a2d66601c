"""Adapters that clients load and unload while the engine serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.engine.contract.errors import InvalidRequestError, RequestError, TesseraError
from tessera.engine.contract.messages import AdapterDone, AdapterInfo, LoadAdapter, UnloadAdapter, refused

if TYPE_CHECKING:
    from tessera.engine.adapters.catalog import AdapterCatalog
    from tessera.engine.adapters.reader import Adapter

logger = logging.getLogger("tessera.engine.adapters")

LIST_FILE = "adapters.json"  # of names and folders, in the run folder
MAX_LOADS = 64  # that wait for their turn


class AdapterLoads:
    """Does what LoadAdapter and UnloadAdapter ask; a folder is read in another thread, one after the other.

    An engine that is started again after a fault serves what was loaded and unloaded before.

    Attributes:
        has_news: there are others, which clients do not know yet; set back by the one that tells them.
    """

    def __init__(
        self, catalog: AdapterCatalog | None, run_dir: str, wake_up: Callable[[], None], *, allowed: bool
    ) -> None:
        self.has_news = False
        self._catalog = catalog
        self._file = Path(run_dir) / LIST_FILE
        self._wake_up = wake_up
        self._allowed = allowed
        self._loads: list[tuple[bytes, LoadAdapter, Future[Adapter]]] = []
        self._done: list[tuple[bytes, AdapterDone]] = []

    def restore(self) -> None:
        """Serve what the engine before this one served."""
        if self._catalog is None or not self._file.is_file():
            return
        wanted: dict[str, str] = json.loads(self._file.read_bytes())
        for adapter in self._catalog:
            if wanted.get(adapter.name) != str(adapter.folder):
                self._catalog.remove(adapter.name)
        known = {adapter.name for adapter in self._catalog}
        for name, folder in wanted.items():
            if name not in known:
                try:
                    self._catalog.register(name, Path(folder), self._catalog.read(Path(folder)).result())
                except (TesseraError, OSError) as error:
                    logger.error("the adapter %s cannot be loaded again: %s", name, error)

    def infos(self) -> list[AdapterInfo]:
        catalog = self._catalog
        found = catalog or ()
        return [AdapterInfo(each.name, str(each.folder), each.rank, each.created, each.digest) for each in found]

    def begin(self, client: bytes, message: LoadAdapter | UnloadAdapter) -> None:
        """The answer comes from `take_done`."""
        try:
            catalog = self._allowed_catalog(message)
            if isinstance(message, UnloadAdapter):
                catalog.remove(message.name)
                self._note_change(catalog)
                self._answer(client, message, None)
            elif len(self._loads) >= MAX_LOADS:
                raise InvalidRequestError(f"{MAX_LOADS} adapters are being loaded already; try again later.")
            else:
                self._loads.append((client, message, catalog.read(Path(message.folder), self._wake_up)))
        except RequestError as error:
            self._answer(client, message, error)

    def take_done(self) -> list[tuple[bytes, AdapterDone]]:
        """Register what has been read; -> answers."""
        for load in [load for load in self._loads if load[2].done()]:
            self._loads.remove(load)
            client, message, future = load
            refusal: RequestError | None = None
            try:
                catalog = self._allowed_catalog(message)
                folder = Path(message.folder)
                catalog.register(message.name, folder, future.result(), replace=message.replace)
                self._note_change(catalog)
                logger.info("loaded the adapter %s from %s", message.name, folder)
            except RequestError as error:
                refusal = error
            except (TesseraError, OSError) as error:
                refusal = InvalidRequestError(f"The adapter cannot be loaded: {error}", param="lora_path")
            self._answer(client, message, refusal)
        done, self._done = self._done, []
        return done

    def _allowed_catalog(self, message: LoadAdapter | UnloadAdapter) -> AdapterCatalog:
        if self._catalog is None or not (self._allowed or message.by_server):
            raise InvalidRequestError("Adapters are loaded and unloaded only on servers with --allow-lora-loading.")
        return self._catalog

    def _answer(self, client: bytes, message: LoadAdapter | UnloadAdapter, refusal: RequestError | None) -> None:
        self._done.append((client, AdapterDone(message.token, None if refusal is None else refused("", refusal))))

    def _note_change(self, catalog: AdapterCatalog) -> None:
        self.has_news = True
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({each.name: str(each.folder) for each in catalog}))
        partial.replace(self._file)
