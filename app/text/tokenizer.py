"""A model's tokenizer: text to token ids, ids to text, and the raw bytes that each id stands for."""

from __future__ import annotations

import codecs
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import tokenizers

from tessera.app.text.pair_form import PairForm
from tessera.app.text.pieces import MIN_PIECE_CHARS, PieceCutter
from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError, ModelError
from tessera.engine.gguf.names import is_gguf
from tessera.engine.tokens.folder import read_folder_tokenizer

# How a tokenizer writes bytes into its tokens' names.
#   byte_level: GPT-2's table of 256 printable characters (Radford et al. 2019, encoder.py)
#   metaspace: SentencePiece's U+2581 for a space and <0xNN> for a single byte
#   other: only the decoder itself knows
TokenSpelling = Literal["byte_level", "metaspace", "other"]

METASPACE = "\u2581"
MAX_IDS_AT_ONCE = 2**14  # that are decoded in one call
MAX_LOCKED_IDS = 256  # that are decoded with the interpreter's lock held, in well under a millisecond
# Texts up to this length in all are encoded on the event loop, in well under a millisecond.
MAX_INLINE_CHARS = 512
MAX_INLINE_TEXTS = 8
MAX_BATCH_CHARS = 2**16  # encoded in one call, whose result takes memory for each token

logger = logging.getLogger("tessera.serve")


