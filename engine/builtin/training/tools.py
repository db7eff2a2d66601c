"""Choosing among offered tools, writing the call, and using the tool's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tessera.engine.builtin.training.arithmetic import addition, multiplication
from tessera.engine.builtin.training.chat import UNKNOWN, greeting, unknown
from tessera.engine.builtin.training.conversation import Conversation, Split, Wording
from tessera.engine.builtin.training.phrasings.tools import REQUESTS
from tessera.engine.builtin.training.words import (
    DAYS,
    FOODS,
    LANGUAGES,
    OBJECTS,
    PLACES,
    TOPICS,
    city,
    integer,
    name,
    noun,
    time_of_day,
    word,
)

Draw = Callable[[Random, Split], Any]
_OPENINGS = ("", "", "", "Please ", "Could you ", "Can you ", "Now ", "Hi, ", "I want you to ", "Hello, please ")
_CLOSINGS = ("", ".", " please", ", please.", ", thanks", "!", ". Thank you.")


@dataclass(frozen=True)
class Tool:
    """A function: its parameters with how values are drawn, requests for it, and its result.

    `names` are interchangeable, so that the offered definition decides and not habit. `result` draws
    what the tool returns; `answer` is said of arguments and result.
    """

    names: tuple[str, ...]
    description: str
    parameters: dict[str, Draw]
    requests: tuple[str, ...]
    result: dict[str, Draw]
    answer: str

    def definition(self, called: str) -> dict[str, Any]:
        """OpenAI's form; the types are those of drawn values."""
        probe = Random(0)
        properties = {
            key: {"type": "integer" if isinstance(drawn(probe, "train"), int) else "string"}
            for key, drawn in self.parameters.items()
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": called, "description": self.description, "parameters": schema},
        }


def _number(low: int, high: int) -> Draw:
    return lambda rng, split: integer(rng, split, low, high)


def _one_of(items: list[str]) -> Draw:
    return lambda rng, split: rng.choice(items)


def _from(items: list[str]) -> Draw:
    return lambda rng, split: noun(rng, split, items)


_food, _thing, _place, _topic = (
    _from(FOODS),
    _from(OBJECTS),
    _from(PLACES),
    _from(TOPICS),
)

TOOLS = (
    Tool(
        ("get_weather", "weather", "current_weather", "lookup_weather"),
        "Get the weather in a city",
        {"city": city},
        ("what is the weather in {city}", "tell me the weather in {city}", "how is the weather in {city} today"),
        {"temperature": _number(0, 40), "sky": _one_of(["sunny", "cloudy", "rainy", "windy", "foggy", "clear"])},
        "In {city} it is {sky} and {temperature} degrees.",
    ),
    Tool(
        ("set_timer", "start_timer", "timer", "countdown"),
        "Start a timer",
        {"minutes": _number(1, 99)},
        ("set a timer for {minutes} minutes", "start a timer of {minutes} minutes", "wake me in {minutes} minutes"),
        {"status": _one_of(["started", "running"])},
        "The timer for {minutes} minutes is {status}.",
    ),
    Tool(
        ("send_message", "message", "text_person", "send_text"),
        "Send a message to a person",
        {"to": name, "text": word},
        ("send {to} the message {text}", "tell {to} the word {text} in a message", "write {text} to {to}"),
        {"status": _one_of(["sent", "queued"])},
        "The message to {to} is {status}.",
    ),
    Tool(
        ("add_event", "create_event", "calendar_add", "schedule"),
        "Add an event to the calendar",
        {"title": word, "day": _one_of(DAYS), "time": time_of_day},
        ("add {title} on {day} at {time} to my calendar", "put {title} in the calendar for {day} at {time}")
        + ("schedule {title} for {day}, {time}",),
        {"status": _one_of(["added", "booked"])},
        "The event {title} is {status} for {day} at {time}.",
    ),
    Tool(
        ("translate", "translate_text", "to_language", "translator"),
        "Translate a text into a language",
        {"text": word, "language": _one_of(LANGUAGES)},
        ("translate {text} into {language}", "say {text} in {language}", "how do you say {text} in {language}"),
        {"translation": word},
        "In {language}, {text} is {translation}.",
    ),
    Tool(
        ("get_stock", "stock_price", "quote", "share_price"),
        "Get the share price of a company",
        {"company": name},
        ("what is the share price of {company}", "look up the stock of {company}", "how much is one {company} share"),
        {"price": _number(1, 999)},
        "A share of {company} costs {price}.",
    ),
    Tool(
        ("play_music", "play", "start_music", "play_song"),
        "Play music of an artist",
        {"artist": name},
        ("play something by {artist}", "play music of {artist}", "put on a song by {artist}"),
        {"song": word},
        "Now playing {song} by {artist}.",
    ),
    Tool(
        ("search", "web_search", "find_pages", "search_web"),
        "Search the web",
        {"query": _topic},
        ("search the web for {query}", "look up {query} on the web", "find pages about {query}"),
        {"hits": _number(1, 999)},
        "I found {hits} pages about {query}.",
    ),
    Tool(
        ("order_food", "order", "buy_food", "place_order"),
        "Order food",
        {"item": _food, "quantity": _number(1, 99)},
        ("order {quantity} {item}", "buy {quantity} {item} for me", "get me {quantity} {item}"),
        {"price": _number(1, 999)},
        "I ordered {quantity} {item} for {price} euros.",
    ),
    Tool(
        ("find_object", "locate", "where_is", "find_item"),
        "Find out where an object is",
        {"object": _thing},
        ("where is my {object}", "find my {object}", "locate the {object}", "where did I leave the {object}"),
        {"place": _place},
        "The {object} is in the {place}.",
    ),
    Tool(
        ("turn_on", "switch_on", "start_device", "activate"),
        "Turn on a device in a room",
        {"device": _thing, "room": _place},
        (
            "turn on the {device} in the {room}",
            "in the {room} switch on the {device}",
            "start the {device} of the {room}",
        ),
        {"status": _one_of(["on", "ready"])},
        "The {device} in the {room} is {status}.",
    ),
    Tool(
        ("book_trip", "book_train", "buy_ticket", "reserve_trip"),
        "Book a trip between two cities",
        {"origin": city, "destination": city},
        ("book a trip from {origin} to {destination}", "I need a ticket from {origin} to {destination}")
        + ("get me to {destination} from {origin}",),
        {"price": _number(1, 999), "time": time_of_day},
        "The trip from {origin} to {destination} leaves at {time} and costs {price} euros.",
    ),
    Tool(
        ("get_population", "population", "count_people", "inhabitants"),
        "Get the number of people of a city in thousands",
        {"city": city},
        ("how many people live in {city}", "what is the population of {city}", "how big is {city}"),
        {"thousands": _number(1, 999)},
        "{thousands} thousand people live in {city}.",
    ),
    Tool(
        ("add_contact", "save_contact", "new_contact", "store_number"),
        "Save the phone number of a person",
        {"name": name, "number": _number(100, 999)},
        ("save the number {number} for {name}", "{name} has the number {number}, save it", "add {name} with {number}"),
        {"status": _one_of(["saved", "stored"])},
        "The number of {name} is {status}.",
    ),
)
_REQUESTS = {
    tool.description: Wording(
        _OPENINGS, tool.requests, _CLOSINGS, phrasings=REQUESTS[tool.description], capitalised=True
    )
    for tool in TOOLS
}


