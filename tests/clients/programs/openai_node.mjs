// OpenAI's client for JavaScript: its helpers for streams, tools and objects, chat and responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, report } from "./checks.mjs";

const openai = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const hello = [{ role: "user", content: "hello" }];
const shape = z.object({ city: z.string() });
const parameters = { type: "object", properties: { city: { type: "string" } } };

await check("chat", async () => (await openai.chat.completions.create({ model, messages: hello })).choices[0].message.content);
await check("run_tools", async () => {
  const weather = { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `rain in ${city}` };
  const messages = [{ role: "user", content: "weather?" }];
  const tools = [{ type: "function", function: weather }];
  return await openai.chat.completions.runTools({ model, stream: true, messages, tools }).finalContent();
});
await check("parse", async () => {
  const messages = [{ role: "user", content: "a city" }];
  const answer = await openai.chat.completions.parse({ model, messages, response_format: zodResponseFormat(shape, "city") });
  return answer.choices[0].message.parsed;
});
await check("responses_parse", async () => {
  const text = { format: zodTextFormat(shape, "city") };
  return (await openai.responses.parse({ model, input: "a city", text })).output_parsed;
});
await check("responses_stream", async () => {
  const first = await openai.responses.create({ model, input: "hello" });
  const stream = openai.responses.stream({ model, input: "hello", previous_response_id: first.id });
  return (await stream.finalResponse()).output_text;
});
await check("embeddings", async () => (await openai.embeddings.create({ model, input: "one" })).data[0].embedding);
await check("too_long", async () => {
  try {
    await openai.chat.completions.create({ model, messages: [{ role: "user", content: "x y ".repeat(200000) }] });
  } catch (error) {
    return [error.status, error.code];
  }
});
report();
