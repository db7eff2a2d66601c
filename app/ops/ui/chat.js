// The chat box: one conversation, answers as they come, and what each of them cost.

import { fetchWithKey } from "./key.js";

const messages = document.getElementById("messages");
const hint = document.getElementById("hint");
const prompt = document.getElementById("prompt");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

let conversation = [];
let running = null;
let served = { model: null, chat: true };

/** Which model answers, and whether it takes conversations or continues texts. */
export function setServed(model, chat) {
  if (model === served.model && chat === served.chat) return;
  served = { model, chat };
  if (!chat) hint.textContent = "Write the beginning of a text. The model, which has no chat template, goes on with it.";
}

function add(role, text) {
  hint.hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  message.append(body);
  messages.append(message);
  messages.scrollTop = messages.scrollHeight;
  return message;
}

function addCost(words) {
  const cost = document.createElement("p");
  cost.className = "cost quiet";
  cost.textContent = words;
  messages.append(cost);
  messages.scrollTop = messages.scrollHeight;
}

function request(text) {
  const common = { model: served.model, stream: true, stream_options: { include_usage: true } };
  if (!served.chat) return ["/v1/completions", { ...common, prompt: text, max_tokens: 256 }];
  return ["/v1/chat/completions", { ...common, messages: [...conversation, { role: "user", content: text }] }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function showReasoning(message, text) {
  let details = message.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    details.append(document.createElement("summary"), document.createElement("div"));
    details.firstChild.textContent = "Reasoning";
    message.prepend(details);
  }
  details.lastChild.textContent += text;
}

async function answer(text) {
  running = new AbortController();
  send.hidden = true;
  stop.hidden = false;
  add("user", text);
  const message = add("assistant busy", "");
  const body = message.querySelector(".text");
  const begin = performance.now();
  let first = null;
  let tokens = 0;
  try {
    const [path, content] = request(text);
    const response = await fetchWithKey(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(content),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      tokens = event.usage?.completion_tokens ?? tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const added = served.chat ? choice.delta.content : choice.text;
      if (choice.delta?.reasoning) showReasoning(message, choice.delta.reasoning);
      if (added || choice.delta?.reasoning) first ??= performance.now();
      if (added) body.append(added);
      messages.scrollTop = messages.scrollHeight;
    }
    conversation.push({ role: "user", content: text }, { role: "assistant", content: body.textContent });
  } catch (error) {
    if (error.name === "AbortError") {
      conversation.push({ role: "user", content: text }, { role: "assistant", content: body.textContent });
    } else {
      add("error", error.message);
    }
  } finally {
    message.classList.remove("busy");
    if (!message.textContent) message.remove();
    if (first !== null) addCost(costs(first - begin, performance.now() - first, tokens));
    running = null;
    stop.hidden = true;
    send.hidden = false;
    prompt.focus();
  }
}

function costs(toFirst, decoding, tokens) {
  const words = [`first token after ${Math.round(toFirst)} ms`];
  if (tokens) words.push(`${tokens} tokens`);
  if (tokens > 1 && decoding > 0) words.push(`${((1000 * (tokens - 1)) / decoding).toFixed(1)} tokens/s`);
  return words.join(" · ");
}

document.getElementById("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !served.model) return;
  prompt.value = "";
  answer(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    document.getElementById("ask").requestSubmit();
  }
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  messages.replaceChildren(hint);
  hint.hidden = false;
});
