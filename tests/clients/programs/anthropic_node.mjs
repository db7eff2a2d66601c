// Anthropic's client for JavaScript: streams, two turns with a tool and reasoning, a count, models, errors.
import Anthropic from "@anthropic-ai/sdk";
import { check, report } from "./checks.mjs";

const api = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const hello = [{ role: "user", content: "hello" }];
const input_schema = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ name: "weather", description: "Tells it", input_schema }];
const ask = { model: "tiny", max_tokens: 8192, thinking: { type: "enabled", budget_tokens: 2048 } };

await check("create", async () => (await api.messages.create({ ...ask, messages: hello })).content[0].text);
await check("stream", async () => {
  const kinds = new Set();
  const messages = [{ role: "user", content: "think" }];
  const stream = api.messages.stream({ ...ask, max_tokens: 64000, messages }).on("streamEvent", (event) => kinds.add(event.type));
  const { content } = await stream.finalMessage();
  return [content.map((block) => block.type), Boolean(content[0].signature), kinds.has("content_block_delta")];
});
await check("tools", async () => {
  const messages = [{ role: "user", content: "weather?" }];
  const first = await api.messages.create({ ...ask, tools, messages });
  const call = first.content.find((block) => block.type === "tool_use");
  messages.push({ role: "assistant", content: first.content });
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "rain" }] });
  const second = await api.messages.create({ ...ask, tools, messages });
  return [call.input, second.content[0].text];
});
await check("count_tokens", async () => {
  const counted = await api.messages.countTokens({ model: "tiny", messages: hello, tools });
  const answer = await api.messages.create({ ...ask, messages: hello, tools });
  return counted.input_tokens === answer.usage.input_tokens;
});
await check("models", async () => {
  const models = [];
  for await (const model of api.models.list()) models.push(model.id);
  return models;
});
await check("too_long", async () => {
  try {
    await api.messages.create({ ...ask, messages: [{ role: "user", content: "x y ".repeat(200000) }] });
  } catch (error) {
    return [error.status, error.message.includes("prompt is too long")];
  }
});
report();
