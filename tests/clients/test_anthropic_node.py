"""Anthropic's SDK for node: streams, tools in two turns, reasoning and its signature, counts, models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.node import PACKAGES, run_node
from tests.clients.scripted import call, scripted

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (PACKAGES / "@anthropic-ai" / "sdk").is_dir(),
    reason="make test-clients installs the packages",
)


def test_two_turns_with_a_tool(tmp_path: Path) -> None:
    replies = [f"<think>I ask.</think>Let me see.{call('weather', city='Köln')}", "<think>wet</think>Yes."]
    with scripted(tmp_path / "model", replies) as (url, model):
        seen = json.loads(run_node("anthropic_sdk.mjs", url, tmp_path))
    first, second = seen["first"], seen["second"]
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][0]["signature"]
    assert first["content"][2]["input"] == {"city": "Köln"}
    assert first["stop_reason"] == "tool_use"
    assert [block.get("text") for block in second["content"]] == [None, "Yes."]
    assert "<think>I ask.</think>Let me see." in model.prompts[-1]
    assert seen["counted"]["input_tokens"] == second["usage"]["input_tokens"]
    assert seen["models"] == ["tiny"]
    assert {"message_start", "content_block_start", "content_block_delta", "message_stop"} <= set(seen["kinds"])
