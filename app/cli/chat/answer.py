"""One answer on the terminal: reasoning dim, then the text, then figures."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from dataclasses import dataclass

from tessera.app.cli.chat.api import ChatServer, Figures
from tessera.app.cli.chat.conversation import Conversation
from tessera.app.cli.chat.options import ChatOutputOptions
from tessera.app.cli.chat.style import Style
from tessera.app.cli.chat.writer import StreamWriter

MIN_WIDTH = 20


@dataclass
class Answer:
    """The visible text, and whether Ctrl-C ended it."""

    text: str
    interrupted: bool


class AnswerPrinter:
    """Asks the server and prints what it answers."""

    def __init__(self, server: ChatServer, output: ChatOutputOptions, style: Style) -> None:
        self._server = server
        self._output = output
        self._style = style

    def ask(self, model: str, conversation: Conversation) -> Answer:
        """Stream the answer to a conversation; Ctrl-C ends it. Raises ServerError."""
        terminal = self._style.on_terminal
        columns = shutil.get_terminal_size().columns
        width = columns - 1 if terminal and self._output.wrap and columns >= MIN_WIDTH else None
        writer = StreamWriter(sys.stdout, width, styled=self._style.colours)
        figures, reasoned, interrupted = Figures(), False, False
        texts: list[str] = []
        pieces = self._server.stream(model, conversation.to_send(), conversation.settings, figures)
        try:
            with closing(pieces):
                for piece in pieces:
                    if piece.reasoning and terminal and self._output.reasoning:
                        writer.write(piece.reasoning, dim=True)
                        reasoned = True
                    if piece.text:
                        if reasoned and not texts:
                            writer.write("\n\n", dim=True)
                        texts.append(piece.text.lstrip("\n") if not texts else piece.text)
                        writer.write(texts[-1])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if texts or reasoned:
                writer.end()
        if terminal:
            self._print_figures(figures, interrupted=interrupted)
        return Answer("".join(texts), interrupted)

    def _print_figures(self, figures: Figures, *, interrupted: bool) -> None:
        notes = []
        if interrupted:
            notes.append("stopped")
        elif figures.finish_reason == "length":
            notes.append("cut off at the most tokens allowed (/set max_tokens)")
        if self._output.stats and figures.first is not None:
            rate = figures.tokens_per_second
            notes.append(f"{figures.output_tokens:,} tokens" + (f", {rate:.1f} tokens/s" if rate else ""))
            notes.append(f"first after {figures.first:.2f} s")
            if figures.prompt_tokens:
                cached = f", {figures.cached_tokens:,} cached" if figures.cached_tokens else ""
                notes.append(f"prompt {figures.prompt_tokens:,} tokens{cached}")
        if notes:
            self._style.note("; ".join(notes))
