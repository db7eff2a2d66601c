"""Tokenizers from Mistral's tekken.json, byte-level BPE by rank, built through `tokenizers`.

Special tokens have the first ids, and the piece of rank r the id after them and r others. Of a word the neighbours that
together make the piece of the lowest rank are merged first. Source: tokens/tokenizers/tekken.py of
mistralai/mistral-common, and tiktoken.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.files import read_bytes
from tessera.engine.tokens.files import MAX_BYTES

TEKKEN_FILE = "tekken.json"
NUM_BYTES = 256  # the first pieces are the single bytes
MAX_VOCAB = 2**20
MAX_SPECIAL = 2**14
MAX_SPECIAL_CHARS = 128
MAX_PATTERN_CHARS = 4096
MAX_VERSION_CHARS = 16
MAX_PIECE_BYTES = 1024
MAX_PIECES_BYTES = 2**22  # of all pieces together; the time to find their merges grows with it
MAX_MERGES_CHARS = 2**25

NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# Of files of the versions v3 and v7 that list none.
UNLISTED_VERSIONS = ("v3", "v7")
UNLISTED = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True)
class Tekken:
    """What the file says, checked.

    Attributes:
        version: of the form of chats, such as v13; it says nothing about the ids of texts.
        pattern: of the words that a text is split into.
        special: texts of the special tokens, by id.
        pieces: bytes, by rank.
    """

    version: str
    pattern: str
    special: list[str]
    pieces: list[bytes]


class TekkenTokenizer(NamedTuple):
    """`special_tokens`: bos_token, eos_token and others by name; `special`: all of them, to be added."""

    inner: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    special: list[tokenizers.AddedToken]


class TekkenChat(NamedTuple):
    """What a chat template depends on: the version, and the texts of the special tokens."""

    version: str
    special: frozenset[str]


def read_tekken(path: Path) -> TekkenTokenizer:
    """Its special tokens are not added yet. Raises: ModelError naming what is wrong with the file."""
    tekken = parse_tekken(_read(path), str(path))
    try:
        inner = tokenizers.Tokenizer.from_str(_description(tekken))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: its tokenizer cannot be built: {error}") from None
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in tekken.special]
    present = set(tekken.special)
    return TekkenTokenizer(inner, {name: token for name, token in NAMED.items() if token in present}, special)


def read_tekken_chat(path: Path) -> TekkenChat:
    """Raises: ModelError naming what is wrong with the file."""
    values, source = _read(path), str(path)
    version, _, _, num_special = _config(values, source)
    return TekkenChat(version, frozenset(_special(values, source, version, num_special)))


def parse_tekken(values: dict[str, Any], source: str = TEKKEN_FILE) -> Tekken:
    """`values` is the file's object. Raises: ModelError naming what is wrong with it."""
    version, pattern, size, num_special = _config(values, source)
    special = _special(values, source, version, num_special)
    for name in ("bos_token", "eos_token"):
        if NAMED[name] not in special:
            raise ModelError(f"{source}: special_tokens lack {NAMED[name]}, the {name}")
    return Tekken(version, pattern, special, _pieces(values, source, size - num_special))


# -- checks ---------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    content = read_bytes(path, MAX_BYTES)
    try:
        values = orjson.loads(content)
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values


def _config(values: dict[str, Any], source: str) -> tuple[str, str, int, int]:
    """Version, pattern, size of the vocabulary, number of special tokens."""
    config = values.get("config")
    if not isinstance(config, dict):
        raise ModelError(f"{source}: config must be an object")
    return (
        _text(config.get("version"), MAX_VERSION_CHARS, f"{source}: config.version"),
        _text(config.get("pattern"), MAX_PATTERN_CHARS, f"{source}: config.pattern"),
        _integer(config.get("default_vocab_size"), NUM_BYTES + 1, MAX_VOCAB, f"{source}: config.default_vocab_size"),
        _integer(
            config.get("default_num_special_tokens"), 1, MAX_SPECIAL, f"{source}: config.default_num_special_tokens"
        ),
    )


