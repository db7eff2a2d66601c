"""Log lines of the app processes."""

from __future__ import annotations

import logging

from tessera.app.settings import AppSettings
from tessera.engine.contract import logs


def configure_logging(settings: AppSettings) -> None:
    logs.configure_logging(settings.log_format, settings.log_level)
    # What it says about its own start and stop, this server says itself.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
