"""Pictures of the terminal: `python -m tests.page.terminal_pictures` writes docs/images/terminal-*.png.

A chat with the demonstration model, and a load test of a simulated server, each in a terminal of its own.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from tests.support.fakes.load_stub import Manner, StubServer
from tests.support.paths import ROOT
from tests.support.servers.browser import Page, browser_page
from tests.support.servers.server_fixture import running_server

FOLDER = ROOT / "docs" / "images"
COLUMNS, ROWS = 80, 40
PROMPT = ">>> "
QUESTIONS = ("/system You are a calculator.", "What is 357 + 468?", "And 825 - 468?", "/help")
SIZE = (720, 400)  # pixels; pictures are as high as what they show
COLOURS = {"31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "magenta", "36": "cyan"}
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b2430; --dim: #5d6878; --rule: #d5dae2; --red: #b3261e;
  --green: #17703f; --yellow: #7a5500; --blue: #1c55c4; --magenta: #8a3fa0; --cyan: #0b6b7d; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161d; --ink: #e7ebf0; --dim: #98a5b6; --rule: #2b3440;
  --red: #ff8a84; --green: #66d49a; --yellow: #e3bd5c; --blue: #85b1ff; --magenta: #d9a2ea; --cyan: #6fd0e3; } }
body { margin: 0; background: var(--ground); color: var(--ink); }
pre { margin: 0; padding: 16px 20px; border: 1px solid var(--rule);
  font: 14px/1.45 "DejaVu Sans Mono", ui-monospace, monospace; }
.dim { color: var(--dim); } .bold { font-weight: 700; }
"""


def run_in_terminal(command: list[str], lines: tuple[str, ...] = ()) -> str:
    """Output of a command of `tessera`; each prompt gets the next line, the last one the end of the input."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera", *command],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    output, answered, pending = "", 0, [*(f"{line}\n" for line in lines), "\x04"]
    while piece := _read(leader):
        output += piece
        if output.count(PROMPT) > answered and pending:
            answered += 1
            os.write(leader, pending.pop(0).encode())
    assert process.wait() == 0, output
    os.close(leader)
    return output


def _read(leader: int) -> str:
    try:
        return os.read(leader, 65536).decode(errors="replace")
    except OSError:  # the other side is closed
        return ""


def as_html(output: str) -> str:
    """Coloured text of a terminal; other control sequences than those of colours have no effect."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-HJ-ln-zA-Z]", "", output.replace("\r\n", "\n"))
    styles: set[str] = set()
    parts: list[str] = []
    for index, piece in enumerate(re.split(r"\x1b\[([0-9;]*)m", text)):
        if index % 2 == 0:
            parts.append(f'<span class="{" ".join(sorted(styles))}">{html.escape(piece)}</span>' if piece else "")
            continue
        for code in piece.split(";"):
            if code in ("", "0"):
                styles.clear()
            elif code in ("1", "2"):
                styles.add("bold" if code == "1" else "dim")
            elif code in COLOURS:
                styles.add(COLOURS[code])
    rules = "".join(f".{name} {{ color: var(--{name}); }}" for name in COLOURS.values())
    head = f"<!doctype html><meta charset=utf-8><title>Terminal</title><style>{STYLE}{rules}</style>"
    return f"{head}<pre>{''.join(parts)}"


def show(page: Page, output: str, name: str, folder: Path) -> None:
    file = folder / f"{name}.html"
    file.write_text(as_html(output.strip("\r\n")))
    for theme in ("light", "dark"):
        page.resize(*SIZE, dark=theme == "dark")
        page.open(file.as_uri())
        height = int(page.evaluate("Math.ceil(document.querySelector('pre').getBoundingClientRect().height)"))
        page.resize(SIZE[0], height, dark=theme == "dark")
        page.screenshot(FOLDER / f"{name}-{theme}.png")


def chat(folder: Path) -> str:
    with running_server(None, folder / "log") as server:
        command = ["chat", "--base-url", server.url, "--no-history", "--set", "temperature=0"]
        said = run_in_terminal(command, QUESTIONS).replace(server.url, "http://127.0.0.1:8000")
        return f"$ tessera chat\n{said}"


def load_test() -> str:
    options = "--num-prompts 512 --max-concurrency 32 --output-len 48", "--goodput ttft:250 tpot:25"
    with StubServer(lambda _index, _body: Manner(ttft=0.12, tpot=0.012)) as server:
        server.cached_tokens = 0
        said = run_in_terminal(["bench", "--base-url", server.url, "--no-progress", *" ".join(options).split()])
        return "$ tessera bench " + " \\\n    ".join(options) + f"\n{said}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name, browser_page(Path(tempfile.mkdtemp())) as page:
        folder = Path(name)
        show(page, chat(folder), "terminal-chat", folder)
        show(page, load_test(), "terminal-bench", folder)


if __name__ == "__main__":
    main()
