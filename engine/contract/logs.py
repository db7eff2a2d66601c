"""Log lines of all processes, to standard error: text for people, or one JSON object a line for machines.

A record may bring `extra={"fields": {...}}`, which become `key=value` at the end of a text line and members
of a JSON object. Times are UTC.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

PLAIN_VALUE = re.compile(r"[\w./:@+,-]+", re.ASCII)


def configure_logging(log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Set up logging from `level` on in this format; call once a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE key=value ...`; values that are not one plain word are written as JSON."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [f"{name}={_text(value)}" for name, value in _fields(record).items()]
        return " ".join([super().formatMessage(record), *words])


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, the record's fields, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, (int, float)):
        return str(value).lower()
    # Quoted, to prevent log injection.
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if PLAIN_VALUE.fullmatch(text) else json.dumps(text)
