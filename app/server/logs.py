"""Log lines of the app processes."""

from __future__ import annotations

import logging

from tessera.app.settings import AppSettings
from tessera.engine.contract import logs


def configure_logging(settings: AppSettings) -> None:
    process = f"app-{settings.app_process}" if settings.app_process else None
    logs.configure_logging(settings.log_format, settings.log_level, process=process)
    # This server reports its own start and stop.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # What cannot be sent is reported by `app.tracing`, once rather than with each batch.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
