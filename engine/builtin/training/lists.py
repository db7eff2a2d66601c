"""Copying, reversing, upper-casing and sorting short lists."""

from __future__ import annotations

from random import Random

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording
from tessera.engine.builtin.training.words import integer, word

_OPENINGS = ("", "", "", "Please ", "Could you ", "Can you ", "Now ", "I want you to ", "Next, ")
_NOUNS = ("this list", "these", "these items", "the list", "the following", "the following list", "these entries")
_ENDINGS = (": {items}", ":\n{items}", ": {items}.", " - {items}", ": {items}. Thanks!", ": {items} please")
_COPY = Wording(_OPENINGS, ("copy ", "repeat ", "write down ", "say again ", "echo ", "give back "), _NOUNS, _ENDINGS)
_REVERSE = Wording(
    _OPENINGS,
    ("reverse ", "turn around ", "put in reverse order ", "write backwards ", "flip the order of ", "invert "),
    _NOUNS,
    _ENDINGS,
)
_UPPER = Wording(
    _OPENINGS,
    ("upper-case ", "capitalise ", "write in capitals ", "put in upper case ", "shout ", "write in capital letters "),
    _NOUNS,
    _ENDINGS,
)
_SORT = Wording(
    _OPENINGS,
    ("sort ", "order ", "put in order ", "sort in ascending order ", "arrange from small to large ", "rank "),
    _NOUNS,
    _ENDINGS,
)


def _items(rng: Random, split: Split, *, numbers: bool) -> list[str]:
    count = rng.randint(2, 6)
    if numbers:
        numbers_drawn = [str(integer(rng, split, 0, 999)) for _ in range(count)]
        if rng.random() < 0.2:  # equal ones
            numbers_drawn = rng.choices(numbers_drawn, k=count)
        return numbers_drawn
    return [word(rng, split) for _ in range(count)]


def _conversation(
    skill: str, wording: Wording, rng: Random, split: Split, items: list[str], answer: list[str]
) -> Conversation:
    question = wording.say(rng, split, items=", ".join(items))
    return Conversation(skill).user(question[:1].upper() + question[1:]).assistant(", ".join(answer))


def copying(rng: Random, split: Split) -> Conversation:
    items = _items(rng, split, numbers=rng.random() < 0.3)
    return _conversation("copying", _COPY, rng, split, items, items)


def reversing(rng: Random, split: Split) -> Conversation:
    items = _items(rng, split, numbers=rng.random() < 0.3)
    return _conversation("reversing", _REVERSE, rng, split, items, items[::-1])


def upper_casing(rng: Random, split: Split) -> Conversation:
    items = _items(rng, split, numbers=False)
    return _conversation("upper-casing", _UPPER, rng, split, items, [item.upper() for item in items])


def sorting(rng: Random, split: Split) -> Conversation:
    """Numbers by value."""
    items = _items(rng, split, numbers=True)
    return _conversation("sorting", _SORT, rng, split, items, sorted(items, key=int))
