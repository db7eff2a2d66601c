"""A chat request stays in few files of the app, so that its path can be read.

Limits take five of them, and models that come and go two.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.structure.request_path import BODY, app_files
from tests.support.servers.http_fixtures import settings_for, write_model_folder
from tests.support.servers.surface_fixtures import says

MAX_APP_FILES = 31


def test_a_chat_request_passes_through_few_files(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    found = asyncio.run(app_files(says("hello"), settings, {**BODY, "model": "tiny"}))
    own = [path for path in found if path.startswith("app/")]
    assert "app/openai/chat/routes.py" in own
    assert len(own) <= MAX_APP_FILES, "\n".join(own)
