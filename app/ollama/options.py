"""`options`: sampling parameters by Ollama's names, and settings of its loader, which have no effect here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, model_validator

from tessera.app.schema.fields import MAX_INT32, MAX_STOP_LENGTH, MAX_STOPS, StopInput, integer, number, wrong
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.engine.contract.sampling_params import MIN_REPETITION_PENALTY

# Settings of Ollama's loader and cache, and of samplers that are refused.
LOADING = (
    *("draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx"),
    *("num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
    *("mirostat_eta", "mirostat_tau"),
)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if type(value) is str else [] if value is None else value
    if type(stops) is not list or any(type(stop) is not str for stop in stops) or len(stops) > MAX_STOPS:
        raise wrong(f"must be a string or a list of at most {MAX_STOPS} strings")
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise wrong(f"must have strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


Stops = Annotated[
    tuple[str, ...],
    PlainValidator(
        _stops, json_schema_input_type=StopInput | Annotated[list[StopInput], Field(max_length=MAX_STOPS)] | None
    ),
    Field(description="Strings that end the completion."),
]


class OllamaOptions(RequestModel):
    """Sampling and stopping. What is left out is as the model's own `generation_config.json` has it."""

    refused: ClassVar[FieldValues] = {
        "mirostat": (0,),
        "penalize_newline": (True,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }
    hints: ClassVar[FieldValues] = dict.fromkeys(LOADING, ())

    num_predict: int | None = integer(-2, MAX_INT32, "Most tokens to generate; the rest of the context below 1.")
    temperature: float | None = number(0, 2, "0 is greedy.")
    top_k: int | None = integer(-1, MAX_INT32, "Most probable tokens to choose from; 0 and -1 are off.")
    top_p: float | None = number(0, 1, "Nucleus sampling; 1 is off, 0 takes the most probable token.")
    min_p: float | None = number(0, 1, "Least probability relative to the most probable token; 0 is off.")
    seed: int | None = integer(-(2**63), 2**64 - 1, "Equal seeds give equal completions; -1 takes a random one.")
    stop: Stops = ()
    repeat_penalty: float | None = number(MIN_REPETITION_PENALTY, 10, "Over prompt and completion; 1 is off.")
    repeat_last_n: int | None = integer(-1, MAX_INT32, "0 turns repeat_penalty off; it always sees the whole text.")
    presence_penalty: float | None = number(-2, 2, "Per token that has occurred in the completion.")
    frequency_penalty: float | None = number(-2, 2, "Per occurrence in the completion.")

    @model_validator(mode="before")
    @classmethod
    def _check_others(cls, value: Any) -> Any:
        if isinstance(value, dict):
            cls.check_refused(value)
            cls.note_hints(value)
        return value

    def chat_fields(self) -> dict[str, Any]:
        """The options under the names that Chat Completions has for them."""
        return {
            "max_tokens": self.num_predict if self.num_predict is not None and self.num_predict > 0 else None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop,
            "repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
