"""The body of POST /v1/batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tessera.app.schema.fields import MAX_NAME, Metadata
from tessera.app.schema.request import RequestModel
from tessera.engine.contract.errors import InvalidRequestError

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]

WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])\Z")
UNIT_SECONDS = {"h": 3600, "d": 86400}
MAX_WINDOW = 30 * 86400  # seconds


class ExpiresAfter(BaseModel):
    """When the files of results expire, counted from their creation."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class BatchRequest(RequestModel):
    """The requests of a file, run when there is room for them beside interactive requests."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    }

    input_file_id: str = Field(max_length=MAX_NAME, description="A file of the purpose batch: JSON lines.")
    endpoint: Endpoint = Field(description="The path of all its requests.")
    completion_window: Annotated[str, Field(max_length=8)] = Field(
        description="Time after which what has not run expires: hours or days, such as 24h; at most 30d."
    )
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When the files of results expire, counted from their creation."
    )

    def check(self) -> None:
        """Raise InvalidRequestError for what the types cannot express."""
        if not 0 < self.window_seconds <= MAX_WINDOW:
            raise InvalidRequestError(
                "completion_window must be hours or days, such as 24h, and at most 30d.", param="completion_window"
            )

    @property
    def window_seconds(self) -> int:
        match = WINDOW.match(self.completion_window)
        return int(match[1]) * UNIT_SECONDS[match[2]] if match else 0
