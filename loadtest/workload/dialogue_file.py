"""Conversations from a file: ShareGPT's JSON, or JSON lines of prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.token_count import TokenCounter
from tessera.options.errors import OptionError

DEFAULT_OUTPUT_LEN = 256


@dataclass(frozen=True)
class Dialogue:
    """The user's messages, and about how many tokens the first reply has (None: the file does not say)."""

    system: str | None
    turns: tuple[str, ...]
    output_len: int | None


@dataclass(frozen=True)
class FileWorkload:
    """`num_prompts` dialogues drawn from those in a file without repetition, or in rounds where it has fewer.

    Attributes:
        output_len: tokens to generate; None: as the file says.
        num_turns: most turns taken of each; above 1 for chat only.
        shuffled: dialogues are drawn at random; otherwise they come in the file's order.
        once: none is taken twice in one run.
        first: number of the first dialogue in the shuffled file.
    """

    dialogues: tuple[Dialogue, ...]
    num_prompts: int
    output_len: int | None = None
    num_turns: int = 1
    seed: int = 0
    shuffled: bool = True
    once: bool = False
    first: int = 0

    @property
    def num_requests(self) -> int:
        return sum(min(len(dialogue.turns), self.num_turns) for dialogue in self._drawn())

    def jobs(self, template: RequestTemplate) -> Iterator[Job]:
        if self.num_turns > 1 and not template.chat:
            raise OptionError("--num-turns above 1 needs a chat endpoint (--backend openai-chat)")
        for dialogue in self._drawn():
            first, *rest = dialogue.turns[: self.num_turns]
            output_len = self.output_len or dialogue.output_len or DEFAULT_OUTPUT_LEN
            if template.chat:
                system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
                yield Job(template.chat_body([*system, {"role": "user", "content": first}], output_len), rest)
            else:
                yield Job(template.body(first, output_len))

    def part(self, first: int, num_prompts: int) -> FileWorkload:
        return replace(
            self, first=first, num_prompts=min(num_prompts, len(self.dialogues)) if self.once else num_prompts
        )

    def due_times(self) -> Sequence[float] | None:
        return None

    def _drawn(self) -> list[Dialogue]:
        order = list(self.dialogues)
        if self.shuffled:
            random.Random(self.seed).shuffle(order)
        return [order[(self.first + index) % len(order)] for index in range(self.num_prompts)]


def read_dialogues(path: Path, counter: TokenCounter | None = None) -> tuple[Dialogue, ...]:
    """A JSON list or JSON lines of objects with `conversations` (ShareGPT), `messages` (OpenAI) or `prompt`.

    Beside `prompt` or `messages`, `output_tokens` is the length of the completion. Dialogues without a user's
    message are left out.

    Args:
        counter: of the tokens of replies in the file, which are the lengths of completions.

    Raises:
        OptionError: the file cannot be read, or holds no dialogue.
    """
    try:
        content = path.read_bytes()
        if content.lstrip()[:1] == b"[":
            rows = orjson.loads(content)
        else:
            rows = [orjson.loads(line) for line in content.splitlines() if line.strip()]
        dialogues = [_dialogue(row, counter or TokenCounter()) for row in rows]
    except OSError as error:
        raise OptionError(f"--dataset-path: {error.strerror}: {path}") from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise OptionError(
            f"--dataset-path: {path} must be a JSON list or JSON lines of objects with conversations (ShareGPT), "
            f"messages or prompt: {error}"
        ) from error
    kept = tuple(dialogue for dialogue in dialogues if dialogue.turns)
    if not kept:
        raise OptionError(f"--dataset-path: {path} has no prompt")
    return kept


def _dialogue(row: dict[str, Any], counter: TokenCounter) -> Dialogue:
    output_len = row.get("output_tokens")
    if "prompt" in row:
        return Dialogue(None, (str(row["prompt"]),), output_len)
    if "conversations" in row:
        said = [(_SPEAKERS.get(turn["from"], turn["from"]), str(turn["value"])) for turn in row["conversations"]]
    else:
        said = [(turn["role"], str(turn["content"])) for turn in row["messages"]]
    replies = [text for role, text in said if role == "assistant"]
    if output_len is None and replies:
        output_len = max(1, counter.count(replies[0]))
    system = next((text for role, text in said if role == "system"), None)
    return Dialogue(system, tuple(text for role, text in said if role == "user" and text), output_len)


_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
