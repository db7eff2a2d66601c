"""A headless Chromium for tests of pages, spoken to over a pipe in the DevTools protocol.

It is no dependency of the project: `TESSERA_BROWSER`, or the first of the usual names on the PATH.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
DEADLINE = 30.0  # seconds; only a failing test waits this long
# Chromium reads commands from descriptor 3 and writes to 4.
LAUNCH = """
import os, sys
_, commands, events, *program = sys.argv
os.dup2(int(commands), 3)
os.dup2(int(events), 4)
os.execv(program[0], program)
"""


def find_browser() -> str:
    """The program's path; skips the test where there is none."""
    found = os.environ.get("TESSERA_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip(f"no browser is installed: neither TESSERA_BROWSER nor one of {', '.join(NAMES)}")
    return found


class Page:
    """One tab.

    Attributes:
        faults: exceptions, error lines of the console and refusals of the content security policy, as they came.
    """

    def __init__(self, commands: int, events: int) -> None:
        self.faults: list[str] = []
        self._commands = commands
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._number = 0
        self._session: str | None = None
        threading.Thread(target=self._read, args=(events,), daemon=True).start()
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._answers, DEADLINE), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + DEADLINE
        pause = threading.Event()
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"waited in vain for {condition}; {self.faults}"
            pause.wait(0.01)

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector: str, text: str) -> None:
        """Put the cursor there and write as a keyboard does."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def press_enter(self) -> None:
        self.press("Enter", text="\r")

    def press(
        self, key: str, code: str | None = None, *, text: str = "", alt: bool = False, control: bool = False
    ) -> None:
        """Press a key that is called so in `KeyboardEvent.key`, and let it go."""
        numbers = {"Enter": 13, "Escape": 27, "ArrowUp": 38}
        number = numbers.get(key, ord(key.upper()) if len(key) == 1 else 0)
        event = {"key": key, "code": code or key, "windowsVirtualKeyCode": number, "modifiers": alt + 2 * control}
        self.command("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int, *, dark: bool = False, scale: float = 1, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path, *, whole_page: bool = False) -> None:
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _read(self, events: int) -> None:
        rest = b""
        while piece := os.read(events, 65536):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = message
                self._arrived.notify_all()
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"]["text"])


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, which ends with the block; `profile` is an empty folder."""
    program = find_browser()
    to_browser, from_browser = os.pipe(), os.pipe()
    options = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(to_browser[0]), str(from_browser[1]), program, *options],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
