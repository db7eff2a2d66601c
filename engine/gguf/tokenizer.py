"""Tokenizers and chat templates from the metadata of a GGUF file, built through `tokenizers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import orjson
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.metadata import Metadata
from tessera.engine.gguf.model import open_gguf
from tessera.engine.gguf.pre_tokenizers import PRE_TOKENIZERS, UNNAMED, UNNAMED_BY_BOS, PreTokenizer
from tessera.engine.gguf.sentencepiece import METASPACE, sentencepiece_bpe
from tessera.engine.gguf.vocabulary import TokenType, Vocabulary, read_vocabulary, special_token_id

MODEL_KEY, PRE_KEY = "tokenizer.ggml.model", "tokenizer.ggml.pre"
MERGES_KEY, SCORES_KEY = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
TEMPLATE_KEY, TEMPLATE_NAMES_KEY = "tokenizer.chat_template", "tokenizer.chat_templates"
NO_TOKENIZER = ("none", "no_vocab")
MAX_MERGES = 2**23
MAX_TEMPLATES = 64
ADDED_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)

# Names in chat templates, and in GGUF keys (one of them as it was once misspelt).
SPECIAL_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


class GGUFTokenizer(NamedTuple):
    """`special_tokens` has those of SPECIAL_NAMES that the file names."""

    inner: tokenizers.Tokenizer
    special_tokens: dict[str, str]


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer | None:
    """None where the file has no tokenizer.

    Raises: ModelError naming what cannot be read, or the kind of tokenizer and those supported.
    """
    metadata = open_gguf(path).metadata
    vocabulary = _vocabulary(metadata)
    if vocabulary is None:
        return None
    try:
        inner = tokenizers.Tokenizer.from_str(_description(metadata, vocabulary, all_merges=True))
    except ModelError:
        raise
    except Exception:  # the library raises bare Exception; some files have merges of tokens that were left out
        inner = _from_known_merges(metadata, vocabulary)
    return GGUFTokenizer(inner, _special_tokens(metadata, vocabulary))


def gguf_tokenizer_json(path: Path, *, all_merges: bool = True) -> str:
    """As tokenizer.json would have it. `all_merges`: also those of tokens that the file lacks, which takes half as long
    as to look for them. Raises: ModelError also where the file has none."""
    metadata = open_gguf(path).metadata
    vocabulary = _vocabulary(metadata)
    if vocabulary is None:
        raise ModelError(f"{path} has no tokenizer")
    return _description(metadata, vocabulary, all_merges=all_merges)


def _from_known_merges(metadata: Metadata, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_description(metadata, vocabulary, all_merges=False))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{metadata.path}: its tokenizer cannot be built: {error}") from None


def _vocabulary(metadata: Metadata) -> Vocabulary | None:
    """None where the file has no tokenizer."""
    kind = metadata.string(MODEL_KEY, "none")
    if kind in NO_TOKENIZER:
        return None
    if kind not in BUILDERS:
        raise ModelError(
            f"{metadata.path}: tokenizers of the kind {kind[:60]!r} are not supported; supported are llama "
            "(SentencePiece), gpt2 (byte-level BPE) and bert (WordPiece)"
        )
    return _unique(read_vocabulary(metadata), metadata)


def _description(metadata: Metadata, vocabulary: Vocabulary, *, all_merges: bool) -> str:
    """A tokenizer.json."""
    try:
        return BUILDERS[metadata.string(MODEL_KEY)](metadata, vocabulary, all_merges)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{metadata.path}: its tokenizer cannot be built: {error}") from None


def read_gguf_templates(path: Path) -> dict[str, str]:
    """Chat templates by name, `default` among them where the file has one."""
    metadata = open_gguf(path).metadata
    found = {"default": metadata.string(TEMPLATE_KEY)} if metadata.has(TEMPLATE_KEY) else {}
    if metadata.has(TEMPLATE_NAMES_KEY):
        for name in metadata.strings(TEMPLATE_NAMES_KEY, MAX_TEMPLATES):
            found[name] = metadata.string(f"{TEMPLATE_KEY}.{name}")
    return found


# -- kinds ----------------------------------------------------------------------------------------


def _byte_level_bpe(metadata: Metadata, vocabulary: Vocabulary, all_merges: bool) -> str:
    """A tokenizer of the special tokens alone, to whose description the others and the merges are added: the library
    takes several times as long for lists of hundreds of thousands from Python."""
    name = metadata.string(PRE_KEY, _unsaid_name(metadata, vocabulary))
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{metadata.path}: {PRE_KEY} is {name[:60]!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    pre_tokenizer = PRE_TOKENIZERS[name]
    ids = _ids(vocabulary)
    inner = tokenizers.Tokenizer(
        models.BPE(_special_ids(metadata, vocabulary), [], ignore_merges=pre_tokenizer.whole_words)
    )
    if pre_tokenizer.composes:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns),
            pre_tokenizers.ByteLevel(
                add_prefix_space=metadata.boolean("tokenizer.ggml.add_space_prefix", False), use_regex=False
            ),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    _add_special(inner, vocabulary)
    _frame(inner, metadata, vocabulary, pre_tokenizer)
    described = orjson.loads(inner.to_str())
    merges = metadata.strings(MERGES_KEY, MAX_MERGES)
    described["model"] |= {"vocab": ids, "merges": merges if all_merges else _known_merges(metadata, merges, ids)}
    return orjson.dumps(described).decode()


def _unsaid_name(metadata: Metadata, vocabulary: Vocabulary) -> str:
    """Of the pre-tokenizer, in a file that has none."""
    bos = special_token_id(metadata, "bos", len(vocabulary.tokens))
    named = None if bos is None else UNNAMED_BY_BOS.get(vocabulary.tokens[bos])
    return named or UNNAMED.get(metadata.string("general.architecture", ""), "default")


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary, all_merges: bool) -> str:
    scores = metadata.numbers(SCORES_KEY)
    if len(scores) != len(vocabulary.tokens):
        metadata.refuse(SCORES_KEY, f"an array of {len(vocabulary.tokens)}, one for each token")
    unknown = special_token_id(metadata, "unknown", len(vocabulary.tokens))
    architecture = metadata.string("general.architecture", "")
    # Gemma puts no space before a text, which its files of before July 2024 do not say (llama.cpp, pull request 8248).
    prefixed = metadata.boolean("tokenizer.ggml.add_space_prefix", architecture not in ("gemma", "gemma2"))
    inner = sentencepiece_bpe(
        vocabulary,
        scores.tolist(),
        None if unknown is None else vocabulary.tokens[unknown],
        prefixed=prefixed,
    )
    # Phi-3's markers take the line break that follows them.
    _add_special(inner, vocabulary, strips=architecture == "phi3")
    _frame(inner, metadata, vocabulary, PreTokenizer((), adds_bos=True))
    described: str = inner.to_str()
    return described


def _wordpiece(metadata: Metadata, vocabulary: Vocabulary, all_merges: bool) -> str:
    vocabulary = Vocabulary([_bert_spelling(token) for token in vocabulary.tokens], vocabulary.types)
    unknown = special_token_id(metadata, "unknown", len(vocabulary.tokens))
    if unknown is None:
        metadata.refuse("tokenizer.ggml.unknown_token_id", "the id of a token")
    inner = tokenizers.Tokenizer(models.WordPiece(_ids(vocabulary), unk_token=vocabulary.tokens[unknown]))
    lowercase = metadata.boolean("tokenizer.ggml.normalizer.lowercase", True)
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=metadata.boolean("tokenizer.ggml.normalizer.strip_accents", lowercase)
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    _add_special(inner, vocabulary)
    _frame(inner, metadata, vocabulary, PreTokenizer((), adds_separator=True))
    described: str = inner.to_str()
    return described


BUILDERS: dict[str, Callable[[Metadata, Vocabulary, bool], str]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level_bpe,
    "bert": _wordpiece,
}


def _known_merges(metadata: Metadata, merges: list[str], ids: dict[str, int]) -> list[str]:
    """Without those of tokens that the file lacks, which no text has."""
    known = []
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not left or not right or not space or " " in right:
            raise ModelError(f"{metadata.path}: merge {index} must be two tokens with a space between")
        if left in ids and right in ids and left + right in ids:
            known.append(merge)
    return known


# -- parts ----------------------------------------------------------------------------------------


def _unique(vocabulary: Vocabulary, metadata: Metadata) -> Vocabulary:
    """With names for empty tokens. Raises: ModelError naming a token that occurs twice."""
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(vocabulary.tokens)]
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        first = tokens.index(twice)
        second = tokens.index(twice, first + 1)
        raise ModelError(f"{metadata.path}: the token {twice[:60]!r} has the ids {first} and {second}")
    return Vocabulary(tokens, vocabulary.types)


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens)}


def _special_ids(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the tokens that are found in a text as they are, and of those that are put around it."""
    named = (special_token_id(metadata, key, len(vocabulary.tokens)) for key in SPECIAL_NAMES.values())
    token_ids = {*vocabulary.of_types(*ADDED_TYPES), *(token_id for token_id in named if token_id is not None)}
    return {vocabulary.tokens[token_id]: token_id for token_id in token_ids}


