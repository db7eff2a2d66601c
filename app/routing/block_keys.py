"""Keys of a prompt's blocks, as engines report them."""

from __future__ import annotations

from collections.abc import Iterator

from tessera.app.routing.prefix_index import Key
from tessera.engine.contract.block_digests import extend_digests, first_row, prefix_salt
from tessera.engine.contract.messages import PREFIX_KEY_BYTES, EngineInfo, TokenIds

MAX_BLOCKS = 2048  # of a prompt; what is equal so far may as well be equal further on


def block_keys(prompt: TokenIds, max_tokens: int, cache_salt: str, info: EngineInfo, adapter: bytes = b"") -> list[Key]:
    """Of the blocks that a cache may have of this prompt, which is all but its last token; `adapter`: its digest."""
    length = min(len(prompt) + max_tokens, info.max_model_len)
    salt = prefix_salt(first_row(info.short_rope_len, length), cache_salt, adapter)
    digests: list[bytes] = []
    extend_digests(digests, salt, _blocks(prompt, info.block_size))
    return [digest[:PREFIX_KEY_BYTES] for digest in digests]


def split_keys(keys: bytes) -> list[Key]:
    """Those of a report."""
    return [keys[start : start + PREFIX_KEY_BYTES] for start in range(0, len(keys), PREFIX_KEY_BYTES)]


def _blocks(prompt: TokenIds, block_size: int) -> Iterator[bytes]:
    for number in range(min((len(prompt) - 1) // block_size, MAX_BLOCKS)):
        yield prompt[number * block_size : (number + 1) * block_size].tobytes()
