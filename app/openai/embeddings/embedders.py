"""The models behind /v1/embeddings: from inputs to token ids, and from token ids to vectors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from fastapi import Request

from tessera.app.generate.prompt import MAX_INLINE_IDS, PROMPT_TIMEOUT
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import model_of
from tessera.app.http.body import built
from tessera.app.http.limits import account_of, lease_of
from tessera.app.http.streaming import run_while_connected
from tessera.app.openai.embeddings.schema import EmbeddingRequest
from tessera.app.text.tokenizer import IdTokenizer, Tokenizer, are_small, load_tokenizer
from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError, NotFoundError
from tessera.engine.contract.messages import EmbedderRole, EmbeddingInfo, ScorerInfo, TokenIds

if TYPE_CHECKING:
    import numpy as np

Vectors: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

T = TypeVar("T")

MAX_INPUT_CHARS = 2**20  # of one text, whatever its number of tokens
MAX_TOTAL_TOKENS = 2**20  # of one request
NUMBERS_OF_A_VALUE = 16
ROWS_TOGETHER = 64  # vectors that are worked on at once, so that little memory is needed


@dataclass(frozen=True)
class EmbeddingModel:
    """One of the models; `role` is its name in the engine."""

    role: EmbedderRole
    tokenizer: Tokenizer


class Embeddings:
    """The served model, which embeds as well, and the encoder beside it where there is one."""

    def __init__(self, model: ServedModel) -> None:
        """Raises ModelError where the encoder's tokenizer cannot be read."""
        settings = model.settings
        self._served = model
        self._models = dict.fromkeys(settings.served_model_names, EmbeddingModel("main", model.tokenizer))
        if settings.embedding_folder is not None:
            beside = EmbeddingModel("beside", load_tokenizer(Path(settings.embedding_folder)))
            self._models.update(dict.fromkeys(settings.embedding_model_names, beside))

    def find(self, name: str) -> tuple[EmbeddingModel, EmbeddingInfo]:
        """Raises NotFoundError for a name that is not served, EngineUnavailableError while the engine loads."""
        model = self._models.get(name)
        if name in self._served.adapter_names:
            raise InvalidRequestError(
                f"The model {name[:100]!r} is an adapter, which makes text alone: name the model itself.", param="model"
            )
        if name in self._served.settings.reranker_model_names:
            raise InvalidRequestError(
                f"The model {name[:100]!r} scores texts and makes no embeddings: use /v1/rerank or /v1/score.",
                param="model",
            )
        if model is None:
            raise NotFoundError(f"The model {name[:100]!r} does not exist here; see /v1/models.", param="model")
        for info in self._served.info.embeddings:
            if info.role == model.role:
                return model, info
        raise InvalidRequestError(f"The model {name[:100]!r} makes no embeddings.", param="model")

    @property
    def default_name(self) -> str:
        """The model of requests that name none: the encoder beside the served model, if there is one."""
        settings = self._served.settings
        return (*settings.embedding_model_names, *settings.served_model_names)[0]

    async def token_ids(self, request: EmbeddingRequest, model: EmbeddingModel, info: EmbeddingInfo) -> list[TokenIds]:
        """Every input as token ids that the model takes.

        Raises:
            InvalidRequestError: an input has no tokens or wrong ids, or there are too many of them in all.
            ContextLengthError: an input is too long and may not be cut.
        """
        keep = tokens_to_keep(request.truncate_prompt_tokens, info.max_input_tokens)
        texts = [text for text in request.input if isinstance(text, str)]
        if texts and isinstance(model.tokenizer, IdTokenizer):
            raise InvalidRequestError("This model has no tokenizer.json: send token ids as input.", param="input")
        if texts and max(map(len, texts)) > MAX_INPUT_CHARS:
            raise InvalidRequestError(f"A text of input may have at most {MAX_INPUT_CHARS} characters.", param="input")

        def encode() -> list[TokenIds]:
            inputs = [_encode(model.tokenizer, one, keep, request.add_special_tokens) for one in request.input]
            check_inputs(inputs, "input[{}]".format, "input", keep, info)
            return packed(inputs)

        return await run_encode(self._served, encode, request.input)

    async def embed(
        self,
        http_request: Request,
        model: EmbeddingModel,
        info: EmbeddingInfo,
        inputs: Sequence[TokenIds],
        dimensions: int | None,
    ) -> Vectors:
        """Vectors [inputs, dimensions] of unit length. The engine stops working when the client leaves.

        Raises:
            RequestError: the model's embeddings cannot have this many dimensions, or the engine failed.
        """
        size = _checked_dimensions(dimensions, info)
        lease = lease_of(http_request.scope)
        if lease is not None:
            lease.count_prompt(sum(map(len, inputs)))
        work = self._served.client.embed(inputs, role=model.role, account=account_of(http_request.scope))
        vectors = await run_while_connected(http_request.receive, work, self._served.settings.request_timeout)
        if size == info.dimension:
            return vectors
        return await built(num_values(vectors), lambda: _shortened(vectors, size))