def _bert_spelling(token: str) -> str:
    """As in BERT's own vocabularies: GGUF marks beginnings of words, these mark what continues one."""
    if token.startswith(METASPACE):
        return token[len(METASPACE) :]
    return token if token.startswith("[") and token.endswith("]") and len(token) > 2 else "##" + token


def _add_special(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, *, strips: bool = False) -> None:
    """Tokens that are found in a text as they are: control tokens are special, those that users defined are not.

    `strips`: white space after them belongs to them, but for those that begin and end a text.
    """
    added = []
    for token_id in vocabulary.of_types(*ADDED_TYPES):
        token = vocabulary.tokens[token_id]
        if token == f"[PAD{token_id}]":
            continue  # a row of the embedding without a token
        added.append(
            tokenizers.AddedToken(
                token,
                special=vocabulary.types[token_id] != TokenType.USER_DEFINED,
                normalized=False,
                rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
        )
    inner.add_tokens(added)


def _frame(
    inner: tokenizers.Tokenizer, metadata: Metadata, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer
) -> None:
    """Tokens that are put before and after a text."""
    framed = pre_tokenizer.adds_separator
    first = metadata.boolean("tokenizer.ggml.add_bos_token", pre_tokenizer.adds_bos or framed)
    last = metadata.boolean("tokenizer.ggml.add_eos_token", False)
    separator = metadata.boolean("tokenizer.ggml.add_sep_token", framed)
    before = _named(metadata, vocabulary, ("cls", "bos") if framed else ("bos",)) if first else None
    names = ("seperator", "eos") if separator else ("eos",)
    after = _named(metadata, vocabulary, names) if last or separator else None
    if before is None and after is None:
        return
    special = {inner.id_to_token(token_id): token_id for token_id in (before, after) if token_id is not None}
    start = [f"{inner.id_to_token(before)}:0"] if before is not None else []
    end = [f"{inner.id_to_token(after)}:0"] if after is not None else []
    inner.post_processor = processors.TemplateProcessing(
        single=[*start, "$A:0", *end], pair=None, special_tokens=list(special.items())
    )


def _named(metadata: Metadata, vocabulary: Vocabulary, names: Iterable[str]) -> int | None:
    """The first of these special tokens that the file has."""
    ids = (special_token_id(metadata, name, len(vocabulary.tokens)) for name in names)
    return next((token_id for token_id in ids if token_id is not None), None)


def _special_tokens(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, str]:
    ids = {name: special_token_id(metadata, key, len(vocabulary.tokens)) for name, key in SPECIAL_NAMES.items()}
    return {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}
