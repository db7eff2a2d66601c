"""Special tokens: those that tokenizer_config.json names, those it lists, and the one that begins a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

from tessera.engine.tokens.files import read_json

METASPACE = "\u2581"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_LISTED = 2**17


def special_tokens_of(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that are set, as chat templates see them."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def listed_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """By id: added_tokens_decoder of tokenizer_config.json, and added_tokens.json of older folders."""
    found: dict[int, tokenizers.AddedToken] = {}
    for name, token_id in read_json(folder / "added_tokens.json").items():
        if isinstance(token_id, int) and name:
            found[token_id] = tokenizers.AddedToken(name, normalized=False)
    listed = config.get("added_tokens_decoder")
    for key, value in listed.items() if isinstance(listed, dict) else ():
        content = value.get("content") if isinstance(value, dict) else None
        if not key.isdecimal() or len(key) > 9 or not isinstance(content, str) or not content:
            continue
        flags = {name: value.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
        normalized = value.get("normalized", not flags["special"]) is True
        found[int(key)] = tokenizers.AddedToken(content, normalized=normalized, **flags)
    return dict(sorted(found.items())[:MAX_LISTED])


def add_listed_tokens(inner: tokenizers.Tokenizer, listed: dict[int, tokenizers.AddedToken]) -> list[str]:
    """Add those that `inner` lacks. -> contents of those left out, since they would get another id than is listed."""
    present = {token_id: token.content for token_id, token in inner.get_added_tokens_decoder().items()}
    contents, vocab_size = set(present.values()), inner.get_vocab_size(with_added_tokens=False)
    following = max([vocab_size, *(token_id + 1 for token_id in present)])
    fitting, left_out = [], []
    for token_id, token in listed.items():
        if token.content in contents:
            continue
        known = inner.token_to_id(token.content)
        if (following if known is None else known) != token_id:
            left_out.append(token.content)
            continue
        contents.add(token.content)
        following += known is None
        fitting.append(token)
    inner.add_tokens(fitting)
    return left_out


def frame(inner: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Put these tokens before and after every text, beside what is there already."""
    wanted = {token: inner.token_to_id(token) for token in (before, after) if token is not None}
    special = [(token, token_id) for token, token_id in wanted.items() if token_id is not None]
    known = {token for token, _ in special}
    start, end = ([token] if token in known else [] for token in (before, after))
    if not special:
        return
    template = processors.TemplateProcessing(
        single=[*(f"{token}:0" for token in start), "$A:0", *(f"{token}:0" for token in end)],
        pair=[
            *(f"{token}:0" for token in start),
            *("$A:0", *(f"{token}:0" for token in end), *(f"{token}:1" for token in start)),
            *("$B:1", *(f"{token}:1" for token in end)),
        ],
        special_tokens=special,
    )
    present = inner.post_processor
    inner.post_processor = template if present is None else processors.Sequence([present, template])


def frame_as_asked(inner: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Honour add_bos_token and add_eos_token where the file's own post-processor does not."""
    ids = inner.encode("a").ids
    bos, eos = (special_tokens.get(name) for name in ("bos_token", "eos_token"))
    lacks_bos = bos is not None and inner.token_to_id(bos) not in ids[:1]
    lacks_eos = eos is not None and inner.token_to_id(eos) not in ids[-1:]
    frame(
        inner,
        bos if config.get("add_bos_token") is True and lacks_bos else None,
        eos if config.get("add_eos_token") is True and lacks_eos else None,
    )


def prepend_only_at_start(inner: tokenizers.Tokenizer) -> None:
    """Honour `legacy: false`: the space that SentencePiece puts before a text goes before its start alone.

    tokenizer.json files made for the older behaviour put one after every special token as well.
    """
    if inner.normalizer is None or inner.pre_tokenizer is not None:
        return
    normalizer = json.loads(inner.normalizer.__getstate__())
    kinds = [step["type"] for step in normalizer.get("normalizers", [])]
    if kinds == ["Prepend", "Replace"] and normalizer["normalizers"][0]["prepend"] == METASPACE:
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace(METASPACE, prepend_scheme="first", split=False)
