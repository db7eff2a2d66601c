"""Every snippet of docs/clients.md, in its order, with the address and the model of the server that is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, HERE
from tests.clients.replies import REPLIES, by_prompt, dspy_reply
from tests.clients.run import TIMEOUT, environment, run
from tests.clients.scripted import MODEL, scripted
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()
SNIPPET = re.compile(
    r"^<!-- client: (?P<name>[^;\n]+?)(?:; file: (?P<file>\S+))? -->\n```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
SNIPPETS = [match.groupdict() for match in SNIPPET.finditer(PAGE)]
COMMANDS = {
    "sh": lambda name, code: ["bash", "-euc", code],
    "python": lambda name, code: [CLIENTS[name].python, "-c", code],
    "js": lambda name, code: ["node", "--input-type=module", "--eval", code],
}


def reply(prompt: str) -> str:
    if "[[ ## " in prompt:
        return dspy_reply(prompt)
    return by_prompt(prompt, {"Name a city": REPLIES["a city"]})


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.client(name)) for name in CLIENTS])
def test_snippets_work(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    client = CLIENTS[name]
    path = {"PATH": f"{client.python.parent}:{environment(home)['PATH']}"} if client.environment is not None else {}
    with scripted(tmp_path / "model", reply) as (url, model):
        for snippet in [snippet for snippet in SNIPPETS if snippet["name"] == name]:
            code = snippet["code"].replace("http://127.0.0.1:8000", url).replace("tessera-builtin", MODEL)
            if snippet["file"] is not None:
                file = home / snippet["file"]
                file.parent.mkdir(parents=True)
                file.write_text(code)
                continue
            folder = HERE if snippet["language"] == "js" else tmp_path
            asked = len(model.prompts)
            command = COMMANDS[snippet["language"]](name, code)
            done = run(command, folder, home, MODEL_FOLDER=str(tmp_path / "model"), **path)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            assert done.stdout.strip(), "it says something"
            assert len(model.prompts) > asked
    assert name in [snippet["name"] for snippet in SNIPPETS], "docs/clients.md tells of it"