def num_values(vectors: Vectors) -> int:
    """For `built`: numbers are worked on faster than other values."""
    return vectors.size // NUMBERS_OF_A_VALUE


def embeddings_of(request: Request) -> Embeddings:
    """Those of the request's model."""
    embeddings: Any = request.app.state.embeddings[model_of(request)]
    assert isinstance(embeddings, Embeddings)
    return embeddings


def _encode(tokenizer: Tokenizer, text: str | list[int], keep: int | None, add_special_tokens: bool) -> list[int]:
    """At most `keep` token ids; those that were sent as such are taken as they are."""
    if isinstance(text, list):
        return text[:keep]
    if keep is None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_beginning(text, keep, add_special_tokens=add_special_tokens)


def tokens_to_keep(keep: int | None, most: int) -> int | None:
    """`truncate_prompt_tokens` of a model that takes `most` tokens; None cuts nothing."""
    if keep == -1:
        return most
    if keep is not None and keep > most:
        raise InvalidRequestError(
            f"truncate_prompt_tokens ({keep}) must be at most {most}, which this model takes.",
            param="truncate_prompt_tokens",
        )
    return keep


def are_few(inputs: Sequence[str | list[int]]) -> bool:
    """Whether texts and lists of token ids may be encoded and checked on the event loop."""
    ids = [one for one in inputs if not isinstance(one, str)]
    num_ids = len(ids) + sum(map(len, ids))
    return num_ids <= MAX_INLINE_IDS and are_small([one for one in inputs if isinstance(one, str)])


async def run_encode(served: ServedModel, encode: Callable[[], T], inputs: Sequence[str | list[int]]) -> T:
    """Encode the inputs: on the event loop where they are few, else in a thread."""
    if are_few(inputs):
        return encode()
    return await served.workers.run(encode, timeout=PROMPT_TIMEOUT)


def packed(inputs: Sequence[list[int]]) -> list[TokenIds]:
    """Checked inputs as the engine takes them: of a million ids it takes 30 ms, which the event loop is spared."""
    return [array("i", token_ids) for token_ids in inputs]


def check_inputs(
    inputs: Sequence[list[int]],
    place: Callable[[int], str],
    param: str,
    keep: int | None,
    info: EmbeddingInfo | ScorerInfo,
) -> None:
    """Each by itself, then all together. `place`: where the request has one of them. Raises as `check_input` does."""
    for index, token_ids in enumerate(inputs):
        check_input(token_ids, place(index), param, keep, info)
    check_total(inputs, param)


def check_total(inputs: Sequence[Sequence[int]], param: str) -> None:
    """Raise InvalidRequestError where a request has more tokens than one may."""
    total = sum(map(len, inputs))
    if total > MAX_TOTAL_TOKENS:
        raise InvalidRequestError(
            f"{param} has {total} tokens in all, but at most {MAX_TOTAL_TOKENS} are accepted.", param=param
        )


def check_input(
    token_ids: list[int], where: str, param: str, keep: int | None, info: EmbeddingInfo | ScorerInfo
) -> None:
    """Raise RequestError unless the model takes these ids; `where` they are in the field `param`."""
    if not token_ids:
        raise InvalidRequestError(f"{where} must not be empty: it has no tokens.", param=param)
    if keep is not None and len(token_ids) > keep:
        raise InvalidRequestError(
            f"truncate_prompt_tokens ({keep}) leaves no room beside the model's own special tokens.",
            param="truncate_prompt_tokens",
        )
    if len(token_ids) > info.max_input_tokens:
        raise ContextLengthError(
            f"This model takes at most {info.max_input_tokens} tokens, but {where} has {len(token_ids)}"
            " (truncate_prompt_tokens cuts it).",
            param=param,
        )
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size)
        raise InvalidRequestError(
            f"{where} has token id {wrong}, but ids go from 0 to {info.vocab_size - 1}.", param=param
        )


def _checked_dimensions(asked: int | None, info: EmbeddingInfo) -> int:
    if asked is None or asked == info.dimension:
        return info.dimension
    allowed = info.matryoshka_dimensions
    if allowed is None:
        raise InvalidRequestError(
            f"dimensions must be {info.dimension}, not {asked}: this model was not trained for shorter embeddings.",
            param="dimensions",
        )
    if asked not in allowed:
        every = len(allowed) == info.dimension
        accepted = f"from 1 to {info.dimension}" if every else f"one of {', '.join(map(str, allowed))}"
        raise InvalidRequestError(f"dimensions must be {accepted}, not {asked}.", param="dimensions")
    return asked


def _shortened(vectors: Vectors, size: int) -> Vectors:
    """The first `size` elements of each vector, brought to unit length again."""
    import numpy as np  # takes long to import, and few need it

    shortened = np.empty((len(vectors), size), np.float32)
    for begin in range(0, len(vectors), ROWS_TOGETHER):
        rows = slice(begin, begin + ROWS_TOGETHER)
        cut = vectors[rows, :size].astype(np.float64)
        norms = np.linalg.norm(cut, axis=1, keepdims=True)
        norms[norms == 0] = 1.0
        shortened[rows] = cut / norms
    return shortened
