// Two turns with a tool, streamed text and objects, through Chat Completions, Responses and Messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, report } from "./checks.mjs";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const weather = tool({
  description: "Tells the weather",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});
const models = { chat: openai.chat("tiny"), responses: openai.responses("tiny"), anthropic: anthropic("tiny") };

for (const [kind, model] of Object.entries(models)) {
  await check(`${kind}_two_turns`, async () => {
    const messages = [{ role: "user", content: "think, then the weather?" }];
    const first = await generateText({ model, messages, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 });
    messages.push(...first.response.messages, { role: "user", content: "hello" });
    const second = streamText({ model, messages, tools: { weather }, maxRetries: 0, onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const piece of second.textStream) text += piece;
    return [first.text, first.steps.length, text];
  });
  await check(`${kind}_object`, async () => {
    const schema = z.object({ city: z.string() });
    return (await generateObject({ model, schema, prompt: "a city", maxRetries: 0 })).object;
  });
}
await check("embeddings", async () => {
  const { embed } = await import("ai");
  return (await embed({ model: openai.embedding("tiny"), value: "one", maxRetries: 0 })).embedding;
});
report();
