// Ollama's client for JavaScript: chat, generate, tools, thinking, objects, embeddings, models, errors.
import { Ollama } from "ollama";
import { check, report } from "./checks.mjs";

const ollama = new Ollama({ host: process.argv[2] });
const hello = [{ role: "user", content: "hello" }];
const ask = [{ role: "user", content: "weather?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "It.", parameters } }];

await check("chat", async () => (await ollama.chat({ model: "tiny", messages: hello })).message.content);
await check("chat_stream", async () => {
  let text = "";
  for await (const part of await ollama.chat({ model: "tiny", messages: hello, stream: true })) text += part.message.content;
  return text;
});
await check("tools", async () => {
  const { message } = await ollama.chat({ model: "tiny", messages: ask, tools });
  const call = message.tool_calls[0].function;
  const result = { role: "tool", tool_name: call.name, content: "rain" };
  const second = await ollama.chat({ model: "tiny", messages: [...ask, message, result], tools });
  return [call.name, call.arguments, second.message.content];
});
await check("thinking", async () => {
  const { message } = await ollama.chat({ model: "tiny", messages: [{ role: "user", content: "think" }], think: "high" });
  return [message.thinking, message.content];
});
await check("object", async () => {
  const messages = [{ role: "user", content: "a city" }];
  return JSON.parse((await ollama.chat({ model: "tiny", messages, format: parameters })).message.content);
});
await check("generate", async () => (await ollama.generate({ model: "tiny", prompt: "hello" })).response);
await check("embeddings", async () => (await ollama.embed({ model: "tiny", input: "one" })).embeddings);
await check("models", async () => [
  (await ollama.list()).models.map((model) => model.name),
  (await ollama.show({ model: "tiny" })).capabilities,
]);
await check("errors", async () => {
  try {
    await ollama.chat({ model: "other", messages: hello });
  } catch (error) {
    return [error.name, error.message];
  }
});
report();
