// One answer while it comes. It writes into its own conversation's message and nowhere else, whatever the page shows.

import { fetchWithKey } from "../shell/key.js";
import { requestBody } from "./conversation.js";
import { events } from "./event_stream.js";

export class Run {
  /** `onChange` is called after each event; what it does must be cheap. */
  constructor(conversation, answer, takesConversations, onChange) {
    this.conversation = conversation;
    this.answer = answer;
    this.takesConversations = takesConversations;
    this.onChange = onChange;
    this.controller = new AbortController();
    this.first = null; // time of the first token
  }

  stop() {
    this.controller.abort();
  }

  /** Returns when the answer is whole, was stopped or failed, which its state says. */
  async go() {
    const { answer } = this;
    const begin = performance.now();
    try {
      for await (const event of events(await this.respond())) {
        if (event.error) throw new Error(event.error.message);
        this.note(event);
        this.onChange();
      }
      answer.state = "done";
    } catch (error) {
      answer.state = this.controller.signal.aborted ? "stopped" : "failed";
      if (answer.state === "failed") answer.error = messageOf(error);
    }
    answer.calls = answer.calls.filter((call) => call !== undefined);
    if (this.first !== null) {
      const end = performance.now();
      answer.times = { first: this.first - begin, rest: (this.last ?? end) - this.first, total: end - begin };
    }
    this.onChange();
  }

  async respond() {
    const body = JSON.stringify(requestBody(this.conversation, this.takesConversations));
    const path = this.takesConversations ? "v1/chat/completions" : "v1/completions";
    const headers = { "content-type": "application/json" };
    const response = await fetchWithKey(path, { method: "POST", headers, body, signal: this.controller.signal });
    if (response.ok) return response;
    const failure = await response.json().catch(() => null);
    throw new Error(failure?.error?.message ?? `The server answered with status ${response.status}.`);
  }

  note(event) {
    const { answer } = this;
    if (event.usage) {
      const { prompt_tokens: prompt, completion_tokens: completion } = event.usage;
      answer.usage = { prompt, completion, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0 };
    }
    const choice = event.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    const delta = choice.delta ?? { content: choice.text };
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    if (delta.content || reasoning || delta.tool_calls) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    answer.content += delta.content ?? "";
    answer.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) {
      const known = (answer.calls[call.index] ??= { id: "", name: "", arguments: "" });
      known.id = call.id ?? known.id;
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
  }
}

function messageOf(error) {
  // Browsers say "Failed to fetch" and the like.
  return error instanceof TypeError ? "The server cannot be reached." : error.message;
}

/** Words on an answer's cost, from the server's own count of tokens. */
export function costOf({ usage, times, finish, state, calls }) {
  const words = [];
  if (usage) words.push(usage.completion === 1 ? "1 token" : `${usage.completion.toLocaleString("en")} tokens`);
  const streamed = times && times.rest > 0 && !calls.length; // calls come in few pieces, long after their first token
  if (usage?.completion > 1 && streamed) {
    const rate = (1000 * (usage.completion - 1)) / times.rest;
    words.push(`${rate >= 99.5 ? Math.round(rate).toLocaleString("en") : rate.toFixed(1)} tokens/s`);
  }
  if (times) words.push(`first after ${times.first < 9950 ? `${Math.round(times.first)} ms` : `${Math.round(times.first / 1000)} s`}`);
  if (usage) words.push(`${usage.prompt.toLocaleString("en")} tokens read${usage.cached ? `, ${usage.cached.toLocaleString("en")} from the cache` : ""}`);
  if (state === "stopped") words.push("stopped");
  if (finish === "length") words.push("cut at the token limit");
  return words.join(" · ");
}
