"""Answering from a short text given in the prompt, also when the text does not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording, also
from tessera.engine.builtin.training.phrasings.reading import READING
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
MORE_QUESTIONS = (40, 25, 20, 15)  # in training: how often there are none, one, two and three
UNSAID_SHARE = 0.3  # of these, that are about something else than the facts
RIVAL_SHARE = 0.4  # in training, of texts that say the same kind of thing about another, too


@dataclass(frozen=True)
class Fact:
    """A sentence, and questions that it answers with `answer`."""

    sentence: str
    questions: tuple[str, ...]
    answer: str


def _lives(rng: Random, split: Split, who: str) -> Fact:
    place = city(rng, split)
    sentence = rng.choice(
        also(
            split,
            (f"{who} lives in {place}.", f"The home of {who} is in {place}.", f"{who} has a flat in {place}."),
            f"{who} comes from {place}.",
            f"{who} moved to {place}.",
            f"{place} is where {who} lives.",
        )
    )
    questions = also(
        split,
        (f"Where does {who} live?", f"In which city does {who} live?", f"Which city is the home of {who}?"),
        f"Where is {who} from?",
        f"Where is the home of {who}?",
        f"What city does {who} live in?",
        f"Tell me where {who} lives.",
    )
    return Fact(sentence, questions, f"{who} lives in {place}.")


def _works(rng: Random, split: Split, who: str) -> Fact:
    job = noun(rng, split, JOBS)
    sentence = rng.choice(
        also(
            split,
            (f"{who} works as a {job}.", f"{who} is a {job}.", f"The job of {who} is {job}."),
            f"{who} earns a living as a {job}.",
            f"{who}, a {job}, likes the work.",
            f"People know {who} as a {job}.",
        )
    )
    questions = also(
        split,
        (f"What does {who} work as?", f"What is the job of {who}?", f"What does {who} do for a living?"),
        f"What is {who}'s job?",
        f"Which job does {who} have?",
        f"What is {who}?",
        f"Tell me what {who} works as.",
    )
    return Fact(sentence, questions, f"{who} works as a {job}.")


def _eats(rng: Random, split: Split, who: str) -> Fact:
    food = noun(rng, split, FOODS)
    sentence = rng.choice(
        also(
            split,
            (f"{who} likes {food}.", f"{who} often eats {food}.", f"The favourite food of {who} is {food}."),
            f"{who} loves {food}.",
            f"{who} enjoys {food}.",
            f"What {who} likes best is {food}.",
        )
    )
    questions = also(
        split,
        (f"What does {who} like?", f"What does {who} like to eat?", f"What is the favourite food of {who}?"),
        f"What food does {who} like?",
        f"What does {who} eat?",
        f"Which food is {who} fond of?",
        f"Tell me what {who} likes.",
    )
    return Fact(sentence, questions, f"{who} likes {food}.")


def _owns(rng: Random, split: Split, who: str) -> Fact:
    colour, animal = rng.choice(COLOURS), noun(rng, split, ANIMALS)
    sentence = rng.choice(
        also(
            split,
            (f"{who} has a {colour} {animal}.", f"{who} owns a {colour} {animal}."),
            f"At home {who} keeps a {colour} {animal}.",
            f"{who} bought a {colour} {animal}.",
            f"The {colour} {animal} belongs to {who}.",
        )
    )
    questions = also(
        split,
        (f"Which animal does {who} have?", f"What animal does {who} own?", f"What pet does {who} have?"),
        f"What pet does {who} own?",
        f"Which pet does {who} keep?",
        f"What is {who}'s pet?",
        f"Tell me which animal {who} has.",
    )
    return Fact(sentence, questions, f"{who} has a {colour} {animal}.")


def _age(rng: Random, split: Split, who: str) -> Fact:
    years = integer(rng, split, 1, 99)
    sentence = rng.choice(
        also(
            split,
            (f"{who} is {years} years old.", f"{who} turned {years} this year."),
            f"{who} is {years}.",
            f"The age of {who} is {years}.",
            f"At {years}, {who} is still learning.",
        )
    )
    questions = also(
        split,
        (f"How old is {who}?", f"What is the age of {who}?", f"How many years old is {who}?"),
        f"What is {who}'s age?",
        f"What age is {who}?",
        f"How many years has {who} lived?",
        f"Tell me how old {who} is.",
    )
    return Fact(sentence, questions, f"{who} is {years} years old.")


def _counts(rng: Random, split: Split, who: str) -> Fact:
    count, food = integer(rng, split, 2, 999), noun(rng, split, FOODS)
    sentence = rng.choice(
        also(
            split,
            (f"{who} bought {count} {food}.", f"{who} came home with {count} {food}."),
            f"{who} got {count} {food}.",
            f"In the shop {who} took {count} {food}.",
            f"Yesterday {who} bought {count} {food}.",
        )
    )
    questions = also(
        split,
        (f"How many {food} did {who} buy?", f"What number of {food} did {who} buy?"),
        f"How many {food} has {who} bought?",
        f"How many {food} did {who} get?",
        f"Tell me how many {food} {who} bought.",
    )
    return Fact(sentence, questions, f"{who} bought {count} {food}.")


def _thing(rng: Random, split: Split, _who: str) -> Fact:
    thing, place = noun(rng, split, OBJECTS), noun(rng, split, PLACES)
    sentence = rng.choice(
        also(
            split,
            (f"The {thing} is in the {place}.", f"Someone left the {thing} in the {place}."),
            f"There is a {thing} in the {place}.",
            f"You can find the {thing} in the {place}.",
            f"The {place} has a {thing} in it.",
        )
    )
    questions = also(
        split,
        (f"Where is the {thing}?", f"Where can the {thing} be found?", f"In which place is the {thing}?"),
        f"Where do I find the {thing}?",
        f"Where can I find the {thing}?",
        f"What place is the {thing} in?",
        f"Tell me where the {thing} is.",
    )
    return Fact(sentence, questions, f"The {thing} is in the {place}.")


Kind = Callable[[Random, Split, str], Fact]
_KINDS: tuple[Kind, ...] = (_lives, _works, _eats, _owns, _age, _counts, _thing)
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
    phrasings=READING,
)


def reading(rng: Random, split: Split) -> Conversation:
    """Three to six facts about two or three people and things, one question; one in three has no answer.

    In training there may be another fact that is easily taken for the answer, and more questions about the same text,
    which thus teaches more for its tokens.
    """
    people = list({name(rng, split): None for _ in range(rng.randint(2, 3))})
    facts: dict[tuple[Kind, str], Fact] = {}

    def fact_of(who: str, kind: Kind | None = None) -> tuple[tuple[Kind, str], Fact]:
        """A fact, and what it is about."""
        kind = kind or rng.choice(_KINDS)
        fact = kind(rng, split, who)
        return (kind, fact.questions[0] if kind in (_thing, _counts) else who), fact

    for _ in range(rng.randint(3, 6)):
        about, fact = fact_of(rng.choice(people))
        facts.setdefault(about, fact)
    chosen = rng.choice(list(facts.values()))
    if split == "train" and rng.random() < RIVAL_SHARE:
        kind = next(kind for (kind, _), fact in facts.items() if fact is chosen)
        about, fact = fact_of(rng.choice(people), kind)
        facts.setdefault(about, fact)
    asked, answer = rng.choice(chosen.questions), chosen.answer
    texts = [fact.sentence for fact in facts.values()]
    answers = {about: fact.answer for about, fact in facts.items()}
    if rng.random() < 1 / 3 and len(texts) > 1:
        texts.remove(chosen.sentence)
        answer = NOT_SAID
        answers = {about: NOT_SAID if facts[about] is chosen else said for about, said in answers.items()}
    rng.shuffle(texts)
    question = _PROMPT.say(rng, split, text=" ".join(texts), question=asked)
    conversation = Conversation("reading").user(question).assistant(answer)
    for _ in range(rng.choices(range(4), MORE_QUESTIONS)[0] if split == "train" else 0):
        about, fact = rng.choice(list(facts.items()))
        if rng.random() < UNSAID_SHARE:
            about, fact = fact_of(rng.choice(people))
            if about in facts:
                continue
        conversation.user(rng.choice(fact.questions)).assistant(answers.get(about, NOT_SAID))
    return conversation
