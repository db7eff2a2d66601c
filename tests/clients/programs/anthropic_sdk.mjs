// Anthropic's SDK: two turns with a tool and reasoning, a count, the models. Prints what it saw.
import Anthropic from '@anthropic-ai/sdk';

const api = new Anthropic({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const tools = [{ name: 'weather', description: 'Tells it', input_schema: { type: 'object', properties: {} } }];
const ask = { model: 'tiny', max_tokens: 64000, tools, thinking: { type: 'enabled', budget_tokens: 2048 } };
const messages = [{ role: 'user', content: 'Is it raining?' }];
const kinds = new Set();
const stream = api.messages.stream({ ...ask, messages }).on('streamEvent', (event) => kinds.add(event.type));
const first = await stream.finalMessage();
const call = first.content.find((block) => block.type === 'tool_use');
messages.push({ role: 'assistant', content: first.content });
messages.push({ role: 'user', content: [{ type: 'tool_result', tool_use_id: call.id, content: 'rain' }] });
const second = await api.messages.create({ ...ask, max_tokens: 100, messages });
const counted = await api.messages.countTokens({ model: 'tiny', messages, tools });
const models = [];
for await (const model of api.models.list()) models.push(model.id);
console.log(JSON.stringify({ first, second, kinds: [...kinds], counted, models }));
