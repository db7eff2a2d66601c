"""The options of `tessera chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from tessera.app.cli.chat.settings import parse_setting
from tessera.loadtest.options.server import parse_base_url, parse_header
from tessera.options.command_options import CommandOptions
from tessera.options.declaration import Option

SERVER = "server"
CHAT = "chat"
OUTPUT = "output"
DEFAULT_URL = "http://127.0.0.1:8000"


class ChatServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server to talk to."""

    model: Annotated[
        str | None,
        Option(
            "with --base-url the name that requests use; without it a hub id, folder or GGUF file, for which a server "
            "is started",
            group=SERVER,
            metavar="MODEL",
            positional=True,
            default=f"the model of the server at {DEFAULT_URL}; without one, the demonstration model",
        ),
    ] = None
    base_url: Annotated[
        str | None,
        Option(
            "a running server, any with an OpenAI API",
            group=SERVER,
            metavar="URL",
            parse=parse_base_url,
            default="none",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option("sent as bearer token", group=SERVER, metavar="KEY", secret=True, default="from OPENAI_API_KEY"),
    ] = None
    header: Annotated[
        tuple[tuple[str, str], ...],
        Option("of each request; repeatable", group=SERVER, metavar="NAME=VALUE", parse=parse_header, secret=True),
    ] = ()
    server_args: Annotated[
        str,
        Option(
            "options of `tessera serve` for the server that is started, as --server-args='--device cpu'",
            group=SERVER,
            metavar="OPTIONS",
            default="none",
        ),
    ] = ""


class ConversationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of the conversation."""

    prompt: Annotated[
        str | None,
        Option("ask this, print the answer and end", group=CHAT, metavar="TEXT", default="none, a conversation"),
    ] = None
    system: Annotated[str | None, Option("system prompt", group=CHAT, metavar="TEXT", default="none")] = None
    set: Annotated[
        tuple[tuple[str, Any], ...],
        Option(
            "field of each request, such as temperature=0.6; repeatable",
            group=CHAT,
            metavar="NAME=VALUE",
            parse=parse_setting,
        ),
    ] = ()
    load: Annotated[
        Path | None, Option("go on with a conversation that /save wrote", group=CHAT, metavar="FILE", default="none")
    ] = None


class ChatOutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of answers that the terminal shows."""

    reasoning: Annotated[bool, Option("show the model's reasoning, on a terminal", group=OUTPUT)] = True
    stats: Annotated[bool, Option("show tokens and their rate after each answer, on a terminal", group=OUTPUT)] = True
    wrap: Annotated[bool, Option("break lines between words, on a terminal", group=OUTPUT)] = True
    history: Annotated[bool, Option("keep what is typed for the arrow keys of later chats", group=OUTPUT)] = True


CHAT_OPTIONS = CommandOptions(
    "TESSERA_CHAT_",
    (ChatServerOptions, ConversationOptions, ChatOutputOptions),
    groups=(SERVER, CHAT, OUTPUT, "configuration"),
)
