"""Anthropic's SDK for node: answers, streams, tools in two turns, reasoning and its signature, counts, models."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.npm_clients import FOLDER, ScriptedModel, package, run, tool_call

SCRIPT = """
import Anthropic from '@anthropic-ai/sdk';
const api = new Anthropic({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const tools = [{ name: 'weather', description: 'Tells it', input_schema: { type: 'object', properties: {} } }];
const ask = { model: 'tiny', max_tokens: 64000, tools, thinking: { type: 'enabled', budget_tokens: 2048 } };
const messages = [{ role: 'user', content: 'Is it raining?' }];
const kinds = [];
const stream = api.messages.stream({ ...ask, messages }).on('streamEvent', (event) => kinds.push(event.type));
const first = await stream.finalMessage();
const call = first.content.find((block) => block.type === 'tool_use');
messages.push({ role: 'assistant', content: first.content });
messages.push({ role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: 'rain' }] });
const second = await api.messages.create({ ...ask, max_tokens: 100, messages });
const counted = await api.messages.countTokens({ model: 'tiny', messages, tools });
const models = [];
for await (const model of api.models.list()) models.push(model.id);
console.log(JSON.stringify({ first, second, kinds: [...new Set(kinds)], counted, models }));
"""


def test_two_turns_with_a_tool(tmp_path: Path) -> None:
    package("@anthropic-ai/sdk")
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "node_modules").symlink_to(FOLDER / "node_modules")
    (folder / "script.mjs").write_text(SCRIPT)

    def write(prompt: str) -> str:
        if "<|im_start|>tool\n" in prompt:
            return "<think>wet</think>Yes."
        return f"<think>I ask.</think>Let me see.{tool_call('weather', city='Köln')}"

    with ScriptedModel().serve(tmp_path / "model", write) as model:
        seen = json.loads(run(["node", "script.mjs", model.url], folder, {}))
    assert [block["type"] for block in seen["first"]["content"]] == ["thinking", "text", "tool_use"]
    assert seen["first"]["content"][0]["signature"]
    assert seen["first"]["stop_reason"] == "tool_use"
    assert [block.get("text") for block in seen["second"]["content"]] == [None, "Yes."]
    assert "<think>I ask.</think>Let me see." in model.prompts[-1]
    assert seen["counted"]["input_tokens"] == seen["second"]["usage"]["input_tokens"]
    assert seen["models"] == ["tiny"]
    assert {"message_start", "content_block_start", "content_block_delta", "message_stop"} <= set(seen["kinds"])
