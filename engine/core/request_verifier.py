"""Checks of a request that need no queue: its prompts, and its sampling parameters, once for all of its sequences."""

from __future__ import annotations

import numpy as np

from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError
from tessera.engine.contract.messages import AddRequest, TokenIds


class RequestVerifier:
    """Knows the bounds of one model and its KV cache, which holds `max_context` tokens of a sequence."""

    def __init__(self, vocab_size: int, max_context: int, *, max_model_len: int, has_grammars: bool) -> None:
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._max_model_len = max_model_len
        self._has_grammars = has_grammars

    def verify(self, request: AddRequest) -> None:
        """
        Raises:
            InvalidRequestError: a wrong prompt or parameter.
            ContextLengthError: a prompt and one token can never fit.
        """
        self._verify_prompt(request.prompt_token_ids)
        if request.prediction_token_ids:
            self._verify_ids(request.prediction_token_ids, "prediction")
        request.sampling_params.verify(self._vocab_size)
        for sibling in request.siblings:
            if sibling.prompt_token_ids is not None:
                self._verify_prompt(sibling.prompt_token_ids)
            sibling.verify()
        grammar = request.sampling_params.grammar
        if grammar is not None and not self._has_grammars:
            raise InvalidRequestError(f"{grammar.param} is not supported by this model", param=grammar.param)

    def _verify_prompt(self, prompt: TokenIds) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt must have at least one token", param="prompt")
        self._verify_length(len(prompt))
        self._verify_ids(prompt, "prompt")

    def _verify_ids(self, prompt: TokenIds, param: str) -> None:
        if np.asarray(prompt).astype(np.uint64).max() >= self._vocab_size:  # negative ids are beyond every vocabulary
            wrong = next(token_id for token_id in prompt if not 0 <= token_id < self._vocab_size)
            raise InvalidRequestError(
                f"the {param} has token id {wrong}, but ids go from 0 to {self._vocab_size - 1}", param=param
            )

    def _verify_length(self, num_prompt_tokens: int) -> None:
        if num_prompt_tokens < self._max_context:
            return
        most = min(self._max_context, num_prompt_tokens - 1)
        reason = "" if self._max_context == self._max_model_len else " The server's KV cache holds no more."
        raise ContextLengthError(
            f"This model's maximum context length is {self._max_context} tokens, and the prompt is too long:"
            f" {num_prompt_tokens} tokens > {most} maximum.{reason}",
            param="prompt",
        )
