"""The bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tessera.app.schema.fields import MAX_INT32, MAX_NAME, Off
from tessera.app.schema.request import RequestModel

MAX_PATH = 4096

AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME, description="The name that requests use.")]


class LoadAdapterRequest(RequestModel):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "folder": {"lora_name": "spelling", "lora_path": "/data/adapters/spelling"}
    }

    lora_name: AdapterName
    lora_path: str = Field(min_length=1, max_length=MAX_PATH, description="A folder of the server's machine.")
    load_inplace: Off = Field(default=False, description="Replace an adapter of this name, if there is one.")
    base_model_name: str | None = Field(
        default=None, max_length=MAX_NAME, description="The model that it is for; the first where it is left out."
    )


class UnloadAdapterRequest(RequestModel):
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"named": {"lora_name": "spelling"}}

    lora_name: AdapterName
    lora_int_id: int | None = Field(default=None, ge=0, le=MAX_INT32, description="Of no effect.")
