"""A tiny model folder with a real byte-level tokenizer, and the app over HTTP in two ways."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import httpx
import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tessera.app.engines.engines import Engines
from tessera.app.server.application import create_app
from tessera.app.server.http_server import HttpServer
from tessera.app.settings import AppSettings
from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.engine.ipc.client import EngineClient
from tests.support.fakes.fake_client import FakeClient

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, a few merges, and two special tokens; ids 0 and 1 are the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o")]
    tokens = [END, "<|im_start|>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken("<|im_start|>", special=True)])
    return tokenizer


TOKENIZER = byte_level_tokenizer()

# Starting a rendering process takes ten times as long as a request.
MAX_TEMPLATES = 8
_TEMPLATES: dict[tuple[tuple[tuple[str, str], ...], ...], ChatTemplate] = {}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def write_model_folder(folder: Path, *, template: str | None = TEMPLATE, **generation_config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": END, "bos_token": None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation_config:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def settings_for(folder: Path, **changes: Any) -> AppSettings:
    return AppSettings(**{"model_folder": str(folder), "served_model_names": ("tiny",), **changes})


def as_engines(*clients: FakeClient) -> Engines:
    """The application uses no more of a client than a fake has."""
    return Engines.of_clients(*(cast(EngineClient, client) for client in clients))


class SharedTemplate(ChatTemplate):
    """Keeps its rendering processes when an application ends."""

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def shared_template(folder: Path, override: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """In the place of `load_chat_template`."""
    template = load_chat_template(folder, override, special_tokens)
    if template is None:
        return None
    made_from = tuple(template.sources.items()), tuple(special_tokens.items())
    if made_from not in _TEMPLATES:
        if len(_TEMPLATES) == MAX_TEMPLATES:
            del _TEMPLATES[next(iter(_TEMPLATES))]
        _TEMPLATES[made_from] = SharedTemplate(template.sources, special_tokens)
    return _TEMPLATES[made_from]


def sharing_templates() -> AbstractContextManager[object]:
    """Applications made meanwhile share rendering processes with others of the same chat template."""
    return patch("tessera.app.generate.served_model.load_chat_template", shared_template)


def call(client: FakeClient, settings: AppSettings, method: str, path: str, **options: Any) -> httpx.Response:
    """One request without sockets. Streamed answers come whole: use `serve` to see them flow."""
    (response,) = call_each(client, settings, [(method, path)], **options)
    return response


def call_each(
    client: FakeClient, settings: AppSettings, requests: Iterable[tuple[str, str]], **options: Any
) -> list[httpx.Response]:
    """Requests without sockets to one application, one after another: methods and paths."""

    async def send() -> list[httpx.Response]:
        with sharing_templates():
            app = create_app(as_engines(client), settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
            return [await http.request(method, path, **options) for method, path in requests]

    return asyncio.run(send())


@contextmanager
def serve(client: FakeClient, settings: AppSettings, *, drain_timeout: int = 5) -> Iterator[str]:
    """A real server on a free port of the loopback, in a thread; yields its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    with sharing_templates():
        server = HttpServer(as_engines(client), settings, drain_timeout=drain_timeout)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(timeout=20)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def events(body: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events, checked for form; without the [DONE], which must be last."""
    assert body.endswith(b"\n\n")
    blocks = body[:-2].split(b"\n\n")
    assert all(block.startswith(b"data: ") for block in blocks)
    assert blocks[-1] == b"data: [DONE]"
    return [orjson.loads(block[6:]) for block in blocks[:-1]]
