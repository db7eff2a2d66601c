"""The body of POST /v1/fine_tuning/jobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from tessera.app.schema.fields import MAX_NAME, Metadata, wrong
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.engine.contract.errors import InvalidRequestError

MAX_EPOCHS, MAX_BATCH_SIZE, MAX_RATE_MULTIPLIER, MAX_BETA = 50, 256, 1000, 2
MAX_SEED = 2**31 - 1
MAX_SUFFIX = 64
SUFFIX = re.compile(r"[A-Za-z0-9_.-]+")


def _auto_or(whole: bool, low: float, high: float) -> PlainValidator:
    """ "auto", or a number above 0 and within bounds."""
    types = (int,) if whole else (int, float)
    numbers = f"an integer from {low} to {high}" if whole else f"a number above {low:g} and up to {high:g}"
    schema = Annotated[int, Field(ge=low, le=high)] if whole else Annotated[float, Field(gt=low, le=high)]

    def check(value: Any) -> Any:
        if value is None or (type(value) is str and value == "auto"):
            return "auto"
        if type(value) not in types or not (low <= value if whole else low < value) or not value <= high:
            raise wrong(f'must be "auto" or {numbers}')
        return value

    return PlainValidator(check, json_schema_input_type=Literal["auto"] | schema | None)


AutoEpochs = Annotated[Any, _auto_or(True, 1, MAX_EPOCHS)]
AutoBatchSize = Annotated[Any, _auto_or(True, 1, MAX_BATCH_SIZE)]
AutoRate = Annotated[Any, _auto_or(False, 0, MAX_RATE_MULTIPLIER)]
AutoBeta = Annotated[Any, _auto_or(False, 0, MAX_BETA)]


class Hyperparameters(BaseModel):
    """Numbers, or "auto": the server chooses."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    batch_size: AutoBatchSize = Field(
        default="auto", description="Examples a step. auto: an eighth of them, at most 16."
    )
    learning_rate_multiplier: AutoRate = Field(
        default="auto", description="Of the rate that goes with the model's width. auto: 1."
    )
    n_epochs: AutoEpochs = Field(default="auto", description="Times that each example is seen. auto: 3.")


class DpoHyperparameters(Hyperparameters):
    """Of direct preference optimisation."""

    beta: AutoBeta = Field(default="auto", description="How far the model is held to what it was before. auto: 0.1.")


class SupervisedMethod(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    hyperparameters: Hyperparameters | None = None


class DpoMethod(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    hyperparameters: DpoHyperparameters | None = None


class TrainingMethod(BaseModel):
    """The loss: supervised learns the assistant's messages, dpo which of two completions is better."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["supervised", "dpo"]
    supervised: SupervisedMethod | None = None
    dpo: DpoMethod | None = None


class FineTuningRequest(RequestModel):
    """A LoRA adapter of a served model, trained on the chats or preferences of a file."""

    refused: ClassVar[FieldValues] = {"integrations": ([],)}
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "training_file": "file-0"},
        "dpo": {"model": "MODEL", "training_file": "file-0", "method": {"type": "dpo"}},
    }

    model: str = Field(min_length=1, max_length=MAX_NAME, description="The name of a served model.")
    training_file: str = Field(max_length=MAX_NAME, description="A file of the purpose fine-tune: JSON lines.")
    validation_file: str | None = Field(
        default=None, max_length=MAX_NAME, description="Another one, whose loss is measured after each epoch."
    )
    method: TrainingMethod | None = Field(
        default=None, description="The loss and its hyperparameters; supervised where it is left out."
    )
    hyperparameters: Hyperparameters | None = Field(default=None, description="The older form of `method.supervised`.")
    suffix: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SUFFIX,
        description="Part of the name of the result: letters, digits, `-`, `_` and `.`.",
    )
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Chosen by the server if it is left out.")
    metadata: Metadata | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        if self.method is not None and self.hyperparameters is not None:
            raise InvalidRequestError(
                "hyperparameters and method cannot both be given: write method.supervised.hyperparameters.",
                param="hyperparameters",
            )
        if self.suffix is not None and SUFFIX.fullmatch(self.suffix) is None:
            raise InvalidRequestError("suffix may have letters, digits, '-', '_' and '.' alone.", param="suffix")
        other = "dpo" if self.method_type == "supervised" else "supervised"
        if self.method is not None and getattr(self.method, other) is not None:
            raise InvalidRequestError(f"method.{other} goes with the type {other!r}.", param=f"method.{other}")
        if self.validation_file is not None and self.validation_file == self.training_file:
            raise InvalidRequestError(
                "validation_file must be another file than training_file.", param="validation_file"
            )

    @property
    def method_type(self) -> Literal["supervised", "dpo"]:
        return self.method.type if self.method is not None else "supervised"

    @property
    def chosen(self) -> dict[str, Any]:
        """The hyperparameters by name, each a number or "auto"."""
        if self.method_type == "dpo":
            dpo = self.method.dpo if self.method is not None else None
            return ((dpo.hyperparameters if dpo is not None else None) or DpoHyperparameters()).model_dump()
        supervised = self.method.supervised if self.method is not None else None
        given = supervised.hyperparameters if supervised is not None else self.hyperparameters
        return (given or Hyperparameters()).model_dump()
