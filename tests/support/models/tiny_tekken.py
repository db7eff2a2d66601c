"""Small files of the kind of Mistral's tekken.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.engine.gguf.pre_tokenizers import TEKKEN

BYTES = [bytes([byte]) for byte in range(256)]
# As far as v13 and v15 have them, at the places that Mistral's own files give them.
SPECIAL = {
    **dict(enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"))),
    **dict(enumerate(("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>"), start=7)),
    **dict(enumerate(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"), start=17)),
    **dict(enumerate(("[ARGS]", "[CALL_ID]"), start=32)),
    **dict(enumerate(("[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"), start=35)),
}


def tekken_values(
    pieces: Sequence[bytes] = (),
    *,
    version: str = "v13",
    special: Mapping[int, str] | None = SPECIAL,
    num_special: int = 100,
    pattern: str = TEKKEN,
    unused: int = 0,
) -> dict[str, Any]:
    """The file's object. `pieces` follow the single bytes; the last `unused` ones are beyond the vocabulary."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*BYTES, *pieces])
    ]
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": num_special + len(vocab) - unused,
        "default_num_special_tokens": num_special,
        "version": version,
    }
    listed = (
        None
        if special is None
        else [{"rank": rank, "token_str": token, "is_control": True} for rank, token in special.items()]
    )
    return {"config": config, "vocab": vocab, "special_tokens": listed}


def write_tekken(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(values))
    return folder
