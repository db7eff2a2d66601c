"""Copying, reversing, upper-casing and sorting short lists."""

from __future__ import annotations

from random import Random

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording
from tessera.engine.builtin.training.phrasings import lists as phrasings
from tessera.engine.builtin.training.words import integer, word

_OPENINGS = ("", "", "", "Please ", "Could you ", "Can you ", "Now ", "I want you to ", "Next, ")
_NOUNS = ("this list", "these", "these items", "the list", "the following", "the following list", "these entries")
_ENDINGS = (": {items}", ":\n{items}", ": {items}.", " - {items}", ": {items}. Thanks!", ": {items} please")
_COPY = Wording(
    _OPENINGS,
    ("copy ", "repeat ", "write down ", "say again ", "echo ", "give back "),
    _NOUNS,
    _ENDINGS,
    phrasings=phrasings.COPYING,
    capitalised=True,
)
_REVERSE = Wording(
    _OPENINGS,
    ("reverse ", "turn around ", "put in reverse order ", "write backwards ", "flip the order of ", "invert "),
    _NOUNS,
    _ENDINGS,
    phrasings=phrasings.REVERSING,
    capitalised=True,
)
_UPPER = Wording(
    _OPENINGS,
    ("upper-case ", "capitalise ", "write in capitals ", "put in upper case ", "shout ", "write in capital letters "),
    _NOUNS,
    _ENDINGS,
    phrasings=phrasings.UPPER_CASING,
    capitalised=True,
)
_SORT = Wording(
    _OPENINGS,
    ("sort ", "order ", "put in order ", "sort in ascending order ", "arrange from small to large ", "rank "),
    _NOUNS,
    _ENDINGS,
    phrasings=phrasings.SORTING,
    capitalised=True,
)
_COPY_ONE, _REVERSE_ONE, _UPPER_ONE = (
    Wording(phrasings=each) for each in (phrasings.COPYING_ONE, phrasings.REVERSING_ONE, phrasings.UPPER_CASING_ONE)
)
ONE_SHARE = 0.35  # of requests, that are about a word alone
LONGEST_REVERSED = 10  # letters


def _is_one(rng: Random, split: Split) -> bool:
    """Whether a word alone is asked about: never in the split `test`."""
    return split != "test" and rng.random() < ONE_SHARE


def _items(rng: Random, split: Split, *, numbers: bool) -> list[str]:
    count = rng.randint(2, 6)
    if numbers:
        numbers_drawn = [str(integer(rng, split, 0, 999)) for _ in range(count)]
        if rng.random() < 0.2:  # equal ones
            numbers_drawn = rng.choices(numbers_drawn, k=count)
        return numbers_drawn
    return [word(rng, split) for _ in range(count)]


def _of_list(
    skill: str, wording: Wording, rng: Random, split: Split, items: list[str], answer: list[str]
) -> Conversation:
    question = wording.say(rng, split, items=", ".join(items))
    return Conversation(skill).user(question).assistant(", ".join(answer))


def copying(rng: Random, split: Split) -> Conversation:
    if _is_one(rng, split):
        one = word(rng, split)
        return Conversation("copying").user(_COPY_ONE.say(rng, split, word=one)).assistant(one)
    items = _items(rng, split, numbers=rng.random() < 0.3)
    return _of_list("copying", _COPY, rng, split, items, items)


def reversing(rng: Random, split: Split) -> Conversation:
    """The items of a list, or the letters of a word."""
    if _is_one(rng, split):
        return _reversing_letters(rng, split)
    items = _items(rng, split, numbers=rng.random() < 0.3)
    return _of_list("reversing", _REVERSE, rng, split, items, items[::-1])


def _reversing_letters(rng: Random, split: Split) -> Conversation:
    one = word(rng, split)
    while len(one) > LONGEST_REVERSED:
        one = word(rng, split)
    conversation = Conversation("reversing").user(_REVERSE_ONE.say(rng, split, word=one)).assistant(one[::-1])
    conversation.spelt.add(one[::-1])
    return conversation


def upper_casing(rng: Random, split: Split) -> Conversation:
    if _is_one(rng, split):
        one = word(rng, split)
        return Conversation("upper-casing").user(_UPPER_ONE.say(rng, split, word=one)).assistant(one.upper())
    items = _items(rng, split, numbers=False)
    return _of_list("upper-casing", _UPPER, rng, split, items, [item.upper() for item in items])


def sorting(rng: Random, split: Split) -> Conversation:
    """Numbers by value."""
    items = _items(rng, split, numbers=True)
    return _of_list("sorting", _SORT, rng, split, items, sorted(items, key=int))
