"""Token ids to text as they arrive: a character is given out only when all its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tessera.app.text.tokenizer import Tokenizer

MAX_WINDOW = 16  # tokens that a decoder may leave without a whole character before they are given out


class Detokenizer(Protocol):
    """The growing text of one sequence."""

    def decode_tokens(self, token_ids: list[int]) -> str:
        """Text that became whole with these tokens."""

    def flush(self) -> str:
        """What is left at the end; U+FFFD for bytes that never became a character."""


class TokenBytes(dict[int, bytes]):
    """Bytes of each token id as a detokenizer shows them, looked up once per id."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, markers: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._markers = markers

    def __missing__(self, token_id: int) -> bytes:
        skipped = self._skip_special_tokens and _is_skipped(self._tokenizer, token_id, self._markers)
        raw = self[token_id] = b"" if skipped else self._tokenizer.token_bytes(token_id)
        return raw


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: concatenate, then decode UTF-8 incrementally."""

    def __init__(self, token_bytes: TokenBytes, *, strip_leading_space: bool) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip_leading_space = strip_leading_space

    def decode_tokens(self, token_ids: list[int]) -> str:
        text = self._decode(b"".join(map(self._token_bytes.__getitem__, token_ids)))
        if self._strip_leading_space and text:
            self._strip_leading_space = False
            return text[1:] if text[0] == " " else text
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other decoder: decode a short window with and without the new tokens, give out the difference."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, markers: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._markers = markers if skip_special_tokens else frozenset()
        self._shown: list[int] = []
        self._pending: list[int] = []

    def decode_tokens(self, token_ids: list[int]) -> str:
        return self._decode_around_markers(token_ids) if self._markers else self._decode_window(token_ids)

    def _decode_around_markers(self, token_ids: list[int]) -> str:
        """The decoder would skip markers with all other special tokens, so they are put in by hand."""
        text = ""
        for token_id in token_ids:
            if self._tokenizer.is_special(token_id) and self._tokenizer.token_string(token_id) in self._markers:
                text += self.flush() + self._tokenizer.token_string(token_id)
            else:
                text += self._decode_window([token_id])
        return text

    def _decode_window(self, token_ids: list[int]) -> str:
        self._pending += token_ids
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < MAX_WINDOW:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._shown, self._pending = self._pending, []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._pending)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class DetokenizerFactory:
    """Makes the detokenizer of each sequence; what they can share, they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tables: dict[tuple[bool, frozenset[str]], TokenBytes] = {}

    def make(self, *, skip_special_tokens: bool, at_start: bool, markers: frozenset[str] = frozenset()) -> Detokenizer:
        """
        Args:
            at_start: the answer is a text of its own, not the continuation of a prompt's text.
            markers: special tokens that are shown where others are skipped.
        """
        if self._tokenizer.spelling == "other":
            return WindowDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens, markers=markers)
        key = skip_special_tokens, markers
        if key not in self._tables:
            self._tables[key] = TokenBytes(self._tokenizer, skip_special_tokens=skip_special_tokens, markers=markers)
        return ByteDetokenizer(self._tables[key], strip_leading_space=at_start and self._tokenizer.strips_leading_space)


def _is_skipped(tokenizer: Tokenizer, token_id: int, markers: frozenset[str]) -> bool:
    return tokenizer.is_special(token_id) and tokenizer.token_string(token_id) not in markers


def token_offsets(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[int]:
    """Where each token's text begins, in characters of the text of all."""
    offsets = []
    length = 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(detokenizer.decode_tokens([token_id]))
    return offsets
