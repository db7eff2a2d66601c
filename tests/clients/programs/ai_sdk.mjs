// Two turns with a tool, streamed text and an object, through Chat Completions and through Responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const weather = tool({
  description: "Tells the weather",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});

for (const [kind, model] of [["chat", openai.chat("tiny")], ["responses", openai.responses("tiny")]]) {
  const messages = [{ role: "user", content: "weather?" }];
  const first = await generateText({ model, messages, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 });
  messages.push(...first.response.messages, { role: "user", content: "and tomorrow?" });
  const second = streamText({ model, messages, tools: { weather }, maxRetries: 0, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of second.textStream) text += piece;
  const schema = z.object({ city: z.string() });
  const { object } = await generateObject({ model, schema, prompt: "a city", maxRetries: 0 });
  console.log(JSON.stringify({ kind, first: first.text, steps: first.steps.length, second: text, object }));
}
