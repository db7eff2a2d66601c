"""The bodies of POST /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator

from tessera.app.openai.embeddings.embedders import MAX_INPUT_CHARS
from tessera.app.schema.fields import MAX_INT32, Entries, Label, ModelName, On, Prompts, at_most, integer, wrong
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.engine.contract.errors import InvalidRequestError

MAX_TEXTS = 2048  # on one side of the pairs
MAX_INSTRUCTION_CHARS = 2**16


def _text(value: Any) -> str:
    """A string, or an object that has one as its text."""
    text = value.get("text") if type(value) is dict else value
    if type(text) is not str:
        raise wrong("must be a string, or an object with a string as its text")
    if len(text) > MAX_INPUT_CHARS:
        raise wrong(f"may have at most {MAX_INPUT_CHARS} characters, not {len(text)}")
    return text


def _listed(value: Any) -> Any:
    return [value] if type(value) in (str, dict) else value


BoundedText = Annotated[str, Field(max_length=MAX_INPUT_CHARS)]


class TextObject(BaseModel):
    """A text in an object, whose other fields are ignored."""

    text: BoundedText


TextInput = Annotated[str, PlainValidator(_text, json_schema_input_type=BoundedText | TextObject)]
Texts = Annotated[
    Entries[TextInput],
    Field(min_length=1, max_length=MAX_TEXTS, description=f"At most {MAX_TEXTS} strings, or objects with a text."),
    at_most(MAX_TEXTS),
]
TextOrTexts = Annotated[Texts, BeforeValidator(_listed)]


class _InputFields(RequestModel):
    """Fields that all three have in common."""

    refused: ClassVar[FieldValues] = {
        "cache_salt": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "messages": (),
        "padding": (False, "do_not_pad"),
        "softmax": (True,),
        "activation": (True,),
        "truncation_side": ("right",),
    }
    hints: ClassVar[FieldValues] = {"mm_processor_kwargs": ({},), "priority": (0,), "request_id": ()}

    model: ModelName = ""
    truncate_prompt_tokens: int | None = integer(
        -1, MAX_INT32, "Keep only this many tokens of an input, a pair being one; -1 as many as the model takes."
    )
    use_activation: On = True
    user: Label | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for what the types cannot express."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1 or at least 1, not 0.", param="truncate_prompt_tokens"
            )


class PairFields(_InputFields):
    """Fields of requests that score pairs."""

    max_tokens_per_query: int | None = integer(0, MAX_INT32, "Keep only this many tokens of a first text; 0 is all.")
    max_tokens_per_doc: int | None = integer(0, MAX_INT32, "Keep only this many tokens of a second text; 0 is all.")
    instruction: str | None = Field(
        default=None,
        max_length=MAX_INSTRUCTION_CHARS,
        description="The task, for models that are asked by a prompt (Qwen3-Reranker).",
    )


class RerankRequest(PairFields):
    """A query and documents; the response has these by relevance."""

    refused: ClassVar[FieldValues] = {**_InputFields.refused, "max_chunks_per_doc": (), "rank_fields": ([],)}

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "query": "Where is the cat?", "documents": ["On the mat.", {"text": "It rains."}]}
    }

    query: TextInput
    documents: Texts
    top_n: int | None = integer(0, MAX_INT32, "Return only so many, the most relevant; 0 returns all.")
    return_documents: On = True


class ScoreRequest(PairFields):
    """Pairs: one text with each of several, or as many first as second texts.

    The texts are in text_1 and text_2, in queries and documents (or items), or in data_1 and data_2.
    """

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one with several": {"model": "MODEL", "text_1": "Where is the cat?", "text_2": ["On the mat.", "It rains."]},
        "pairs": {"model": "MODEL", "queries": ["One?", "Two?"], "documents": ["1", "2"]},
    }
    forms: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    )

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None
    items: TextOrTexts | None = None
    data_1: TextOrTexts | None = None
    data_2: TextOrTexts | None = None

    def check(self) -> None:
        super().check()
        first, second = self.names
        num_first, num_second = len(getattr(self, first)), len(getattr(self, second))
        if num_first not in (1, num_second):
            raise InvalidRequestError(
                f"{first} must have one text or as many as {second} ({num_second}), not {num_first}.", param=first
            )

    @property
    def names(self) -> tuple[str, str]:
        """The fields that have the first and the second texts. Raises: InvalidRequestError."""
        given = {name for form in self.forms for name in form if getattr(self, name) is not None}
        for form in self.forms:
            if given == {*form}:
                return form
        raise InvalidRequestError("The body must have text_1 and text_2, or queries and documents, and no others.")


class ClassifyRequest(_InputFields):
    """One or several inputs, each text or token ids; the response has the classes of each, in their order."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"model": "MODEL", "input": ["One", "Two"]}}

    input: Prompts
    add_special_tokens: On = True
