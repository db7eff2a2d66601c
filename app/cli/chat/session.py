"""A chat: questions, answers, and the commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tessera.app.cli.chat.answer import AnswerPrinter
from tessera.app.cli.chat.api import ChatServer, ServerError
from tessera.app.cli.chat.conversation import Conversation
from tessera.app.cli.chat.settings import setting
from tessera.app.cli.chat.style import Style
from tessera.app.cli.chat.terminal import Input
from tessera.app.cli.chat.writer import CONTROL
from tessera.engine.contract.errors import ConfigError
from tessera.options.errors import OptionError
from tessera.options.suggestions import did_you_mean


class Slash(NamedTuple):
    """A command: its arguments and purpose for /help, and what runs it."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], None]


class EndOfChat(Exception):
    """The user has asked for the end."""


class ChatSession:
    """One conversation with one server."""

    def __init__(
        self, server: ChatServer, model: str, conversation: Conversation, printer: AnswerPrinter, style: Style
    ) -> None:
        self._server = server
        self._model = model
        self._conversation = conversation
        self._printer = printer
        self._style = style

    def run(self, input: Input) -> None:
        """Until Ctrl-D or /exit."""
        while True:
            try:
                text = input.read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self._style.note("Ctrl-D or /exit ends the chat.")
                continue
            try:
                self.take(text)
            except EndOfChat:
                return
            except (ServerError, ConfigError, OptionError) as error:
                self._style.error(str(error))

    def take(self, text: str) -> None:
        """A message or a command. Raises EndOfChat, ServerError, ConfigError, OptionError."""
        if not text.strip():
            return
        if not text.startswith("/"):
            self.ask(text)
            return
        name, _, argument = text[1:].partition(" ")
        if name not in COMMANDS:
            hint = did_you_mean(f"/{name}", [f"/{known}" for known in COMMANDS])
            raise OptionError(f"there is no command /{name}{hint or '; /help lists them'}")
        COMMANDS[name].run(self, argument.strip())

    def ask(self, text: str) -> None:
        """Send a message and print the answer; without an answer the message is taken back. Raises ServerError."""
        self._conversation.messages.append({"role": "user", "content": text})
        answered = False
        try:
            answer = self._printer.ask(self._model, self._conversation)
            answered = bool(answer.text) or not answer.interrupted
            if answered:
                self._conversation.messages.append({"role": "assistant", "content": answer.text})
        finally:
            if not answered:
                self._conversation.messages.pop()

    # -- commands --------------------------------------------------------------------------------------------------

    def show_help(self, _argument: str) -> None:
        width = max(len(f"/{name} {command.usage}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            print(f"  {f'/{name} {command.usage}':<{width}}  {command.help}")
        print('\nSeveral lines are one message between """ and """, or with \\ at their ends.')
        print("Ctrl-C ends an answer, Ctrl-D the chat.")

    def set_system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "none" else text.strip('"')
            self._style.note("The system prompt is removed." if text == "none" else "The system prompt is set.")
        else:
            print(self._conversation.system or "There is no system prompt.")

    def reset(self, _argument: str) -> None:
        self._conversation.messages.clear()
        self._style.note("A new conversation; the system prompt and settings stay.")

    def undo(self, _argument: str) -> None:
        if self._conversation.take_back() is None:
            raise OptionError("there is nothing to take back")
        self._style.note("The last question and its answer are taken back.")

    def retry(self, _argument: str) -> None:
        before = list(self._conversation.messages)
        question = self._conversation.take_back()
        if question is None:
            raise OptionError("there is no question to ask again")
        try:
            self.ask(question)
        except ServerError:
            self._conversation.messages = before
            raise

    def save(self, path: str) -> None:
        if not path:
            raise OptionError("/save needs the name of a file")
        self._conversation.save(Path(path).expanduser())
        self._style.note(f"Saved in {path}.")

    def load(self, path: str) -> None:
        if not path:
            raise OptionError("/load needs the name of a file")
        self._conversation.load(Path(path).expanduser())
        self._style.note(f"Loaded {len(self._conversation.messages)} messages.")

    def choose_model(self, name: str) -> None:
        models = self._server.models()
        if not name:
            for model in models:
                print(f"{'*' if model == self._model else ' '} {CONTROL.sub('', model)}")
            return
        if name not in models:
            raise OptionError(f"the server has no model {name}{did_you_mean(name, models)}; /model lists them")
        self._model = name
        self._style.note(f"{name} answers from now on.")

    def set_field(self, text: str) -> None:
        settings = self._conversation.settings
        if not text:
            for name, value in settings.items():
                print(f"{name} = {json.dumps(value, ensure_ascii=False)}")
            if not settings:
                print("Nothing is set: the server's defaults hold. /set temperature 0.6 sets a field of requests.")
            return
        name, separator, value = text.partition("=" if "=" in text.partition(" ")[0] else " ")
        if not separator:
            settings.pop(name.replace("-", "_"), None)
            self._style.note(f"{name} is as the server has it.")
            return
        name, parsed = setting(name, value)
        settings[name] = parsed
        self._style.note(f"{name} = {json.dumps(parsed, ensure_ascii=False)}")

    def end(self, _argument: str) -> None:
        raise EndOfChat


COMMANDS: dict[str, Slash] = {
    "help": Slash("", "show this", ChatSession.show_help),
    "system": Slash("[TEXT]", "show or set the system prompt; none removes it", ChatSession.set_system),
    "set": Slash("[NAME [VALUE]]", "show, set or unset fields such as temperature", ChatSession.set_field),
    "model": Slash("[NAME]", "list the server's models, or change to one", ChatSession.choose_model),
    "retry": Slash("", "ask the last question again", ChatSession.retry),
    "undo": Slash("", "take the last question and its answer back", ChatSession.undo),
    "reset": Slash("", "begin a new conversation", ChatSession.reset),
    "save": Slash("FILE", "write the conversation to a file", ChatSession.save),
    "load": Slash("FILE", "go on with a saved conversation", ChatSession.load),
    "exit": Slash("", "end the chat", ChatSession.end),
}
