"""All skills, and an endless deterministic stream of conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from tessera.engine.builtin.training import arithmetic, chat, extraction, lists, memory, reading, tools
from tessera.engine.builtin.training.conversation import Conversation, Split

Generator = Callable[[Random, Split], Conversation]

# Shares in training: what needs more examples to be learnt gets more. All have cases in the split `test`.
SKILLS: dict[str, tuple[Generator, float]] = {
    "greeting": (chat.greeting, 9),
    "system prompt": (chat.system_prompt, 7),
    "unknown": (chat.unknown, 12),
    "addition": (arithmetic.addition, 5),
    "subtraction": (arithmetic.subtraction, 6),
    "multiplication": (arithmetic.multiplication, 3),
    "copying": (lists.copying, 8),
    "reversing": (lists.reversing, 10),
    "upper-casing": (lists.upper_casing, 11),
    "sorting": (lists.sorting, 9),
    "reading": (reading.reading, 32),
    "memory": (memory.memory, 15),
    "extraction": (extraction.extraction, 10),
    "tool call": (tools.tool_call, 9),
    "tool result": (tools.tool_result, 8),
}
PHRASED_SKILLS: dict[str, tuple[Generator, float]] = {**SKILLS, "no tool": (tools.no_tool, 20)}  # in other splits


def conversations(seed: int, split: Split) -> Iterator[Conversation]:
    """Skills mixed by their shares; some training conversations get an idle system prompt or a second task."""
    rng = Random(seed)
    generators = [generator for generator, _ in PHRASED_SKILLS.values()]
    shares = [share for _, share in PHRASED_SKILLS.values()]
    while True:
        conversation = rng.choices(generators, shares)[0](rng, split)
        if split == "train":
            _vary(conversation, rng)
        yield conversation


def skills_of(split: Split) -> tuple[str, ...]:
    """The skills that have cases in a split."""
    return tuple(SKILLS if split == "test" else PHRASED_SKILLS)


def cases(skill: str, seed: int, count: int, split: Split = "test") -> list[Conversation]:
    """`count` different conversations of one skill; fewer in the split `phrasings` where there are no more.

    Raises: ValueError if the skill has too few cases in another split.
    """
    rng = Random(f"{skill}/{seed}")
    generator, _ = PHRASED_SKILLS[skill]
    found: dict[str, Conversation] = {}
    for _ in range(100 * count):
        if len(found) == count:
            break
        conversation = generator(rng, split)
        found.setdefault(repr((conversation.messages[:-1], conversation.tools)), conversation)
    if len(found) < count and split != "phrasings":
        raise ValueError(f"{skill} has only {len(found)} different cases, not {count}")
    return list(found.values())


_SINGLE_TURN = (chat.greeting, chat.unknown, arithmetic.addition, arithmetic.subtraction, lists.copying, lists.sorting)


def _vary(conversation: Conversation, rng: Random) -> None:
    """Earlier turns of another skill, and a system prompt that changes nothing, must not disturb."""
    if conversation.skill not in ("tool call", "tool result", "system prompt"):
        for _ in range(rng.choices((0, 1, rng.randint(2, 10)), (80, 15, 5))[0]):
            conversation.messages = rng.choice(_SINGLE_TURN)(rng, "train").messages + conversation.messages
    if conversation.messages[0]["role"] != "system" and rng.random() < 0.1:
        conversation.messages.insert(0, {"role": "system", "content": chat.plain_system(rng)})
