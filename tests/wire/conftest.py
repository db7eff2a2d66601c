"""Two servers that play what a test writes, shared by all tests, each with the official SDKs connected to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.sampling_params import SamplingParams
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import PATIENCE, ROOMY, TOOL_TEMPLATE, prompt_of

TEXT = "hello wörld 🙂"
# Like Qwen3's: a prompt may say that there is nothing to think about.
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


class Scripted:
    """A server whose model writes what it is told to.

    Attributes:
        engine: what the server asks; keeps every submission.
        openai, anthropic: the SDKs' clients, without retries.
        http: for what the SDKs hide.
    """

    def __init__(self, url: str, engine: FakeClient, stack: ExitStack) -> None:
        self.url = url
        self.engine = engine
        common: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        self.openai = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", **common))
        self.anthropic = stack.enter_context(anthropic.Anthropic(base_url=url, **common))
        self.http = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))

    def plays(self, outputs: Sequence[Any]) -> None:
        """Every answer to come is made of these outputs."""
        self.engine.script = always(outputs)
        self.engine.submissions.clear()

    def says(self, text: str, *, finish: str = "stop", **options: Any) -> None:
        """Every answer to come is this text, which the model ends itself unless it is cut."""
        ended = finish == "stop"
        token_ids = [*ids(text), 0] if ended else ids(text)
        self.plays(play(token_ids, finish=finish, stop_token_id=0 if ended else None, **options))

    @property
    def params(self) -> SamplingParams:
        return self.engine.submissions[-1].params

    @property
    def prompt(self) -> str:
        return prompt_of(self.engine)


@contextmanager
def scripted(settings: AppSettings) -> Iterator[Scripted]:
    engine = FakeClient(always([]), info=ROOMY)
    with serve(engine, settings) as url, ExitStack() as stack:
        yield Scripted(url, engine, stack)


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(settings_for(write_model_folder(tmp_path_factory.mktemp("wire") / "plain"))) as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = write_model_folder(tmp_path_factory.mktemp("wire") / "tool", template=TOOL_TEMPLATE + THINKING)
    with scripted(settings_for(folder)) as server:
        yield server


@pytest.fixture
def plain(plain_server: Scripted) -> Scripted:
    """A model whose template knows no tools and no thinking; it says TEXT."""
    plain_server.says(TEXT, num_cached_tokens=16)
    return plain_server


@pytest.fixture
def tool(tool_server: Scripted) -> Scripted:
    """A model that reasons and calls tools; it says TEXT."""
    tool_server.says(TEXT)
    return tool_server


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Scripted]:
    """A server that wants the key "right"; its SDK clients do not have it."""
    with scripted(settings_for(write_model_folder(tmp_path), api_keys=("right",))) as server:
        server.says(TEXT)
        yield server
