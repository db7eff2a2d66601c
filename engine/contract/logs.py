"""Log lines of all processes, to standard error: text for people, or one JSON object a line for machines.

A record may have `extra={"fields": {...}}`, which become `key=value` at the end of a text line and members of a JSON
object. Lines that are written while a request is handled have the fields of `request_context` too: its id, client,
key and trace. Times are UTC. Control characters are escaped and keys are blotted out, whatever a line quotes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

logger = logging.getLogger("tessera")

PLAIN_VALUE = re.compile(r"[\w./:@+,-]+", re.ASCII)
INDENT = "    "  # of all lines of a text record but its first, so that none of them can pass for a record
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SECRET = re.compile(r"\b(sk-|hf_|Bearer |Basic )[\w.~+/=-]{8,}", re.ASCII)
BLOTTED = r"\1[hidden]"

request_context: ContextVar[Mapping[str, str] | None] = ContextVar("request_context", default=None)


def configure_logging(log_format: LogFormat = "text", level: LogLevel = "info", *, process: str | None = None) -> None:
    """Set up logging from `level` on in this format, also of exceptions that nothing catches; call once a process.

    `process` is a field of every line; the server's first process has none.
    """
    own = {"process": process} if process is not None else {}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(own) if log_format == "json" else TextFormatter(own))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None, /) -> None:
    if not issubclass(kind, (KeyboardInterrupt, SystemExit)):
        logger.critical("uncaught exception", exc_info=(kind, error or kind(), traceback))


def request_fields(engine_request_id: str) -> dict[str, str]:
    """The fields of a line about one of the engine's requests, which are called `REQUEST_ID-NUMBER`."""
    return {"id": engine_request_id.rpartition("-")[0]}


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER: MESSAGE key=value ...`; values that are not one plain word are written as JSON.

    Args:
        own: fields of every line.
    """

    def __init__(self, own: Mapping[str, Any] | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._own = own or {}

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return _safe("\n".join([first, *(INDENT + line for line in others)]))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [f"{name}={_text(value)}" for name, value in _fields(record, self._own).items()]
        line = super().formatMessage(record).replace("\n", r"\n")
        return " ".join([line, *words])


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, the record's fields, and `exception` where there is one.

    Args:
        own: fields of every line.
    """

    def __init__(self, own: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._own = own or {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record, self._own),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _without_secrets(json.dumps(line, default=str))


def _fields(record: logging.LogRecord, own: Mapping[str, Any]) -> dict[str, Any]:
    return {**own, **(request_context.get() or {}), **getattr(record, "fields", {})}


def _time(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    if isinstance(value, (int, float)):
        return str(value).lower()
    # Quoted, to prevent log injection.
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _safe(line: str) -> str:
    """Without secrets, and without characters that steer a terminal or pass for the end of a line."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), _without_secrets(line))


def _without_secrets(line: str) -> str:
    return SECRET.sub(BLOTTED, line)
