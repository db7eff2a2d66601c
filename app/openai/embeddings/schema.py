"""The body of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from tessera.app.schema.fields import MAX_INT32, MAX_NAME, Label, On, Prompts, integer
from tessera.app.schema.request import RequestModel
from tessera.engine.contract.errors import InvalidRequestError

MAX_DIMENSIONS = 2**17


def _float_for_null(value: Any) -> Any:
    return "float" if value is None else value


class EmbeddingRequest(RequestModel):
    """One or several inputs, each text or token ids; the response has an embedding for each, in their order."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "additional_data": (),
        "cache_salt": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "normalize": (True,),
        "priority": (0,),
        "prompt_name": (),
        "request_id": (),
        "use_activation": (True,),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "input": ["One", "Two"]}}

    model: str = Field(max_length=MAX_NAME)
    input: Prompts
    encoding_format: Annotated[Literal["float", "base64"], BeforeValidator(_float_for_null)] = "float"
    dimensions: int | None = integer(1, MAX_DIMENSIONS, "Shorter embeddings, of models that were trained for it.")
    truncate_prompt_tokens: int | None = integer(
        -1, MAX_INT32, "Keep only this many tokens of an input's beginning; -1 as many as the model embeds."
    )
    add_special_tokens: On = True
    user: Label | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for what the types cannot express."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1 or at least 1, not 0.", param="truncate_prompt_tokens"
            )
