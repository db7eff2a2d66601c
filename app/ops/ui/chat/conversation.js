// A conversation: its settings and its messages, as plain objects that the database keeps.
//
// A message is { role: "user", content }, { role: "tool", callId, name, content } or { role: "assistant", content,
// reasoning, calls: [{ id, name, arguments }], model, state, error, usage, times }, where state is "running", "done",
// "stopped" or "failed".

const MAX_TITLE = 80;
export const NO_SETTINGS = {
  model: "", system: "", temperature: null, top_p: null, top_k: null, min_p: null, max_tokens: null, seed: null,
  presence_penalty: null, frequency_penalty: null, repetition_penalty: null, stop: "", tools: "",
};

export function newConversation(settings) {
  const now = Date.now();
  const id = crypto.randomUUID?.() ?? `${now}-${Math.random().toString(36).slice(2)}`; // absent on plain HTTP
  return { id, title: "", created: now, updated: now, settings: { ...NO_SETTINGS, ...settings }, messages: [] };
}

export function newAnswer(model) {
  return { role: "assistant", content: "", reasoning: "", calls: [], model, state: "running", error: "", usage: null, times: null };
}

/** The title that it was given, or the beginning of its first message. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE)}…` : line || "New conversation";
}

/** What the list shows of it. */
export function summaryOf(conversation) {
  const { id, created, updated } = conversation;
  const size = JSON.stringify(conversation.messages).length;
  return { id, title: titleOf(conversation), created, updated, size };
}

/** Calls of the last answer that have no results. */
export function openCalls(conversation) {
  const last = conversation.messages[conversation.messages.length - 1];
  return last?.role === "assistant" && last.state !== "running" ? last.calls : [];
}

/** The body of a request for the next message. */
export function requestBody(conversation, takesConversations) {
  const { system, stop, tools, ...sampling } = conversation.settings;
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const [name, value] of Object.entries(sampling)) if (value !== null && value !== "") body[name] = value;
  const stops = stop.split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops;
  const said = conversation.messages.filter((message) => message.state !== "running");
  if (!takesConversations) {
    const prompt = said.map((message) => message.content).join("");
    return { max_tokens: 256, ...body, prompt };
  }
  const messages = said.flatMap(requestMessage);
  if (system.trim()) messages.unshift({ role: "system", content: system });
  if (tools.trim()) body.tools = JSON.parse(tools);
  return { ...body, messages };
}

function requestMessage(message) {
  if (message.role === "user") return [{ role: "user", content: message.content }];
  if (message.role === "tool") return [{ role: "tool", tool_call_id: message.callId, content: message.content }];
  if (!message.content && !message.calls.length) return []; // failed, or stopped before its first token
  const found = { role: "assistant", content: message.content };
  if (message.calls.length) {
    found.tool_calls = message.calls.map(({ id, name, arguments: text }) => ({
      id, type: "function", function: { name, arguments: text },
    }));
  }
  return [found];
}

/** Why a text is no list of tools; "" if it is. */
export function faultOfTools(text) {
  if (!text.trim()) return "";
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return `The tools are not JSON: ${error.message}`;
  }
  const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  return Array.isArray(tools) && tools.every(isTool) ? "" : 'Tools are a list of {"type": "function", "function": {"name": ...}}.';
}
