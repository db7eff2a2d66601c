"""A small tokenizer that writes spaces as SentencePiece does."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers

from tessera.app.text.tokenizer import (
    HuggingFaceTokenizer,
)

TEXT = "hello wörld, 你好 🙂\n\ttabs  and   spaces \x00\x7f end"


def metaspace_tokenizer() -> HuggingFaceTokenizer:
    """SentencePiece's manner: U+2581 for spaces, single bytes as <0xNN>."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>"])
    return HuggingFaceTokenizer(inner, {})
