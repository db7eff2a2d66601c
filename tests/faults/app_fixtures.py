"""The app of the fault tests: a scripted engine that also embeds, and one request to it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from tessera.app.settings import AppSettings
from tessera.engine.contract.messages import EmbeddingInfo
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids
from tests.support.servers.surface_fixtures import ROOMY

EMBEDDING_INFO = EmbeddingInfo(
    role="main", architecture="Fake", pooling="last", dimension=8, vocab_size=512, max_input_tokens=16
)
INFO = msgspec.structs.replace(ROOMY, embeddings=(EMBEDDING_INFO,))


def post(settings: AppSettings, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a body, which may have NaN and numbers of any size; a refusal comes before the engine is asked."""
    client = FakeClient(always(play([*ids("ok"), 0], stop_token_id=0)), info=INFO)
    content = json.dumps({"model": "tiny", **body})
    response = call(client, settings, "POST", path, content=content, headers={"content-type": "application/json"})
    assert response.status_code < 400 or not client.submissions
    return response
