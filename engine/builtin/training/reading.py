"""Answering from a short text given in the prompt, also when the text does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording
from tessera.engine.builtin.training.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    JOBS,
    OBJECTS,
    PLACES,
    city,
    integer,
    name,
    noun,
)

NOT_SAID = "The text does not say."


@dataclass(frozen=True)
class Fact:
    """A sentence, and questions that it answers with `answer`."""

    sentence: str
    questions: tuple[str, ...]
    answer: str


def _lives(rng: Random, split: Split, who: str) -> Fact:
    place = city(rng, split)
    sentence = rng.choice(
        (f"{who} lives in {place}.", f"The home of {who} is in {place}.", f"{who} has a flat in {place}.")
    )
    questions = (f"Where does {who} live?", f"In which city does {who} live?", f"Which city is the home of {who}?")
    return Fact(sentence, questions, f"{who} lives in {place}.")


def _works(rng: Random, split: Split, who: str) -> Fact:
    job = noun(rng, split, JOBS)
    sentence = rng.choice((f"{who} works as a {job}.", f"{who} is a {job}.", f"The job of {who} is {job}."))
    questions = (f"What does {who} work as?", f"What is the job of {who}?", f"What does {who} do for a living?")
    return Fact(sentence, questions, f"{who} works as a {job}.")


def _eats(rng: Random, split: Split, who: str) -> Fact:
    food = noun(rng, split, FOODS)
    sentence = rng.choice(
        (f"{who} likes {food}.", f"{who} often eats {food}.", f"The favourite food of {who} is {food}.")
    )
    questions = (f"What does {who} like?", f"What does {who} like to eat?", f"What is the favourite food of {who}?")
    return Fact(sentence, questions, f"{who} likes {food}.")


def _owns(rng: Random, split: Split, who: str) -> Fact:
    colour, animal = rng.choice(COLOURS), noun(rng, split, ANIMALS)
    sentence = rng.choice((f"{who} has a {colour} {animal}.", f"{who} owns a {colour} {animal}."))
    questions = (f"Which animal does {who} have?", f"What animal does {who} own?", f"What pet does {who} have?")
    return Fact(sentence, questions, f"{who} has a {colour} {animal}.")


def _age(rng: Random, split: Split, who: str) -> Fact:
    years = integer(rng, split, 1, 99)
    sentence = rng.choice((f"{who} is {years} years old.", f"{who} turned {years} this year."))
    questions = (f"How old is {who}?", f"What is the age of {who}?", f"How many years old is {who}?")
    return Fact(sentence, questions, f"{who} is {years} years old.")


def _counts(rng: Random, split: Split, who: str) -> Fact:
    count, food = integer(rng, split, 2, 999), noun(rng, split, FOODS)
    sentence = rng.choice((f"{who} bought {count} {food}.", f"{who} came home with {count} {food}."))
    questions = (f"How many {food} did {who} buy?", f"What number of {food} did {who} buy?")
    return Fact(sentence, questions, f"{who} bought {count} {food}.")


def _thing(rng: Random, split: Split, _who: str) -> Fact:
    thing, place = noun(rng, split, OBJECTS), noun(rng, split, PLACES)
    sentence = rng.choice((f"The {thing} is in the {place}.", f"Someone left the {thing} in the {place}."))
    questions = (f"Where is the {thing}?", f"Where can the {thing} be found?", f"In which place is the {thing}?")
    return Fact(sentence, questions, f"The {thing} is in the {place}.")


_KINDS: tuple[Callable[[Random, Split, str], Fact], ...] = (_lives, _works, _eats, _owns, _age, _counts, _thing)
_PROMPT = Wording(
    (
        "Read this text. ",
        "Here is a text: ",
        "Text: ",
        "",
        "Look at the following. ",
        "Use this text only: ",
        "Given: ",
    ),
    ("{text}",),
    ("\n", " ", "\n\n"),
    ("Question: ", "", "Now answer: ", "Tell me: ", "Q: ", "My question is: ", "Please answer: "),
    ("{question}",),
    ("", "", " Answer from the text.", " Please.", "\nAnswer:"),
)


def reading(rng: Random, split: Split) -> Conversation:
    """Three to six facts about two or three people and things, one question; one in three has no answer."""
    people = list({name(rng, split): None for _ in range(rng.randint(2, 3))})
    facts: dict[tuple[object, str], Fact] = {}
    for _ in range(rng.randint(3, 6)):
        kind, who = rng.choice(_KINDS), rng.choice(people)
        fact = kind(rng, split, who)
        key = (kind, fact.questions[0] if kind in (_thing, _counts) else who)
        facts.setdefault(key, fact)
    chosen = rng.choice(list(facts.values()))
    asked, answer = rng.choice(chosen.questions), chosen.answer
    texts = [fact.sentence for fact in facts.values()]
    if rng.random() < 1 / 3 and len(texts) > 1:
        texts.remove(chosen.sentence)
        answer = NOT_SAID
    rng.shuffle(texts)
    question = _PROMPT.say(rng, split, text=" ".join(texts), question=asked)
    return Conversation("reading").user(question).assistant(answer)
