"""`tessera chat`: from its options to a conversation."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from tessera.app.cli.chat.answer import AnswerPrinter
from tessera.app.cli.chat.api import ChatServer, ServerError
from tessera.app.cli.chat.conversation import Conversation
from tessera.app.cli.chat.options import DEFAULT_URL, ChatOutputOptions, ChatServerOptions, ConversationOptions
from tessera.app.cli.chat.own_server import OwnServer
from tessera.app.cli.chat.session import COMMANDS, ChatSession
from tessera.app.cli.chat.style import Style
from tessera.app.cli.chat.terminal import Input, is_interactive
from tessera.app.cli.hub import builtin_model, find_model
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions

EXIT_FAILURE = 1


def chat_command(given: GivenOptions) -> int:
    """-> exit code: 0, or 1 where the server failed. Raises ConfigError: an option or the model cannot be used."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return _chat(given)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _chat(given: GivenOptions) -> int:
    begin = given.make(ConversationOptions)
    conversation = Conversation(begin.system, settings=dict(begin.set))
    if begin.load is not None:
        conversation.load(begin.load)
        conversation.system = begin.system or conversation.system
        conversation.settings |= dict(begin.set)
    style = Style()
    try:
        with _server(given.make(ChatServerOptions)) as (server, model):
            printer = AnswerPrinter(server, given.make(ChatOutputOptions), style)
            session = ChatSession(server, model, conversation, printer, style)
            if begin.prompt is not None or not is_interactive():
                session.ask(_question(begin.prompt))
                return 0
            style.note(f"{model} at {server.url}. /help lists commands, Ctrl-D ends.")
            with Input([f"/{name}" for name in COMMANDS], history=given.make(ChatOutputOptions).history) as input:
                session.run(input)
            return 0
    except ServerError as error:
        style.error(f"tessera chat: {error}")
        return EXIT_FAILURE


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # what is open is closed, a server of the chat's own too


def _question(prompt: str | None) -> str:
    """The prompt, and below it what comes through a pipe. Raises ConfigError where there is neither."""
    piped = "" if is_interactive() else sys.stdin.read()
    text = "\n\n".join(part for part in (prompt or "", piped.strip("\n")) if part)
    if not text.strip():
        raise ConfigError("chat: there is no question: give --prompt, or text through a pipe")
    return text


@contextmanager
def _server(options: ChatServerOptions) -> Iterator[tuple[ChatServer, str]]:
    """The server to talk to, and the model's name there."""
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = ({"authorization": f"Bearer {key}"} if key else {}) | dict(options.header)
    url = options.base_url
    if url is None and options.model is None and not options.server_args:
        probe = ChatServer(DEFAULT_URL, headers)
        url = DEFAULT_URL if probe.answers() else None
        probe.close()
    if url is not None:
        server = ChatServer(url, headers)
        yield server, options.model or _first_model(server)
        server.close()
        return
    found = find_model(options.model) if options.model is not None else builtin_model()
    console = Console(stderr=True)
    with console.status(f"starting {found.name}") as status:
        own = OwnServer(found, options.server_args, lambda line: status.update(f"starting {found.name}: {line}"))
        own.__enter__()
    try:
        server = ChatServer(own.url, {"authorization": f"Bearer {own.api_key}"})
        yield server, found.name
        server.close()
    finally:
        own.__exit__()


def _first_model(server: ChatServer) -> str:
    models = server.models()
    if not models:
        raise ServerError(f"{server.url} lists no model")
    return models[0]
