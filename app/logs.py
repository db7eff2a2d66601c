"""Log lines of the app processes."""

from __future__ import annotations

import logging

import engine.logs
from app.settings import AppSettings


def configure_logging(settings: AppSettings) -> None:
    engine.logs.configure_logging(settings.log_format, settings.log_level)
    # What it says about its own start and stop, this server says itself.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
