"""A form of reasoning: the texts around it, and where completions stand to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where an answer begins: with no reasoning to come, with reasoning if the model likes, or within it.
ReasoningStart = Literal["none", "possible", "open"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between a beginning and an end, at the beginning of a completion.

    Attributes:
        begins, ends: spellings of both; the first of each is the one that is forced where one must be.
        answer_tags: a pair of tags that may stand around the answer and are dropped.
        is_implied: completions begin within the reasoning although the prompt does not say so.
        has_channels: a completion is several messages, each with a header that names its channel (`harmony`).
        budget_begin: the token by which a budget knows that reasoning begins; empty where it is `begin`.
    """

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    answer_tags: tuple[str, str] | None = None
    is_implied: bool = False
    has_channels: bool = False
    budget_begin: str = ""

    @property
    def begin(self) -> str:
        return self.begins[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that the format is made of; those that are special tokens must reach the splitter."""
        return (*self.begins, *self.ends, *(self.answer_tags or ()))

    def start_of(self, prompt: str, continued: str | None) -> ReasoningStart:
        """Whether a completion begins with reasoning, within it or without.

        Args:
            prompt: the conversation as the template rendered it.
            continued: the text of the final message where the model continues it.
        """
        if continued is not None:
            begun = max(map(continued.rfind, self.begins))
            return "open" if begun > max(map(continued.rfind, self.ends)) else "none"
        ending = prompt.rstrip()
        if ending.endswith(self.begins):
            return "open"
        if ending.endswith(self.ends):
            return "none"
        return "open" if self.is_implied else "possible"


THINK = ReasoningFormat()


def has_think_tags(template: str) -> bool:
    return THINK.begin in template and THINK.end in template