# Requests for these are questions.
_ASKING = (
    "Get the weather in a city",
    "Translate a text into a language",
    "Get the share price of a company",
    "Search the web",
    "Find out where an object is",
    "Get the number of people of a city in thousands",
)
CANNOT = "I cannot do that. I am only a small demonstration model."


def _offer(conversation: Conversation, rng: Random, used: Tool | None, missing: Tool | None = None) -> str:
    """Offer one to four tools, `used` among them and `missing` not; -> the name under which it is offered."""
    others = [tool for tool in TOOLS if tool is not used and tool is not missing]
    offered = rng.sample(others, rng.randint(0 if used else 1, 3)) + ([used] if used else [])
    rng.shuffle(offered)
    names = {tool.description: rng.choice(tool.names) for tool in offered}
    conversation.tools = [tool.definition(names[tool.description]) for tool in offered]
    return names[used.description] if used else ""


def tool_call(rng: Random, split: Split) -> Conversation:
    """One request that one of the offered tools serves; one in eight needs none of them."""
    conversation = Conversation("tool call")
    if rng.random() < 1 / 8:
        _offer(conversation, rng, None)
        conversation.messages += rng.choice((addition, multiplication, greeting, unknown))(rng, split).messages
        return conversation
    tool = rng.choice(TOOLS)
    arguments = {key: drawn(rng, split) for key, drawn in tool.parameters.items()}
    called = _offer(conversation, rng, tool)
    request = _REQUESTS[tool.description].say(rng, split, **arguments)
    return conversation.user(request).call(called, arguments)


def tool_result(rng: Random, split: Split) -> Conversation:
    """A call, its result, and the answer made of both."""
    tool = rng.choice(TOOLS)
    conversation = Conversation("tool result")
    arguments = {key: drawn(rng, split) for key, drawn in tool.parameters.items()}
    result = {key: drawn(rng, split) for key, drawn in tool.result.items()}
    called = _offer(conversation, rng, tool)
    request = _REQUESTS[tool.description].say(rng, split, **arguments)
    conversation.user(request).call(called, arguments).tool_result(result)
    return conversation.assistant(tool.answer.format(**arguments, **result))


def no_tool(rng: Random, split: Split) -> Conversation:
    """A request that a tool would serve, where no tools are offered, or others."""
    conversation = Conversation("no tool")
    tool = rng.choice(TOOLS)
    arguments = {key: drawn(rng, split) for key, drawn in tool.parameters.items()}
    if rng.random() < 0.3:
        _offer(conversation, rng, None, missing=tool)
    conversation.user(_REQUESTS[tool.description].say(rng, split, **arguments))
    return conversation.assistant(UNKNOWN if tool.description in _ASKING else CANNOT)
