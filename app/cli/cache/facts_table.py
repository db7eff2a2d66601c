"""The facts about a model as rows for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tessera.app.cli.cache.units import count, size

if TYPE_CHECKING:
    from tessera.app.cli.cache.model_facts import ModelFacts


def facts_rows(
    name: str, path: Path, facts: ModelFacts, context: int, num_seqs: int, *, weights_present: bool
) -> list[tuple[str, str]]:
    """Names and values."""
    rows = [("model", name), ("place", str(path))]
    if facts.architecture is not None:
        rows += [
            ("architecture", str(facts.architecture)),
            ("parameters", count(facts.parameters or 0)),
            ("layers", f"{facts.layers}, hidden size {facts.hidden_size}, vocabulary {facts.vocabulary:,}"),
            ("context", f"{facts.context:,} tokens"),
        ]
    if facts.stored:
        total = sum(facts.stored.values())
        kinds = ", ".join(f"{kind} {100 * nbytes / total:.3g} %" for kind, nbytes in facts.stored.items())
        rows.append(("weights", f"{size(total)}: {kinds}"))
    elif not weights_present:
        rows.append(("weights", f"not in the cache: `tessera pull {name}` downloads them"))
    rows += [
        ("tokenizer", "yes" if facts.tokenizer else "none: prompts are token ids"),
        ("chat template", "yes" if facts.chat_template else "none: no chat, completions only"),
        ("tool calls", facts.tool_format or "none"),
        ("reasoning", facts.reasoning or "none"),
    ]
    if facts.weight_bytes is not None:
        rows += _memory_rows(facts, context, num_seqs)
    rows += [("note", note) for note in facts.notes]
    rows.append(("can be served", "yes" if facts.problem is None else f"no: {facts.problem}"))
    return rows


def _memory_rows(facts: ModelFacts, context: int, num_seqs: int) -> list[tuple[str, str]]:
    assert facts.weight_bytes is not None
    in_dtype = (
        f"in {facts.dtype}" if not any(kind.startswith(("Q", "IQ", "MX")) for kind in facts.stored) else "as stored"
    )
    rows = [("memory", f"{size(facts.weight_bytes)} of weights {in_dtype}")]
    if facts.kv_bytes_per_token:
        cached = facts.kv_bytes_per_token * context * num_seqs
        sequences = "1 sequence" if num_seqs == 1 else f"{num_seqs} sequences"
        rows += [
            (
                "",
                f"{size(cached)} of KV cache for {sequences} of {context:,} tokens "
                f"({size(facts.kv_bytes_per_token)} a token, {facts.dtype})",
            ),
            ("", f"{size(facts.memory(context, num_seqs) or 0)} together, and buffers"),
        ]
    return rows
