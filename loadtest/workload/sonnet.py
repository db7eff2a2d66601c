"""Prompts of lines from a text, which begin with the same lines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.token_count import TokenCounter
from tessera.options.errors import OptionError

INSTRUCTION = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True)
class SonnetWorkload:
    """`num_prompts` prompts of an instruction, `prefix_len` tokens of the text's first lines, and drawn lines.

    Lengths are kept to within a line. The prefix is always the same, as the text has it.

    Attributes:
        lines: of the text, each with its number of tokens.
        input_len: tokens of a prompt, its prefix with it.
    """

    lines: tuple[tuple[str, int], ...]
    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int
    seed: int = 0
    first: int = 0

    @property
    def num_requests(self) -> int:
        return self.num_prompts

    def jobs(self, template: RequestTemplate) -> Iterator[Job]:
        rng = random.Random(f"{self.seed}-{self.first}")
        prefix, used = _take(self.lines, self.prefix_len)
        for _ in range(self.num_prompts):
            drawn, _used = _take(rng.choices(self.lines, k=max(1, self.input_len)), self.input_len - used)
            yield Job(template.body(INSTRUCTION + "".join(prefix + drawn), self.output_len))

    def part(self, first: int, num_prompts: int) -> SonnetWorkload:
        return replace(self, first=first, num_prompts=num_prompts)

    def due_times(self) -> Sequence[float] | None:
        return None


def _take(lines: Sequence[tuple[str, int]], num_tokens: int) -> tuple[list[str], int]:
    """Lines from the first on that have `num_tokens` together, and how many these are."""
    taken: list[str] = []
    used = 0
    for line, length in lines:
        if used + length > num_tokens:
            break
        taken.append(line)
        used += length
    return taken, used


def read_lines(path: Path, counter: TokenCounter) -> tuple[tuple[str, int], ...]:
    """Lines that are not empty, each with its number of tokens. Raises OptionError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--dataset-path: {error.strerror}: {path}") from error
    except UnicodeDecodeError:
        raise OptionError(f"--dataset-path: {path} is not UTF-8 text") from None
    lines = tuple((line + "\n", counter.count(line + "\n")) for line in text.splitlines() if line.strip())
    if not lines:
        raise OptionError(f"--dataset-path: {path} has no line")
    return lines
