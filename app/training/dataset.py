"""Files of chats or preferences as tokens with weights, for the training of one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic

import numpy as np

from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.app.text.tokenizer import load_tokenizer
from tessera.app.training.conversations import TrainingConversation, TrainingPreference
from tessera.app.training.encoder import ConversationEncoder, EncodedChat
from tessera.app.training.lines import read_lines
from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import load_config
from tessera.engine.training.examples import AnyItem, Example
from tessera.engine.training.parameters import check_trainable
from tessera.engine.training.preferences import Preference

USUAL_MAX_LENGTH = 4096
SHORT = 64


@dataclass
class Dataset(Generic[AnyItem]):
    """Attributes:
    num_cut: entries that were longer than a sequence may be.
    num_dropped: those of them that have nothing left to learn, and are left out.
    max_tokens: of all, where a short sequence counts as SHORT tokens, as it takes as much memory; None has no bound.
    """

    max_tokens: int | None = None
    items: list[AnyItem] = field(default_factory=list)
    num_cut: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    _num_counted: int = 0

    def keep(self, item: AnyItem, *, is_cut: bool) -> None:
        """Unless it has nothing to learn. Raises: ConfigError beyond the bound."""
        self.num_cut += is_cut
        if any(example.total_weight <= 0 for example in item.sequences):
            self.num_dropped += 1
            return
        self.items.append(item)
        self.num_tokens += item.num_tokens
        self._num_counted += sum(max(SHORT, example.num_tokens) for example in item.sequences)
        if self.max_tokens is not None and self._num_counted > self.max_tokens:
            raise ConfigError(f"At most {self.max_tokens} tokens can be learnt, where a short chat counts as {SHORT}.")


class DatasetReader:
    """Attributes:
    config: of the model.
    max_length: tokens of a sequence, which is cut there.
    """

    def __init__(
        self,
        model: Path,
        name: str,
        *,
        max_length: int | None = None,
        max_tokens: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """
        Args:
            model: its folder; `name` is for errors.
            max_length: None takes the model's context, at most USUAL_MAX_LENGTH.
            max_tokens: of one file, see `Dataset`.
            chat_template: file that replaces the model's own.

        Raises: ConfigError where the model cannot be trained, or has no chat template; ModelError.
        """
        self._max_tokens = max_tokens
        self.config = config = load_config(model)
        check_trainable(config, name)
        self.max_length = max_length or min(config.usual_context, USUAL_MAX_LENGTH)
        if self.max_length > config.longest_context:
            raise ConfigError(f"--max-length {max_length} is beyond the model's context of {config.longest_context}")
        tokenizer = load_tokenizer(model)
        template = load_chat_template(model, chat_template, tokenizer.special_tokens)
        if template is None:
            raise ConfigError(f"{name} has no chat template, so chats cannot be written as it reads them")
        self._template: ChatTemplate = template
        self._encoder = ConversationEncoder(template, tokenizer, config.eos_token_ids)

    def close(self) -> None:
        self._template.close()

    def examples(self, path: Path, name: str = "") -> Dataset[Example]:
        """Raises: ConfigError with all that is wrong with the file, which errors call `name` or by its path."""
        found: Dataset[Example] = Dataset(self._max_tokens)
        read_lines(path, TrainingConversation, partial(self._keep_chat, found), name=name)
        return self._checked(found, name or str(path))

    def preferences(self, path: Path, name: str = "") -> Dataset[Preference]:
        """As `examples`."""
        found: Dataset[Preference] = Dataset(self._max_tokens)
        read_lines(path, TrainingPreference, partial(self._keep_preference, found), name=name)
        return self._checked(found, name or str(path))

    def _keep_chat(self, found: Dataset[Example], conversation: TrainingConversation) -> None:
        for chat in self._encoder.encode(conversation):
            found.keep(self._example(chat), is_cut=self._is_cut(chat))

    def _keep_preference(self, found: Dataset[Preference], preference: TrainingPreference) -> None:
        (preferred,), (rejected,) = map(self._encoder.encode, preference.conversations())
        pair = Preference(self._example(preferred), self._example(rejected))
        found.keep(pair, is_cut=self._is_cut(preferred) or self._is_cut(rejected))

    def _example(self, chat: EncodedChat) -> Example:
        ids, counted = chat.token_ids[: self.max_length], chat.counted[: self.max_length]
        return Example(np.array(ids, np.int32), np.array(counted, np.float32))

    def _is_cut(self, chat: EncodedChat) -> bool:
        return len(chat.token_ids) > self.max_length

    def _checked(self, found: Dataset[AnyItem], name: str) -> Dataset[AnyItem]:
        if not found.items:
            raise ConfigError(f"{name}: no chat has anything to learn within {self.max_length} tokens")
        return found
