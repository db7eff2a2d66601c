"""What the fault tests share."""

from __future__ import annotations

import pytest

from tessera.app.settings import AppSettings
from tests.support.servers.surface_fixtures import tool_settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    return tool_settings(tmp_path_factory.mktemp("model"))
