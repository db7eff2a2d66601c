"""Every exception Tessera raises on purpose, as one tree.

`ConfigError` ends a start (exit code 2, one sentence). `RequestError` ends one request and becomes
an OpenAI error object; it carries the HTTP status and the object's fields. `DeviceError` and its
children mean that the device or a kernel failed, which ends the engine process.
"""

from __future__ import annotations


class TesseraError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(TesseraError):
    """A wrong option, or one that this machine cannot satisfy."""


class ModelError(ConfigError):
    """A model folder that cannot be served: missing, unreadable, unsupported or out of bounds."""


class RequestError(TesseraError):
    """One request that cannot be (further) served.

    Attributes:
        message: for the user; says what was wrong and what is accepted.
        param: the request field at fault, or None.
        code: OpenAI's machine-readable code, or None.
        status: HTTP status.
        type: OpenAI's error type.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field with a wrong type or value."""


class ContextLengthError(InvalidRequestError):
    """Prompt and requested tokens do not fit the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    status = 401
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """Unknown model, route or object."""

    status = 404
    code = "model_not_found"


class QueueFullError(RequestError):
    """The waiting queue is full; the client should retry after `retry_after` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(RequestError):
    """The engine failed this request alone (for example non-finite logits)."""

    status = 500
    type = "server_error"
    code = "engine_error"


class EngineUnavailableError(EngineError):
    """The engine is starting, restarting, draining or not progressing."""

    status = 503
    code = "engine_unavailable"


class DeviceError(TesseraError):
    """A call into the device's driver failed."""


class RankError(TesseraError):
    """One of the devices that share a model failed or hangs, which ends the engine process."""


class OutOfMemoryError(DeviceError):
    """The device has too little free memory for an allocation."""


class CompileError(DeviceError):
    """A kernel did not compile; the message carries the compiler's log."""