class Tokenizer(Protocol):
    """What the rest of the app needs of a tokenizer."""

    spelling: TokenSpelling
    strips_leading_space: bool
    max_token_chars: int
    special_tokens: dict[str, str]
    added_tokens: frozenset[str]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...

    def encode_beginning(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]: ...

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[tuple[list[int], int]]: ...

    def beginning(self, text: str, max_tokens: int) -> str: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_string(self, token_id: int) -> str: ...

    def is_special(self, token_id: int) -> bool: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder or a GGUF file; one that speaks in token ids where there is none, says the log.

    Raises:
        ModelError: tokenizer.json, tokenizer_config.json or the file's metadata cannot be read.
    """
    if is_gguf(folder):
        from tessera.engine.gguf.tokenizer import read_gguf_tokenizer  # with NumPy, which text alone needs not

        found = read_gguf_tokenizer(folder)
        return IdTokenizer() if found is None else HuggingFaceTokenizer(*found)
    read = read_folder_tokenizer(folder)
    if read is None:
        logger.warning(
            "%s has no tokenizer.json, and no tokenizer.model, tekken.json, vocab.json with merges.txt or vocab.txt to "
            "make one of: prompts must be lists of token ids",
            folder,
        )
        return IdTokenizer()
    if read.left_out:
        listed = ", ".join(map(repr, read.left_out[:4])) + (", ..." if len(read.left_out) > 4 else "")
        logger.warning("%s: the tokens %s do not get the ids that the folder lists: left out", folder, listed)
    return HuggingFaceTokenizer(read.inner, read.special_tokens)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return parsed


class HuggingFaceTokenizer:
    """tokenizer.json through the `tokenizers` library. Safe to use from several threads.

    Attributes:
        spelling: how tokens spell bytes.
        strips_leading_space: decoding drops one space at the very start of a text.
        max_token_chars: length of the longest token, so that a text of n characters has at least
            n / max_token_chars tokens.
        special_tokens: bos_token, eos_token and so on, those that are set.
        added_tokens: texts that are tokens of their own wherever they stand.
    """

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self.added_tokens = frozenset(token.content for token in added.values())
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._cutter = PieceCutter(added.values())
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.spelling, self.strips_leading_space = _spelling_of(inner)
        self.max_token_chars = max((len(token) for token in inner.get_vocab()), default=1)
        self.special_tokens = special_tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        inner = self._inner
        if len(texts) > 1 and are_small(texts):
            # A batch of several is shared out among threads, and waits until each of them has had a core.
            return [inner.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
        found: list[list[int]] = []
        for batch in _batches(texts):
            is_long = len(batch) == 1 and len(batch[0]) > MIN_PIECE_CHARS
            pieces = self._cutter.cut(batch[0]) if is_long else []
            if len(pieces) > 1:
                found.append(self._encode_pieces(pieces, add_special_tokens=add_special_tokens))
            else:
                found += self._encode_batch(batch, add_special_tokens=add_special_tokens)
        return found

    def _encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Of the text that they make together."""
        before, after = self._special_tokens_around if add_special_tokens else ([], [])
        ids = [*before]
        for batch in _batches(pieces):
            for some in self._encode_batch(batch, add_special_tokens=False):
                ids += some
        return ids + after

    def _encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> Iterator[list[int]]:
        # The batch call lets go of the interpreter lock while it works; the single one does not.
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        encodings.reverse()
        while encodings:  # one after the other: freeing an encoding keeps the lock
            yield encodings.pop().ids

    def encode_beginning(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """As much of the text as `max_tokens` hold, special tokens included; never fewer than these."""
        # Not the library's `truncate` and `post_process`: they copy all that is cut off, into an encoding for every
        # `max_tokens` of it, and keep the interpreter's lock meanwhile.
        ids = self.encode(text, add_special_tokens=False)
        if not add_special_tokens:
            return ids[:max_tokens]
        before, after = self._special_tokens_around
        return [*before, *ids[: max(max_tokens - len(before) - len(after), 0)], *after]

    @functools.cached_property
    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """Those in front of a text and behind it."""
        example = self._inner.encode(self._example)
        places = example.sequence_ids  # None: of a special token
        begin, end = places.index(0), len(places) - places[::-1].index(0)
        return example.ids[:begin], example.ids[end:]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[tuple[list[int], int]]:
        """Each pair of texts as one input, and its tokens of type 0, which are those of the first text.

        The longer text of a pair loses its end where both have more than `max_tokens`, special tokens included.
        """
        form = self._pair_form
        texts = dict.fromkeys(text for pair in pairs for text in pair)
        ids = dict(zip(texts, self.encode_all([*texts], add_special_tokens=False), strict=True))
        room = None if max_tokens is None else max(max_tokens - form.num_special, 0)
        found = []
        for pair in pairs:
            one, other = (ids[text] for text in pair)
            if room is not None and len(one) + len(other) > room:
                sizes = shared_room(len(one), len(other), room)
                one, other = one[: sizes[0]], other[: sizes[1]]
            found.append(form.join(one, other))
        return found

    @functools.cached_property
    def _pair_form(self) -> PairForm:
        return PairForm.of(self._inner.encode(self._example, self._example))

    @functools.cached_property
    def _example(self) -> str:
        """A text that has tokens."""
        texts = ("a", "0", *self._inner.get_vocab())
        return next(text for text in texts if self._inner.encode(text, add_special_tokens=False).ids)

    def beginning(self, text: str, max_tokens: int) -> str:
        """As much of the text as `max_tokens` hold, without special tokens."""
        encoding = self._inner.encode_batch([text], add_special_tokens=False)[0]
        if len(encoding) <= max_tokens:
            return text
        last = encoding.token_to_chars(max_tokens - 1)  # not `offsets`, which makes objects for all tokens
        assert last is not None, "the text has this token"
        return text[: last[1]]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if len(token_ids) <= MAX_LOCKED_IDS:
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self.spelling == "byte_level" and len(token_ids) > MAX_IDS_AT_ONCE:
            return self._decode_pieces(token_ids, skip_special_tokens=skip_special_tokens)
        # As with `encode`: the batch call lets go of the interpreter lock.
        return self._inner.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def _decode_pieces(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As the library decodes byte-level tokens, but it keeps the interpreter's lock while it reads the ids."""
        spelled: dict[int, bytes] = {}
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        pieces = []
        for begin in range(0, len(token_ids), MAX_IDS_AT_ONCE):
            some = token_ids[begin : begin + MAX_IDS_AT_ONCE]
            for token_id in {*some} - spelled.keys():
                is_skipped = skip_special_tokens and token_id in self._special
                spelled[token_id] = b"" if is_skipped else _byte_level_bytes(self.token_string(token_id))
            pieces.append(decode(b"".join(map(spelled.__getitem__, some))))
        return "".join([*pieces, decode(b"", True)])

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes, which need not be whole characters; empty for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self.spelling == "byte_level":
            return _byte_level_bytes(token)
        if self.spelling == "metaspace":
            return _metaspace_bytes(token)
        return self._inner.decode([token_id], skip_special_tokens=False).encode()

    def token_string(self, token_id: int) -> str:
        """The token as its vocabulary spells it."""
        return self._inner.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


class IdTokenizer:
    """Stands in where a model folder has no tokenizer (random weights made from a config alone).

    Prompts must be token ids, and answers are spelled as decimal ids with a space after each.
    """

    spelling: TokenSpelling = "byte_level"
    strips_leading_space = False
    max_token_chars = 1

    def __init__(self) -> None:
        self.special_tokens: dict[str, str] = {}
        self.added_tokens: frozenset[str] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise InvalidRequestError(
            "This model has no tokenizer: send the prompt to /v1/completions as a list of token ids.",
            param="prompt",
        )

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_beginning(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], max_tokens: int | None) -> list[tuple[list[int], int]]:
        raise InvalidRequestError("This model has no tokenizer, which pairs of texts need.")

    def beginning(self, text: str, max_tokens: int) -> str:
        raise InvalidRequestError("This model has no tokenizer, which texts need to be cut.")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(self.token_string, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_string(token_id).encode()

    def token_string(self, token_id: int) -> str:
        return f"{token_id} "

    def is_special(self, token_id: int) -> bool:
        return False


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in their order, as many at a time as have MAX_BATCH_CHARS, but one at least."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and num_chars + len(text) > MAX_BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch


def are_small(texts: Sequence[str]) -> bool:
    """Whether texts may be encoded on the event loop."""
    return len(texts) <= MAX_INLINE_TEXTS and sum(map(len, texts)) <= MAX_INLINE_CHARS


def check_text_length(tokenizer: Tokenizer, num_chars: int, max_model_len: int, param: str) -> None:
    """Refuse, before any encoding, a text that cannot fit the context however it is split."""
    least = -(-num_chars // tokenizer.max_token_chars)
    if least > max_model_len:
        raise prompt_too_long(least, max_model_len, param)


def prompt_too_long(num_tokens: int, max_model_len: int, param: str) -> ContextLengthError:
    """The error of a prompt that leaves no room for a token; clients search its text for these phrases."""
    most = min(max_model_len, num_tokens - 1)
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens,"
        f" and the prompt is too long: {num_tokens} tokens > {most} maximum.",
        param=param,
    )


def shared_room(one: int, other: int, room: int) -> tuple[int, int]:
    """The tokens kept of two texts of `one` and `other` tokens that exceed `room`: the longer one is cut first.

    As the strategy `longest_first` of Hugging Face tokenizers.
    """
    if min(one, other) <= room // 2:
        return (one, room - one) if one <= other else (room - other, other)
    return (room // 2, room - room // 2) if one <= other else (room - room // 2, room // 2)


def printable_token(raw: bytes) -> str:
    """A token's bytes as text; bytes that are not whole characters as \\xNN escapes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def _spelling_of(inner: tokenizers.Tokenizer) -> tuple[TokenSpelling, bool]:
    """Spelling, and whether one leading space is dropped, from the decoder's own description."""
    if inner.decoder is None:
        return "other", False
    outer = json.loads(inner.decoder.__getstate__())
    steps: list[dict[str, Any]] = outer["decoders"] if outer["type"] == "Sequence" else [outer]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        return "metaspace", steps[0].get("prepend_scheme", "always") != "never"
    replaces_metaspace = (
        steps[0]["type"] == "Replace" and steps[0]["pattern"] == {"String": METASPACE} and steps[0]["content"] == " "
    )
    if replaces_metaspace and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"}:
        return "metaspace", "Strip" in kinds
    return "other", False


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters are themselves, the other 68 bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


def _byte_level_bytes(token: str) -> bytes:
    table = _bytes_of_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(METASPACE, " ").encode()
