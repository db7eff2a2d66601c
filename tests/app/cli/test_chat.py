"""`tessera chat`: its parts, and whole chats against a server that answers as it is told."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.chat import own_server
from tessera.app.cli.chat.own_server import OwnServer
from tessera.app.cli.chat.settings import setting
from tessera.app.cli.chat.writer import StreamWriter
from tessera.app.cli.command import main
from tessera.app.cli.hub import ModelFolder
from tessera.engine.contract.errors import ConfigError
from tessera.options.errors import OptionError
from tests.support.fakes.chat_stub import ChatStub
from tests.support.paths import ROOT

DEADLINE = 30.0  # seconds; only a failing test waits this long


@pytest.fixture
def server() -> Iterator[ChatStub]:
    with ChatStub() as stub:
        yield stub


@pytest.fixture
def ask(server: ChatStub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """(piped text, options) -> exit code of a chat without a terminal."""

    def run(piped: str, *options: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        return main(["chat", "--base-url", server.url, *options])

    return run


def test_a_piped_question_is_answered_plainly(
    ask: Callable[..., int], server: ChatStub, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer(["\n", "Par", "is\x1b[31m."], reasoning=["I ", "know"])
    options = ("--system", "Be kind", "--set", "temperature=0.5", "--set", 'stop=["x"]', "--header", "x-a=b")
    assert ask("the capital?\n", *options, "--api-key", "k", "--prompt", "Name") == 0
    assert capsys.readouterr().out == "Paris[31m.\n"
    (request,) = server.requests
    assert request.body["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Name\n\nthe capital?"},
    ]
    assert (request.body["temperature"], request.body["stop"], request.body["stream"]) == (0.5, ["x"], True)
    assert (request.body["model"], request.headers["authorization"], request.headers["x-a"]) == ("one", "Bearer k", "b")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            (401, {"error": {"message": "no key"}}),
            "no key (give the key with --api-key or OPENAI_API_KEY) [status 401]",
        ),
        ((404, {"detail": "x"}), '{"detail": "x"} [status 404]'),
        ((200, {"error": {"message": "the engine broke"}}), "the engine broke"),
        ((200, [1]), "the server sent what is no part of a completion: '[1]'"),
    ],
)
def test_a_failure_is_one_sentence(
    ask: Callable[..., int], server: ChatStub, capsys: pytest.CaptureFixture[str], fault: Any, sentence: str
) -> None:
    server.fail(*fault)
    assert ask("hi") == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"tessera chat: {sentence}\n")


def test_wrong_options_and_no_question(
    ask: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(" \n") == 2
    assert "there is no question" in capsys.readouterr().err
    (tmp_path / "c.json").write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    assert ask("hi", "--load", str(tmp_path / "c.json")) == 2
    assert 'must have "messages" of the roles system, user and assistant' in capsys.readouterr().err
    for name, value, message in (
        ("temprature", "1", "there is no field 'temprature'; did you mean temperature?"),
        ("messages", "[]", "'messages' cannot be set"),
        ("a b", "1", "'a b' cannot be set"),
    ):
        with pytest.raises(OptionError, match=re.escape(message)):
            setting(name, value)
    assert setting("top-k", " 5") == ("top_k", 5)
    assert setting("stop", "END") == ("stop", "END")


def written(text: str, width: int | None, pieces: int = 3) -> str:
    stream = io.StringIO()
    writer = StreamWriter(stream, width, styled=True)
    for place in range(0, len(text), pieces):
        writer.write(text[place : place + pieces])
    writer.end()
    return stream.getvalue()


def test_lines_break_between_words_but_not_in_code() -> None:
    assert written("one two three four\n\nfive", 9) == "one two\nthree\nfour\n\nfive\n"
    assert written("abcdefghijklmnop q", 9) == "abcdefghijklmnop\nq\n"
    code = "```\nx = 1 + 2 + 3 + 4\n```\n"
    assert written(code + "aa bb cc dd", 9) == code + "aa bb cc\ndd\n"
    assert written("漢字 漢字 漢字", 9) == "漢字 漢字\n漢字\n"
    assert written("one two three", None) == "one two three\n"


def test_a_model_cannot_move_the_cursor() -> None:
    assert written("a\x1b[2J\x07\r\x9bb\tc", 40) == "a[2Jb\tc\n"


class Terminal:
    """`tessera chat` on a terminal of 80 columns."""

    def __init__(self, url: str, folder: Path) -> None:
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(folder), "PYTHONPATH": str(ROOT)}
        environment.pop("NO_COLOR", None)
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "tessera", "chat", "--base-url", url]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> str:
        """What was shown since the last time, up to and with `text`."""
        end = time.monotonic() + DEADLINE
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited in vain for {text!r}: {self.shown!r}"
            self.shown += os.read(self.master, 65536).decode()
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal, which shells have jobs ignore."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


PROMPT = ">>> "


def test_a_chat_on_a_terminal(server: ChatStub, tmp_path: Path) -> None:
    """Reasoning is dim, figures follow; Ctrl-C ends the answer alone; commands; the conversation is saved."""
    terminal = Terminal(server.url, tmp_path)
    try:
        assert "one at http://127.0.0.1" in terminal.until(PROMPT)
        server.answer(["Hello", " there"], reasoning=["hm"])
        terminal.send("hi\n")
        shown = terminal.until(PROMPT)
        assert "\x1b[2mhm" in shown
        assert re.search(r"\x1b\[0m\S*Hello there", shown.replace("\r", "").replace("\n", ""))
        assert re.search(r"3 tokens, [\d.]+ tokens/s; first after [\d.]+ s; prompt 7 tokens, 4 cached", shown)

        server.answer(["Never", " ending"], hang=True)
        terminal.send('"""\na\nb"""\n')
        terminal.until("Never")
        terminal.send("\x03")
        assert "stopped" in terminal.until(PROMPT)
        assert server.requests[-1].body["messages"][-1]["content"] == "a\nb"
        assert server.gone.wait(DEADLINE), "the request is ended too"

        terminal.send("/sve\n")
        assert "there is no command /sve; did you mean /save?" in terminal.until(PROMPT)
        terminal.send("/model two\n")
        assert "two answers from now on." in terminal.until(PROMPT)
        terminal.send("/set temperature 0.5\n/system Be brief\n/undo\n/save chat.json\n")
        terminal.until("Saved in chat.json.")
        saved = json.loads((tmp_path / "chat.json").read_text())
        assert saved["settings"] == {"temperature": 0.5}
        assert [message["content"] for message in saved["messages"]] == ["Be brief", "hi", "Hello there"]

        terminal.until(PROMPT)
        server.answer(["again"])
        terminal.send("/retry\n")
        terminal.until("again")
        request = server.requests[-1].body
        assert (request["model"], request["temperature"]) == ("two", 0.5)
        assert [message["content"] for message in request["messages"]] == ["Be brief", "hi"]
        terminal.until(PROMPT)
        terminal.send("\x04")
        assert terminal.process.wait(DEADLINE) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
    history = tmp_path / "tessera" / "chat_history"
    assert "hi\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_server_of_its_own_ends_with_the_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import os, sys, time\nprint('loading', file=sys.stderr)\n"
        "assert os.environ['TESSERA_API_KEY']\n"
        "print('Ready on http://127.0.0.1:1  Try:', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    lines: list[str] = []
    own = OwnServer(ModelFolder(tmp_path, "name"), "--device cpu", lines.append)
    assert own._command[-2:] == ["--device", "cpu"]
    own._command = [sys.executable, str(script)]
    with own:
        assert own.url == "http://127.0.0.1:1"
        process = own._process
        assert process.poll() is None
    assert lines == ["loading"]
    assert process.poll() is not None
    script.write_text("import sys\nsys.exit('tessera: there is no room')\n")
    with pytest.raises(ConfigError, match="the server for the chat does not start: there is no room"), own:
        pass
    with pytest.raises(ConfigError, match="--server-args: No closing quotation"):
        OwnServer(ModelFolder(tmp_path, "name"), "'", print)
    assert own_server.STOP_SECONDS > 1
