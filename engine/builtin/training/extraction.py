"""Filling a JSON object from a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording, also, choose
from tessera.engine.builtin.training.phrasings.extraction import EXTRACTION
from tessera.engine.builtin.training.words import (
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    OBJECTS,
    PLACES,
    city,
    integer,
    name,
    noun,
    time_of_day,
    word,
)

Draw = Callable[[Random, Split], Any]


@dataclass(frozen=True)
class Form:
    """Keys with how their values are drawn, and sentences that state all of them."""

    fields: dict[str, Draw]
    sentences: tuple[str, ...]
    further: tuple[str, ...]


_FORMS = (
    Form(
        {"name": name, "age": lambda r, s: integer(r, s, 1, 99), "city": city},
        (
            "{name} is {age} years old and lives in {city}.",
            "In {city} lives {name}, who is {age}.",
            "My friend {name} from {city} has just turned {age}.",
            "{age} years ago {name} was born in {city}.",
        ),
        (
            "{name}, {age}, lives in {city}.",
            "I am {name}, I am {age} years old and I live in {city}.",
            "Hello, my name is {name}. I come from {city} and I am {age}.",
            "A {age} year old called {name} moved to {city}.",
            "{name} ({age}) is from {city}.",
        ),
    ),
    Form(
        {"name": name, "job": lambda r, s: noun(r, s, JOBS), "city": city},
        (
            "{name} works as a {job} in {city}.",
            "The {job} of {city} is called {name}.",
            "In {city} everybody knows {name} the {job}.",
            "{name} moved to {city} to become a {job}.",
        ),
        (
            "{name} is a {job} in {city}.",
            "I am {name}, a {job} from {city}.",
            "If you need a {job} in {city}, ask {name}.",
            "Meet {name}, who lives in {city} and works as a {job}.",
            "The best {job} in {city} is {name}.",
        ),
    ),
    Form(
        {
            "item": lambda r, s: noun(r, s, FOODS),
            "quantity": lambda r, s: integer(r, s, 1, 999),
            "price": lambda r, s: integer(r, s, 1, 999),
        },
        (
            "I would like {quantity} {item} for {price} euros.",
            "Order {quantity} {item}; the price is {price} euros.",
            "For {price} euros you get {quantity} {item}.",
            "We sold {quantity} {item} and were paid {price} euros.",
        ),
        (
            "{quantity} {item} cost {price} euros.",
            "I bought {quantity} {item} for {price} euros.",
            "Please send {quantity} {item}, I pay {price} euros.",
            "The bill says {quantity} {item}, {price} euros.",
            "She paid {price} euros for {quantity} {item}.",
        ),
    ),
    Form(
        {"event": word, "day": lambda r, s: r.choice(DAYS), "time": time_of_day},
        (
            "The {event} meeting is on {day} at {time}.",
            "On {day} at {time} we talk about {event}.",
            "Come to the {event} party, {day}, {time}.",
            "At {time} on {day} there is a {event} lesson.",
        ),
        (
            "The {event} starts at {time} on {day}.",
            "{event}: {day}, {time}",
            "Do not forget the {event} on {day} at {time}.",
            "Next {day} at {time} we have a {event} session.",
            "We meet for {event} at {time} every {day}.",
        ),
    ),
    Form(
        {
            "object": lambda r, s: noun(r, s, OBJECTS),
            "colour": lambda r, s: r.choice(COLOURS),
            "place": lambda r, s: noun(r, s, PLACES),
        },
        (
            "The {colour} {object} is in the {place}.",
            "In the {place} you find a {colour} {object}.",
            "Somebody left a {colour} {object} in the {place}.",
            "I lost my {object} in the {place}; it is {colour}.",
        ),
        (
            "There is a {colour} {object} in the {place}.",
            "A {colour} {object} was found in the {place}.",
            "I put the {object}, the {colour} one, in the {place}.",
            "Please bring me the {colour} {object} from the {place}.",
            "My {object} is {colour} and it is in the {place}.",
        ),
    ),
    Form(
        {
            "from": lambda r, s: choose(r, s, CITIES, "city"),
            "to": city,
            "passengers": lambda r, s: integer(r, s, 1, 99),
        },
        (
            "A trip from {from} to {to} for {passengers} people.",
            "{passengers} passengers travel to {to} from {from}.",
            "We are {passengers} and go from {from} to {to}.",
            "Book {passengers} seats to {to}, leaving from {from}.",
        ),
        (
            "I need a train from {from} to {to} for {passengers} passengers.",
            "From {from} to {to}, {passengers} people.",
            "{passengers} of us want to go to {to} from {from}.",
            "The bus from {from} to {to} has {passengers} passengers.",
            "Please reserve {passengers} tickets from {from} to {to}.",
        ),
    ),
)
_PROMPT = Wording(
    ("Fill a JSON object", "Make JSON", "Give me a JSON object", "Write JSON", "Extract JSON", "Return a JSON object"),
    (" with the keys {keys}", " with keys {keys}", " that has the keys {keys}", ", keys {keys},", " ({keys})"),
    (" from this sentence: {text}", " for: {text}", " from: {text}", ' from the text "{text}"', ":\n{text}"),
    ("", "", " JSON only.", "\nNo other words.", " Thanks."),
    phrasings=EXTRACTION,
)


def extraction(rng: Random, split: Split) -> Conversation:
    """Keys are asked in any order; one in eight is not in the sentence and becomes null."""
    form = rng.choice(_FORMS)
    values = {key: drawn(rng, split) for key, drawn in form.fields.items()}
    sentence = rng.choice(also(split, form.sentences, *form.further)).format(**values)
    keys = list(values)
    rng.shuffle(keys)
    if rng.random() < 1 / 8:
        others = [key for other in _FORMS for key in other.fields if key not in values]
        keys.insert(rng.randint(0, len(keys)), rng.choice(others))
    elif rng.random() < 0.3:
        keys.pop()
    answer = json.dumps({key: values.get(key) for key in keys})
    question = _PROMPT.say(rng, split, keys=", ".join(keys), text=sentence)
    return Conversation("extraction").user(question).assistant(answer)
