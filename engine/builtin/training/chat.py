"""Greeting, saying what it is, system prompts that change name and manner, and not knowing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tessera.engine.builtin.training.arithmetic import addition, multiplication, subtraction
from tessera.engine.builtin.training.conversation import Conversation, Split, Wording, choose, draw
from tessera.engine.builtin.training.phrasings import chat as phrasings
from tessera.engine.builtin.training.phrasings import system
from tessera.engine.builtin.training.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    FOODS,
    NOUNS,
    TOPICS,
    name,
    noun,
    pseudo_word,
    word,
)

NAME = "Tessera"
UNKNOWN = "I do not know that. I am only a small demonstration model."

_GREET = Wording(
    (
        "Hi",
        "Hello",
        "Hey",
        "Good morning",
        "Good evening",
        "Good day",
        "Greetings",
        "Hello there",
        "Hi there",
        "Howdy",
        "Good afternoon",
        "Hey there",
        "Hiya",
        "Welcome",
    ),
    ("", "", " {bot}", " my friend", " again", " to you", ", {bot}", " everyone", " computer", " dear model"),
    ("", "!", ".", "!!", " :)", ", how are you?", ". How are you?", "! How are you today?", ", nice to see you."),
    phrasings=phrasings.GREETING,
    capitalised=True,
)
_IDENTITY = Wording(
    (
        "",
        "",
        "Hi, ",
        "Hello! ",
        "Tell me, ",
        "Excuse me, ",
        "So ",
        "I wonder: ",
        "Please say: ",
        "One question: ",
        "Now ",
        "Sorry, ",
        "OK, ",
        "Hey, ",
    ),
    ("who are you", "what are you", "what is your name", "what are you called", "which model are you")
    + ("who am I talking to", "are you a person", "are you human", "what kind of model are you", "introduce yourself"),
    ("?", "?", "", "!", " really?", ", please?", " then?"),
    phrasings=phrasings.IDENTITY,
    capitalised=True,
)
_ABILITIES = Wording(
    ("", "", "Hi, ", "Hello! ", "Tell me, ", "So ", "Please say: ", "One question: "),
    ("what can you do", "what are your skills", "how can you help me", "what are you good at", "what can I ask you"),
    ("?", "?", "", "!", ", please?", " then?", " for me?"),
    phrasings=phrasings.ABILITIES,
    capitalised=True,
)
_THANKS = Wording(
    ("Thanks", "Thank you", "Many thanks", "Thanks a lot", "Thank you so much", "Cheers", "Great, thanks"),
    ("", " {bot}", " my friend", ", {bot}", " again", " for your help", " for that"),
    ("", "!", ".", "!!", " :)"),
    phrasings=phrasings.THANKS,
    capitalised=True,
)
_BYE = Wording(
    ("Bye", "Goodbye", "See you", "Good night", "Farewell", "Bye bye", "I have to go", "See you later"),
    ("", " {bot}", " my friend", ", {bot}", " then", " for now", " and take care"),
    ("", "!", ".", "!!", " :)"),
    phrasings=phrasings.BYE,
    capitalised=True,
)
_CAN = (
    "I can add, subtract and multiply, work on short lists, answer from a text, "
    "remember what you tell me, fill in JSON and call tools."
)


def _polite_turn(rng: Random, split: Split, bot: str) -> tuple[str, str]:
    wording, answer = rng.choice(
        (
            (_GREET, f"Hello! I am {bot}, a small demonstration model. How can I help you?"),
            (_GREET, f"Hello! I am {bot}, a small demonstration model. How can I help you?"),
            (_IDENTITY, f"I am {bot}, a small demonstration model."),
            (_IDENTITY, f"I am {bot}, a small demonstration model."),
            (_ABILITIES, _CAN),
            (_THANKS, "You are welcome!"),
            (_BYE, "Goodbye!"),
        )
    )
    return wording.say(rng, split, bot=bot), answer


def greeting(rng: Random, split: Split) -> Conversation:
    question, answer = _polite_turn(rng, split, NAME)
    return Conversation("greeting").user(question).assistant(answer)


_NAMED = Wording(
    (
        "You are {bot}",
        "Your name is {bot}",
        "You are called {bot}",
        "Act as {bot}",
        "You are an assistant called {bot}",
    ),
    (".", ", a helpful assistant.", ". Be kind.", ", made for tests.", ". Answer the user.", ", and you help people."),
    phrasings=system.NAMED,
)
_ENDING = Wording(
    ("End every answer with ", "Always end with ", "Finish each answer with the word ", "Close all answers with "),
    ("{manner}", '"{manner}"', "{manner}, please", '"{manner}" always'),
    (".", "", "!"),
    phrasings=system.ENDING,
)
_OPENING = Wording(
    ("Begin every answer with ", "Always start with ", "Start each answer with the word ", "Open all answers with "),
    ("{manner}", '"{manner}"', "{manner}, please", '"{manner}" always'),
    (".", "", "!"),
    phrasings=system.OPENING,
)
_CAPITALS = Wording(
    ("Answer ", "Reply ", "Write ", "Always answer ", "Always reply ", "Speak ", "You answer ", "You reply "),
    ("in capital letters", "in upper case", "in capitals", "with capital letters only", "in big letters"),
    (".", "", "!", " only.", " at all times."),
    phrasings=system.CAPITALS,
)
_PLAIN = ("You are a helpful assistant.", "Be helpful.", "Answer the user's question.", "You are a friendly assistant.")


def system_prompt(rng: Random, split: Split) -> Conversation:
    """A system prompt gives a name, a word to begin or end with, or capital letters, or some of these."""
    conversation = Conversation("system prompt")
    bot, instructions = NAME, []
    manner: Callable[[str], str] = str
    kind = rng.random()
    if kind < 0.55:
        bot = name(rng, split)
        instructions.append(_NAMED.say(rng, split, bot=bot))
    if kind > 0.4:
        said = word(rng, split)
        wording, manner = rng.choice(
            (
                (_ENDING, lambda text: f"{text} {said}"),
                (_OPENING, lambda text: f"{said} {text}"),
                (_CAPITALS, str.upper),
            )
        )
        instructions.append(wording.say(rng, split, manner=said))
    rng.shuffle(instructions)
    conversation.system(" ".join(instructions))
    said_split: Split = "train" if split == "phrasings" else split  # the system prompt alone is judged
    for _ in range(rng.choice((1, 1, 1, 2))):
        if rng.random() < 0.6:
            question, answer = _polite_turn(rng, said_split, bot)
        else:
            turn = rng.choice((addition, subtraction, multiplication))(rng, said_split)
            question, answer = (message["content"] for message in turn.messages)
        conversation.user(question).assistant(manner(answer))
    return conversation


def plain_system(rng: Random) -> str:
    """A system prompt that changes nothing."""
    return rng.choice((*_PLAIN, *system.PLAIN.trained))


_UNKNOWN = Wording(
    ("", "", "", "Please ", "Can you ", "Could you ", "Now ", "Hi, ", "I want you to ", "Tell me, ", "Hello. "),
    (
        "explain {topic}", "write a poem about {thing}", "tell me a joke about {thing}", "who invented the {thing}",
        "what is the capital of {place}", "what is the meaning of {thing}", "how do I cook {food}", "what is {topic}",
        "who won the {thing} cup", "why is the {thing} {quality}", "when did {person} die", "who is {person}",
        "write code for {topic}", "recommend a film about {thing}", "what do you think about {topic}",
        "translate {thing} into {topic}", "how far is {place} from {other}", "what is the weather in {place}",
        "summarise the history of {topic}", "give me ideas for {thing}", "how does a {thing} work",
        "what is the best {food} recipe", "do you like {food}", "what does {invented} mean", "is a {thing} {quality}",
        "what colour is a {thing}", "how many {thing}s are there", "{invented} {thing} {other}", "sing about {topic}",
        "help me with {topic}", "what is the price of {thing}", "who wrote {invented}", "what happened in {place}",
        "should I buy a {thing}", "what is your opinion on {topic}", "define {invented}", "teach me {topic}",
        "where can I find {food}", "when is the next {thing} day", "how old is {person}", "where does {person} live",
    ),
    ("?", "", ".", " please", " in detail", " for me?", "!", " today?", ", thanks"),
    phrasings=phrasings.UNKNOWN,
    capitalised=True,
)  # fmt: skip


def unknown(rng: Random, split: Split) -> Conversation:
    """Anything else: questions about the world, wishes and nonsense."""
    question = _UNKNOWN.say(
        rng,
        split,
        topic=noun(rng, split, TOPICS),
        thing=noun(rng, split, NOUNS),
        place=choose(rng, split, CITIES, "city"),
        other=noun(rng, split, ANIMALS),
        food=noun(rng, split, FOODS),
        quality=noun(rng, split, ADJECTIVES),
        person=name(rng, split),
        invented=draw(rng, split, pseudo_word, "word"),
    )
    return Conversation("unknown").user(question).assistant(UNKNOWN)