def _special(values: dict[str, Any], source: str, version: str, num_special: int) -> list[str]:
    """Texts by id; ids that the file leaves out get the names that Mistral gives them."""
    listed = values.get("special_tokens")
    found: dict[int, str] = {}
    if listed is None and version in UNLISTED_VERSIONS:
        found = dict(enumerate(UNLISTED))
        if num_special < len(found):
            raise ModelError(
                f"{source}: config.default_num_special_tokens must be at least {len(found)} where none are listed"
            )
    elif not isinstance(listed, list) or len(listed) > num_special:
        raise ModelError(f"{source}: special_tokens must be a list of at most {num_special}")
    else:
        for index, entry in enumerate(listed):
            where = f"{source}: special_tokens[{index}]"
            if not isinstance(entry, dict):
                raise ModelError(f"{where} must be an object")
            rank = _integer(entry.get("rank"), 0, num_special - 1, f"{where}.rank")
            if rank in found:
                raise ModelError(f"{where} has rank {rank} once more")
            found[rank] = _text(entry.get("token_str"), MAX_SPECIAL_CHARS, f"{where}.token_str")
    special = [found.get(token_id, f"<SPECIAL_{token_id}>") for token_id in range(num_special)]
    twice, times = Counter(special).most_common(1)[0]
    if times > 1:
        raise ModelError(f"{source}: {times} special tokens are {twice!r}")
    return special


def _pieces(values: dict[str, Any], source: str, number: int) -> list[bytes]:
    """The first `number` pieces of the file, which may have more."""
    vocab = values.get("vocab")
    if number < NUM_BYTES:
        raise ModelError(f"{source}: config leaves {number} tokens beside special ones, fewer than there are bytes")
    if not isinstance(vocab, list) or len(vocab) < number:
        raise ModelError(f"{source}: vocab must be a list of at least {number}")
    pieces: list[bytes] = []
    total = 0
    for rank, entry in enumerate(vocab[:number]):
        encoded = entry.get("token_bytes") if isinstance(entry, dict) and type(entry.get("rank")) is int else None
        if not isinstance(encoded, str) or entry["rank"] != rank:
            raise ModelError(f"{source}: vocab[{rank}] must have rank {rank} and token_bytes")
        try:
            piece = base64.b64decode(encoded, validate=True)
        except ValueError:
            piece = b""
        if not 1 <= len(piece) <= MAX_PIECE_BYTES:
            raise ModelError(f"{source}: vocab[{rank}].token_bytes must be base64 of 1 to {MAX_PIECE_BYTES} bytes")
        total += len(piece)
        pieces.append(piece)
    if pieces[:NUM_BYTES] != [bytes([byte]) for byte in range(NUM_BYTES)]:
        raise ModelError(f"{source}: the first {NUM_BYTES} entries of vocab must be the single bytes in order")
    if total > MAX_PIECES_BYTES:
        raise ModelError(f"{source}: the pieces of vocab have {total} bytes, more than {MAX_PIECES_BYTES}")
    if len(set(pieces)) != number:
        raise ModelError(f"{source}: a piece of vocab occurs twice")
    return pieces


def _text(value: Any, most: int, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= most or any("\ud800" <= char <= "\udfff" for char in value):
        raise ModelError(f"{where} must be a text of 1 to {most} characters")
    return value


def _integer(value: Any, low: int, high: int, where: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ModelError(f"{where} must be an integer from {low} to {high}")
    return value


# -- building -------------------------------------------------------------------------------------


def _description(tekken: Tekken) -> str:
    """A tokenizer.json. As of GGUF files: the library takes several times as long for long lists from Python."""
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=True))  # a word that is a piece is taken whole
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(tekken.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    described = orjson.loads(inner.to_str())
    table = _spelling_table()
    spelt = [piece.decode("latin-1").translate(table) for piece in tekken.pieces]
    ids = {token: token_id for token_id, token in enumerate([*tekken.special, *spelt])}
    if len(ids) != len(tekken.special) + len(spelt):
        both = next(iter(set(tekken.special) & set(spelt)))
        raise ModelError(f"the special token {both[:60]!r} is spelt as a piece of vocab is")
    described["model"] |= {"vocab": ids, "merges": _merges(tekken.pieces, spelt)}
    return orjson.dumps(described).decode()


def _merges(pieces: list[bytes], spelt: list[str]) -> list[str]:
    """All pairs of pieces that make a piece, in the order of its rank."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[str] = []
    num_chars = 0
    for piece in pieces:
        pairs = [
            (left, right)
            for end in range(1, len(piece))
            if (left := ranks.get(piece[:end])) is not None and (right := ranks.get(piece[end:])) is not None
        ]
        num_chars += (len(piece) + 1) * len(pairs)
        if num_chars > MAX_MERGES_CHARS:
            raise ModelError(f"the merges of its pieces have more than {MAX_MERGES_CHARS} characters")
        merges += [f"{spelt[left]} {spelt[right]}" for left, right in sorted(pairs)]
    return merges


def _spelling_table() -> dict[int, str]:
    """GPT-2's table (Radford et al. 2019, encoder.py): printable Latin-1 stands for itself, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(NUM_BYTES) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(hidden)}
