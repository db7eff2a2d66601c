"""Failures of the store, and what SQLite and the file system raise as such."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import sqlite3
import time
from collections.abc import Iterator

from tessera.engine.contract.errors import EngineError

logger = logging.getLogger("tessera.app")

LOG_INTERVAL = 60.0  # seconds between two lines on the same failure
_logged_at: dict[str, float] = {}

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
SQLITE_FULL = "database or disk is full"


class StoreUnavailableError(EngineError):
    """The data folder cannot be read or written: a read-only or failing disk, a damaged database."""

    status = 503
    code = "store_unavailable"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The store cannot be read or changed just now; please try again later.")


class StoreFullError(EngineError):
    """The disk is full, or the store's own limit is reached."""

    status = 507
    code = "store_full"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "The store has no space left for this; delete what is no longer needed.")


class StoreQuotaError(StoreFullError):
    """The limit of one API key is reached."""

    status = 400
    type = "invalid_request_error"
    code = "storage_limit_reached"


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise StoreFullError or StoreUnavailableError for errors of SQLite and the file system; the log has the cause."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # a fault of the statement, not of the disk
    except sqlite3.Error as error:
        _log(f"the data folder's database: {error}")
        raise (StoreFullError() if SQLITE_FULL in str(error) else StoreUnavailableError()) from error
    except OSError as error:
        _log(f"the data folder: {error}")
        raise (StoreFullError() if error.errno in NO_SPACE else StoreUnavailableError()) from error


def _log(message: str) -> None:
    """Write a warning, unless the same was written a moment ago: a failing disk fails every request."""
    now = time.monotonic()
    if now - _logged_at.get(message, -math.inf) > LOG_INTERVAL:
        _logged_at[message] = now
        logger.warning(message)
