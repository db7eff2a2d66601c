// Conversations as files: JSON, which can be read again, and Markdown.

import { newConversation, NO_SETTINGS, titleOf } from "./conversation.js";

const FORMAT = "tessera-conversations";
const MAX_CHARACTERS = 20_000_000;
const ROLES = new Set(["user", "assistant", "tool"]);

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);
}

export function toMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  const { system } = conversation.settings;
  if (system.trim()) parts.push(`## System\n\n${system}`);
  for (const message of conversation.messages) {
    if (message.role === "user") parts.push(`## You\n\n${message.content}`);
    else if (message.role === "tool") parts.push(`## Result of ${message.name}\n\n${fenced(message.content, "")}`);
    else parts.push(`## ${message.model || "Answer"}\n\n${answerText(message)}`);
  }
  return `${parts.join("\n\n")}\n`;
}

function answerText({ content, reasoning, calls }) {
  const parts = [];
  if (reasoning) parts.push(`> ${reasoning.trim().replaceAll("\n", "\n> ")}`);
  if (content) parts.push(content);
  for (const call of calls) parts.push(`Calls \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`);
  return parts.join("\n\n");
}

function fenced(text, language) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Conversations of a file that `toJson` made, with new ids. Raises an Error that says what is wrong. */
export function fromJson(text) {
  if (text.length > MAX_CHARACTERS) throw new Error(`The file is longer than ${MAX_CHARACTERS} characters.`);
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`The file is no export of this page: its "format" is not "${FORMAT}".`);
  }
  return file.conversations.map(readConversation);
}

function readConversation(found) {
  if (!Array.isArray(found?.messages)) throw new Error("A conversation of the file has no messages.");
  const settings = {};
  for (const [name, none] of Object.entries(NO_SETTINGS)) {
    const value = found.settings?.[name];
    if (typeof value === (none === null ? "number" : "string")) settings[name] = value;
  }
  const conversation = newConversation(settings);
  conversation.title = string(found.title);
  conversation.created = time(found.created) ?? conversation.created;
  conversation.updated = time(found.updated) ?? conversation.updated;
  conversation.messages = found.messages.map(readMessage);
  return conversation;
}

function readMessage(found) {
  if (!ROLES.has(found?.role)) throw new Error('A message of the file has no "role" of user, assistant or tool.');
  const content = string(found.content);
  if (found.role === "user") return { role: "user", content };
  if (found.role === "tool") return { role: "tool", callId: string(found.callId), name: string(found.name), content };
  const calls = (Array.isArray(found.calls) ? found.calls : []).map((call) => ({
    id: string(call?.id), name: string(call?.name), arguments: string(call?.arguments),
  }));
  const { usage, times } = found;
  return {
    role: "assistant", content, reasoning: string(found.reasoning), calls, model: string(found.model), error: string(found.error),
    state: ["done", "stopped", "failed"].includes(found.state) ? found.state : "stopped",
    usage: numbers(usage, ["prompt", "completion", "cached"]), times: numbers(times, ["first", "rest", "total"]),
  };
}

const string = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) && value > 0 ? value : null);

function numbers(found, names) {
  if (!names.every((name) => Number.isFinite(found?.[name]))) return null;
  return Object.fromEntries(names.map((name) => [name, found[name]]));
}
