"""How many tokens a text has: by a tokenizer, or about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.options.errors import OptionError

CHARACTERS_PER_TOKEN = 4  # about, of English text


class TokenCounter:
    """Counts tokens of texts.

    Attributes:
        vocab_size: of the tokenizer; None without one.
    """

    def __init__(self, name: str | None = None) -> None:
        """`name`: a folder, a tokenizer.json or a hub id; None: four characters count as a token.

        Raises: OptionError where there is no such tokenizer.
        """
        self._tokenizer: Any = None if name is None else _load(name)
        self.vocab_size: int | None = None if self._tokenizer is None else int(self._tokenizer.get_vocab_size())

    def count(self, text: str) -> int:
        if self._tokenizer is None:
            return max(1, len(text) // CHARACTERS_PER_TOKEN)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _load(name: str) -> Any:
    import tokenizers

    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        if path.is_dir():
            raise OptionError(f"--tokenizer: {path} has no tokenizer.json")
        from huggingface_hub import hf_hub_download

        return tokenizers.Tokenizer.from_file(hf_hub_download(name, "tokenizer.json"))
    except OptionError:
        raise
    except Exception as error:  # the libraries raise many kinds
        reason = str(error).strip().partition("\n")[0]
        raise OptionError(
            f"--tokenizer {name} is no folder, tokenizer.json or hub id that can be read: {reason}"
        ) from None
