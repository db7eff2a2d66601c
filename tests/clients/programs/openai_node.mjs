// OpenAI's client for JavaScript: its helpers for streams, tools and objects.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const openai = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "weather?" }];
const runner = openai.chat.completions.runTools({
  model: "tiny",
  stream: true,
  messages,
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parameters: { type: "object", properties: { city: { type: "string" } } },
        parse: JSON.parse,
        function: ({ city }) => `rain in ${city}`,
      },
    },
  ],
});
const told = await runner.finalContent();
const shape = z.object({ city: z.string() });
const parsed = await openai.chat.completions.parse({
  model: "tiny",
  messages,
  response_format: zodResponseFormat(shape, "city"),
});
const response = await openai.responses.parse({ model: "tiny", input: "a city", text: { format: zodTextFormat(shape, "city") } });
const stream = openai.responses.stream({ model: "tiny", input: "hi", previous_response_id: response.id });
const final = await stream.finalResponse();
console.log(
  JSON.stringify({ told, object: parsed.choices[0].message.parsed, again: response.output_parsed, final: final.output_text }),
);
