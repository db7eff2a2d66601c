"""The models behind /v1/rerank, /v1/score and /v1/classify: what scores pairs and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from fastapi import Request

from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import model_of
from tessera.app.http.body import built
from tessera.app.http.limits import account_of, lease_of
from tessera.app.http.streaming import run_while_connected
from tessera.app.openai.embeddings.embedders import (
    ROWS_TOGETHER,
    Embeddings,
    Vectors,
    check_input,
    check_inputs,
    check_total,
    num_values,
    packed,
    run_encode,
    tokens_to_keep,
)
from tessera.app.openai.rerank.pairs import PairLimits, cut_texts, encode_pairs
from tessera.app.openai.rerank.schema import ClassifyRequest, PairFields
from tessera.app.text.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import ScorerInfo, TokenIds

Scores: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Pairs:
    """First and second texts, of which one or both have an entry for each pair, and the fields that they are from."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    names: tuple[str, str]

    def __iter__(self) -> Any:
        firsts = self.firsts if len(self.firsts) == len(self.seconds) else [*self.firsts] * len(self.seconds)
        return zip(firsts, self.seconds, strict=True)

    def place(self, index: int) -> str:
        """Where the request has a pair."""
        one, other = self.names
        first = one if len(self.firsts) == 1 else f"{one}[{index}]"
        return f"the pair of {first} and {other}[{index}]"


@dataclass(frozen=True)
class Scored:
    """Scores [pairs], or [inputs, classes] of texts, and the tokens that were computed."""

    scores: Scores
    num_tokens: int


