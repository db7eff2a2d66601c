"""Reasoning that clients keep without reading it: sealed, so that it comes back unread and unchanged.

It is the `encrypted_content` of Responses and the `signature` of Messages.

A keystream from SHAKE256 (FIPS 202) over key and nonce, then HMAC-SHA256 (RFC 2104) over the owner, the nonce and the
ciphertext: encrypt, then authenticate.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib
from typing import Any

from fastapi import Request

PREFIX = "tsr1_"
NONCE_BYTES = 24
TAG_BYTES = 32
MAX_TEXT_BYTES = 2**25


class Seal:
    """Seals texts with a key of the server."""

    def __init__(self, key: bytes) -> None:
        """`key`: at least 32 random bytes, the same in all app processes."""
        self._stream_key = hashlib.sha256(b"stream" + key).digest()
        self._tag_key = hashlib.sha256(b"tag" + key).digest()

    def close(self, text: str, owner: str) -> str:
        """A sealed text that only requests of `owner`, an API key's tenant, can open."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        hidden = self._crypt(zlib.compress(text.encode()), nonce)
        return PREFIX + base64.urlsafe_b64encode(nonce + self._tag(owner, nonce, hidden) + hidden).decode()

    def open(self, sealed: str, owner: str) -> str | None:
        """The text; None for what this server has not sealed for this owner, or sealed with an earlier key."""
        if not sealed.startswith(PREFIX):
            return None
        try:
            raw = base64.urlsafe_b64decode(sealed[len(PREFIX) :])
        except (binascii.Error, ValueError):
            return None
        nonce, tag, hidden = (
            raw[:NONCE_BYTES],
            raw[NONCE_BYTES : NONCE_BYTES + TAG_BYTES],
            raw[NONCE_BYTES + TAG_BYTES :],
        )
        if not hmac.compare_digest(tag, self._tag(owner, nonce, hidden)):
            return None
        return zlib.decompressobj().decompress(self._crypt(hidden, nonce), MAX_TEXT_BYTES).decode()

    def _crypt(self, data: bytes, nonce: bytes) -> bytes:
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, owner: str, nonce: bytes, hidden: bytes) -> bytes:
        about = hashlib.sha256(owner.encode()).digest()
        return hmac.digest(self._tag_key, about + nonce + hidden, "sha256")


def seal_of(request: Request) -> Seal:
    seal: Any = request.app.state.seal
    assert isinstance(seal, Seal)
    return seal
