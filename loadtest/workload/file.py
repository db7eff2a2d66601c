"""Conversations from a file: ShareGPT's JSON, or JSON lines of prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from tessera.loadtest.errors import UsageError
from tessera.loadtest.workload.form import Form
from tessera.loadtest.workload.jobs import Job

CHARACTERS_PER_TOKEN = 4  # about; an answer in the file tells in this way how long one may become
DEFAULT_OUTPUT_LEN = 256


@dataclass(frozen=True)
class Dialogue:
    """What a user says in a row, and about how many tokens the first answer has (None: the file does not say)."""

    system: str | None
    turns: tuple[str, ...]
    output_len: int | None


@dataclass(frozen=True)
class FileWorkload:
    """`num_prompts` dialogues drawn from those in a file without repetition, or in rounds where it has fewer.

    Attributes:
        output_len: tokens to generate; None: as the file says.
        num_turns: most turns taken of each; above 1 for chat only.
    """

    dialogues: tuple[Dialogue, ...]
    num_prompts: int
    output_len: int | None = None
    num_turns: int = 1
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return sum(min(len(dialogue.turns), self.num_turns) for dialogue in self._drawn())

    def jobs(self, form: Form) -> Iterator[Job]:
        if self.num_turns > 1 and not form.chat:
            raise UsageError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
        for dialogue in self._drawn():
            first, *rest = dialogue.turns[: self.num_turns]
            output_len = self.output_len or dialogue.output_len or DEFAULT_OUTPUT_LEN
            if form.chat:
                system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
                yield Job(form.conversation([*system, {"role": "user", "content": first}], output_len), rest)
            else:
                yield Job(form.completion(first, output_len))

    def resized(self, num_prompts: int, seed: int) -> FileWorkload:
        return replace(self, num_prompts=num_prompts, seed=seed)

    def _drawn(self) -> list[Dialogue]:
        rng = random.Random(self.seed)
        drawn: list[Dialogue] = []
        while len(drawn) < self.num_prompts:
            drawn += rng.sample(self.dialogues, min(len(self.dialogues), self.num_prompts - len(drawn)))
        return drawn


def read_dialogues(path: Path) -> tuple[Dialogue, ...]:
    """A JSON list or JSON lines of objects with `conversations` (ShareGPT), `messages` (OpenAI) or `prompt`.

    Beside `prompt` or `messages`, `output_tokens` says how long the answer shall be. Dialogues without a user's
    words are left out.

    Raises:
        UsageError: the file cannot be read, or holds nothing of the kind.
    """
    try:
        content = path.read_bytes()
        if content.lstrip()[:1] == b"[":
            rows = orjson.loads(content)
        else:
            rows = [orjson.loads(line) for line in content.splitlines() if line.strip()]
        dialogues = [_dialogue(row) for row in rows]
    except OSError as error:
        raise UsageError(f"--dataset-path: {error.strerror}: {path}") from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"--dataset-path: {path} must be a JSON list or JSON lines of objects with conversations (ShareGPT), "
            f"messages or prompt: {error}"
        ) from error
    kept = tuple(dialogue for dialogue in dialogues if dialogue.turns)
    if not kept:
        raise UsageError(f"--dataset-path: {path} has no prompt")
    return kept


def _dialogue(row: dict[str, Any]) -> Dialogue:
    output_len = row.get("output_tokens")
    if "prompt" in row:
        return Dialogue(None, (str(row["prompt"]),), output_len)
    if "conversations" in row:
        said = [(_SPEAKERS.get(turn["from"], turn["from"]), str(turn["value"])) for turn in row["conversations"]]
    else:
        said = [(turn["role"], str(turn["content"])) for turn in row["messages"]]
    answers = [text for role, text in said if role == "assistant"]
    if output_len is None and answers:
        output_len = max(1, len(answers[0]) // CHARACTERS_PER_TOKEN)
    system = next((text for role, text in said if role == "system"), None)
    return Dialogue(system, tuple(text for role, text in said if role == "user" and text), output_len)


_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