class Scorers:
    """The model that scores, where one does, and those that make embeddings, whose cosines are scores too.

    Attributes:
        tokenizer: of the model that scores.
    """

    def __init__(self, model: ServedModel, embeddings: Embeddings) -> None:
        """Raises ModelError where the tokenizer of the cross-encoder beside the model cannot be read."""
        settings = model.settings
        self._served = model
        self._embeddings = embeddings
        folder = settings.reranker_folder
        self.tokenizer: Tokenizer = model.tokenizer if folder is None else load_tokenizer(Path(folder))

    @property
    def default_name(self) -> str:
        """The model of requests that name none: the one that scores, else the one that makes embeddings."""
        settings, scorer = self._served.settings, self._served.info.scorer
        if scorer is None:
            return self._embeddings.default_name
        return (settings.reranker_model_names if scorer.beside else settings.served_model_names)[0]

    async def score_pairs(self, http_request: Request, name: str, request: PairFields, pairs: Pairs) -> Scored:
        """The engine stops working when the client leaves.

        Raises:
            RequestError: the model does not exist or does not score pairs, a pair is too long, or the engine failed.
        """
        scorer = self._scorer(name)
        if scorer is None:
            return await self._cosines(http_request, name, request, pairs)
        if len(scorer.labels) != 1:
            raise InvalidRequestError(
                f"The model {name[:100]!r} tells {len(scorer.labels)} classes apart and does not score pairs: use "
                "/v1/classify.",
                param="model",
            )
        if request.instruction is not None and scorer.form == "pair":
            raise InvalidRequestError(f"The model {name[:100]!r} takes no instruction.", param="instruction")
        self._check_tokenizer(self.tokenizer)
        keep = tokens_to_keep(request.truncate_prompt_tokens, scorer.max_input_tokens)
        limits = PairLimits(request.max_tokens_per_query, request.max_tokens_per_doc, keep)

        def encode() -> tuple[list[TokenIds], list[int]]:
            encoded = encode_pairs(self.tokenizer, scorer.form, [*pairs], limits, request.instruction)
            inputs = [ids for ids, _ in encoded]
            check_inputs(inputs, pairs.place, pairs.names[1], keep, scorer)
            return packed(inputs), [length for _, length in encoded]

        inputs, first_lengths = await run_encode(self._served, encode, [*pairs.firsts, *pairs.seconds])
        logits = await self._logits(http_request, inputs, first_lengths)
        return Scored(scores_of(logits, scorer, request.use_activation)[:, 0], sum(map(len, inputs)))

    async def classify(self, http_request: Request, name: str, request: ClassifyRequest) -> Scored:
        """Scores [inputs, classes] of texts or token ids. Raises as `score_pairs` does."""
        scorer = self.classifier(name)
        keep = tokens_to_keep(request.truncate_prompt_tokens, scorer.max_input_tokens)
        texts = [text for text in request.input if isinstance(text, str)]
        if texts:
            self._check_tokenizer(self.tokenizer)

        def encode() -> list[TokenIds]:
            inputs = [
                text[:keep] if isinstance(text, list) else self._encode(text, keep, request.add_special_tokens)
                for text in request.input
            ]
            check_inputs(inputs, "input[{}]".format, "input", keep, scorer)
            return packed(inputs)

        inputs = await run_encode(self._served, encode, request.input)
        logits = await self._logits(http_request, inputs, [])
        return Scored(scores_of(logits, scorer, request.use_activation), sum(map(len, inputs)))

    def classifier(self, name: str) -> ScorerInfo:
        """Raises RequestError for a model that does not exist or has no classes."""
        scorer = self._scorer(name)
        if scorer is None or scorer.form != "pair":
            raise InvalidRequestError(f"The model {name[:100]!r} does not classify texts.", param="model")
        return scorer

    def _scorer(self, name: str) -> ScorerInfo | None:
        """Of the model of this name; None where it makes embeddings. Raises RequestError where it does neither."""
        settings, scorer = self._served.settings, self._served.info.scorer
        if scorer is not None and name in (
            settings.reranker_model_names if scorer.beside else settings.served_model_names
        ):
            return scorer
        self._embeddings.find(name)
        return None

    async def _cosines(self, http_request: Request, name: str, request: PairFields, pairs: Pairs) -> Scored:
        """Cosines of the embeddings of each pair's texts."""
        model, info = self._embeddings.find(name)
        if request.instruction is not None:
            raise InvalidRequestError(f"The model {name[:100]!r} takes no instruction.", param="instruction")
        self._check_tokenizer(model.tokenizer)
        keep = tokens_to_keep(request.truncate_prompt_tokens, info.max_input_tokens)

        def encode() -> list[list[TokenIds]]:
            of_sides = ((pairs.firsts, request.max_tokens_per_query), (pairs.seconds, request.max_tokens_per_doc))
            sides = [
                [_encode(model.tokenizer, text, keep) for text in cut_texts(model.tokenizer, texts, most)]
                for texts, most in of_sides
            ]
            for param, inputs in zip(pairs.names, sides, strict=True):
                for index, token_ids in enumerate(inputs):
                    where = param if param == "query" else f"{param}[{index}]"
                    check_input(token_ids, where, param, keep, info)
            check_total([*sides[0], *sides[1]], pairs.names[1])
            return [packed(inputs) for inputs in sides]

        sides = await run_encode(self._served, encode, [*pairs.firsts, *pairs.seconds])
        inputs = [*sides[0], *sides[1]]
        vectors = await self._embeddings.embed(http_request, model, info, inputs, None)
        firsts, seconds = vectors[: len(sides[0])], vectors[len(sides[0]) :]
        scores = await built(num_values(vectors), lambda: cosines(firsts, seconds))
        return Scored(scores, sum(map(len, inputs)))

    async def _logits(self, http_request: Request, inputs: Sequence[TokenIds], first_lengths: list[int]) -> Scores:
        lease = lease_of(http_request.scope)
        if lease is not None:
            lease.count_prompt(sum(map(len, inputs)))
        account = account_of(http_request.scope)
        work = self._served.client.embed(inputs, role="scorer", first_lengths=first_lengths, account=account)
        logits = await run_while_connected(http_request.receive, work, self._served.settings.request_timeout)
        return logits.astype(np.float64)

    def _encode(self, text: str, keep: int | None, add_special_tokens: bool) -> list[int]:
        return _encode(self.tokenizer, text, keep, add_special_tokens)

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if isinstance(tokenizer, IdTokenizer):
            raise InvalidRequestError("This model has no tokenizer.json, which texts need.", param="model")


def scores_of(logits: Scores, scorer: ScorerInfo, use_activation: bool) -> Scores:
    """[inputs, labels], as the model's configuration says; the logits themselves without activation."""
    if not use_activation or scorer.scores == "identity":
        return logits
    if scorer.scores == "softmax":
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax: Scores = weights / weights.sum(axis=1, keepdims=True)
        return softmax
    return np.tanh(logits) if scorer.scores == "tanh" else 0.5 * (1.0 + np.tanh(0.5 * logits))


def cosines(firsts: Vectors, seconds: Vectors) -> Scores:
    """[pairs] of vectors of unit length [1 or pairs, dimension]."""
    scores = np.empty(max(len(firsts), len(seconds)))
    for begin in range(0, len(scores), ROWS_TOGETHER):
        rows = slice(begin, begin + ROWS_TOGETHER)
        first, second = ((side if len(side) == 1 else side[rows]).astype(np.float64) for side in (firsts, seconds))
        scores[rows] = (first * second).sum(axis=1)
    return scores


def scorers_of(request: Request) -> Scorers:
    """Those of the request's model."""
    scorers: Any = request.app.state.scorers[model_of(request)]
    assert isinstance(scorers, Scorers)
    return scorers


def _encode(tokenizer: Tokenizer, text: str, keep: int | None, add_special_tokens: bool = True) -> list[int]:
    if keep is None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_beginning(text, keep, add_special_tokens=add_special_tokens)
