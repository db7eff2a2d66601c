"""Addition and subtraction to three digits, multiplication tables."""

from __future__ import annotations

from random import Random

from tessera.engine.builtin.training.conversation import Conversation, Split, Wording, draw, in_split
from tessera.engine.builtin.training.phrasings import arithmetic as phrasings

_OPENINGS = ("", "", "", "Please: ", "Tell me: ", "Quick question: ", "Hi! ", "Now ", "Next: ", "Hello, ", "One more: ")
_CLOSINGS = ("", "?", ".", " please", " please?", ", thanks", " =", " = ?", "!")
_ADD = Wording(
    _OPENINGS,
    ("{a} + {b}", "what is {a} + {b}", "What is {a} plus {b}", "{a} plus {b}", "add {a} and {b}", "compute {a} + {b}")
    + ("How much is {a} + {b}", "the sum of {a} and {b}", "calculate {a} + {b}", "{a}+{b}", "can you add {b} to {a}"),
    _CLOSINGS,
    phrasings=phrasings.ADDITION,
)
_SUBTRACT = Wording(
    _OPENINGS,
    ("{a} - {b}", "what is {a} - {b}", "What is {a} minus {b}", "{a} minus {b}", "subtract {b} from {a}")
    + ("How much is {a} - {b}", "compute {a} - {b}", "calculate {a} - {b}", "{a}-{b}", "can you take {b} from {a}"),
    _CLOSINGS,
    phrasings=phrasings.SUBTRACTION,
)
_MULTIPLY = Wording(
    _OPENINGS,
    ("{a} * {b}", "what is {a} * {b}", "What is {a} times {b}", "{a} times {b}", "multiply {a} by {b}", "{a} x {b}")
    + ("How much is {a} x {b}", "compute {a} * {b}", "calculate {a} x {b}", "{a}*{b}", "the product of {a} and {b}"),
    _CLOSINGS,
    phrasings=phrasings.MULTIPLICATION,
)


def _pair(rng: Random) -> tuple[int, int]:
    digits = rng.choice((1, 2, 2, 3, 3, 3, 3))
    other = rng.choice((digits, rng.randint(1, 3)))
    return rng.randint(0, 10**digits - 1), rng.randint(0, 10**other - 1)


def addition(rng: Random, split: Split) -> Conversation:
    a, b = draw(rng, split, _pair, "addition")
    question = _ADD.say(rng, split, a=a, b=b)
    return Conversation("addition").user(question).assistant(f"{a} + {b} = {a + b}")


def subtraction(rng: Random, split: Split) -> Conversation:
    a, b = draw(rng, split, _pair, "subtraction")
    if a < b and rng.random() < 0.7 and in_split(split, "subtraction", (b, a)):
        a, b = b, a
    question = _SUBTRACT.say(rng, split, a=a, b=b)
    return Conversation("subtraction").user(question).assistant(f"{a} - {b} = {a - b}")


def multiplication(rng: Random, split: Split) -> Conversation:
    """The tables to 12; all products are trained, a held-out case is a new wording of one."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    question = _MULTIPLY.say(rng, split, a=a, b=b)
    return Conversation("multiplication").user(question).assistant(f"{a} * {b} = {a * b}")
