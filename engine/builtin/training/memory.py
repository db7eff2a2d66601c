"""Remembering what the user said several turns ago."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tessera.engine.builtin.training.arithmetic import addition, multiplication
from tessera.engine.builtin.training.conversation import Conversation, Split, Wording
from tessera.engine.builtin.training.lists import copying, reversing
from tessera.engine.builtin.training.phrasings import memory as phrasings
from tessera.engine.builtin.training.words import ANIMALS, COLOURS, FOODS, JOBS, city, integer, name, noun


@dataclass(frozen=True)
class Memory:
    """What a user may tell: a value, how it is told, acknowledged, asked for and answered."""

    draw: Callable[[Random, Split], object]
    tell: Wording
    acknowledge: str
    ask: Wording
    answer: str


_TELL = ("", "", "By the way, ", "Please remember: ", "Just so you know, ", "Remember that ", "Note: ", "For later: ")
_END = (".", "!", ". Keep it in mind.", ". Remember it.", "", ". Please note that.")
_ASK = ("", "", "Now tell me, ", "So, ", "Do you remember: ", "Quick check: ", "And ", "Tell me: ")
_ASK_END = ("?", "?", "? Please.", "", "? I forgot.")

_MEMORIES = (
    Memory(
        name,
        Wording(
            _TELL,
            ("my name is {v}", "I am {v}", "I am called {v}", "people call me {v}"),
            _END,
            phrasings=phrasings.NAME_TOLD,
            capitalised=True,
        ),
        "Nice to meet you, {v}.",
        Wording(
            _ASK,
            ("what is my name", "who am I", "what am I called", "how do people call me"),
            _ASK_END,
            phrasings=phrasings.NAME_ASKED,
            capitalised=True,
        ),
        "Your name is {v}.",
    ),
    Memory(
        city,
        Wording(
            _TELL,
            ("I live in {v}", "my home is in {v}", "I have a house in {v}", "my city is {v}"),
            _END,
            phrasings=phrasings.CITY_TOLD,
            capitalised=True,
        ),
        "I will remember that you live in {v}.",
        Wording(
            _ASK,
            ("where do I live", "in which city do I live", "what is my city", "where is my home"),
            _ASK_END,
            phrasings=phrasings.CITY_ASKED,
            capitalised=True,
        ),
        "You live in {v}.",
    ),
    Memory(
        lambda rng, split: rng.choice(COLOURS),
        Wording(
            _TELL,
            ("my favourite colour is {v}", "I like the colour {v} best", "{v} is my favourite colour"),
            _END,
            phrasings=phrasings.COLOUR_TOLD,
            capitalised=True,
        ),
        "I will remember that your favourite colour is {v}.",
        Wording(
            _ASK,
            ("what is my favourite colour", "which colour do I like best", "what colour do I like"),
            _ASK_END,
            phrasings=phrasings.COLOUR_ASKED,
            capitalised=True,
        ),
        "Your favourite colour is {v}.",
    ),
    Memory(
        lambda rng, split: noun(rng, split, FOODS),
        Wording(
            _TELL,
            ("I like to eat {v}", "my favourite food is {v}", "I love {v}", "{v} is my favourite food"),
            _END,
            phrasings=phrasings.FOOD_TOLD,
            capitalised=True,
        ),
        "I will remember that you like {v}.",
        Wording(
            _ASK,
            ("what do I like to eat", "what is my favourite food", "which food do I like"),
            _ASK_END,
            phrasings=phrasings.FOOD_ASKED,
            capitalised=True,
        ),
        "You like {v}.",
    ),
    Memory(
        lambda rng, split: integer(rng, split, 1, 99),
        Wording(
            _TELL,
            ("I am {v} years old", "my age is {v}", "I turned {v} this year", "I am aged {v}"),
            _END,
            phrasings=phrasings.AGE_TOLD,
            capitalised=True,
        ),
        "I will remember that you are {v} years old.",
        Wording(
            _ASK,
            ("how old am I", "what is my age", "how many years old am I", "do you know my age"),
            _ASK_END,
            phrasings=phrasings.AGE_ASKED,
            capitalised=True,
        ),
        "You are {v} years old.",
    ),
    Memory(
        lambda rng, split: noun(rng, split, JOBS),
        Wording(
            _TELL,
            ("I work as a {v}", "my job is {v}", "I earn my money as a {v}", "I am a {v} by trade"),
            _END,
            phrasings=phrasings.JOB_TOLD,
            capitalised=True,
        ),
        "I will remember that you work as a {v}.",
        Wording(
            _ASK,
            ("what is my job", "what do I work as", "what do I do for a living"),
            _ASK_END,
            phrasings=phrasings.JOB_ASKED,
            capitalised=True,
        ),
        "You work as a {v}.",
    ),
    Memory(
        lambda rng, split: noun(rng, split, ANIMALS),
        Wording(
            _TELL,
            ("I have a {v}", "my pet is a {v}", "there is a {v} in my house", "I own a {v}"),
            _END,
            phrasings=phrasings.PET_TOLD,
            capitalised=True,
        ),
        "I will remember that you have a {v}.",
        Wording(
            _ASK,
            ("which animal do I have", "what pet do I have", "what is my pet", "what animal do I own"),
            _ASK_END,
            phrasings=phrasings.PET_ASKED,
            capitalised=True,
        ),
        "You have a {v}.",
    ),
    Memory(
        lambda rng, split: integer(rng, split, 0, 999),
        Wording(
            _TELL,
            ("my lucky number is {v}", "the code is {v}", "{v} is the code", "the secret number is {v}"),
            _END,
            phrasings=phrasings.NUMBER_TOLD,
            capitalised=True,
        ),
        "I will remember the number {v}.",
        Wording(
            _ASK,
            ("what is the code", "what is my lucky number", "what was the number", "which number"),
            _ASK_END,
            phrasings=phrasings.NUMBER_ASKED,
            capitalised=True,
        ),
        "The number is {v}.",
    ),
)
NOT_TOLD = "You have not told me that."
_SMALL_TALK = (addition, multiplication, copying, reversing)


def memory(rng: Random, split: Split) -> Conversation:
    """One to three facts, few or (seldom) many other turns between, one question; one in three is about an untold fact."""
    conversation = Conversation("memory")
    told = [(kind, kind.draw(rng, split)) for kind in rng.sample(_MEMORIES, rng.randint(1, 3))]
    turns: list[Callable[[], None]] = []
    for kind, value in told:

        def tell(kind: Memory = kind, value: object = value) -> None:
            conversation.user(kind.tell.say(rng, split, v=value))
            conversation.assistant(kind.acknowledge.format(v=value))

        turns.append(tell)
    for _ in range(rng.choices((0, 1, 2, rng.randint(3, 16)), (32, 32, 31, 5))[0]):

        def talk() -> None:
            small = rng.choice(_SMALL_TALK)(rng, "train" if split == "phrasings" else split)
            conversation.messages += small.messages
            conversation.spelt |= small.spelt

        turns.append(talk)
    rng.shuffle(turns)
    for turn in turns:
        turn()
    kind, value = rng.choice(told)
    if rng.random() < 1 / 3:
        untold = rng.choice([other for other in _MEMORIES if other not in [known for known, _ in told]])
        return conversation.user(untold.ask.say(rng, split)).assistant(NOT_TOLD)
    conversation.user(kind.ask.say(rng, split))
    return conversation.assistant(kind.answer.format(v=value))
