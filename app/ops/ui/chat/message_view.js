// One message on the page. It reads its message and shows what is new; an answer's finished blocks are never touched.

import { make } from "../dom/element.js";
import { StreamedMarkdown } from "../markdown/streamed_markdown.js";
import { costOf } from "./run.js";

const ACTIONS = {
  copy: "Copy message",
  edit: "Edit and send again",
  regenerate: "Answer again",
};

/** A button with an icon of index.html and a name. */
export function iconButton(icon, name, attributes = {}) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${icon}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return make("button", { type: "button", class: "icon", "aria-label": name, title: name, ...attributes }, svg);
}

function actionsOf(names) {
  const bar = make("div", { class: "actions" });
  for (const name of names) bar.append(iconButton(name, ACTIONS[name], { "data-action": name }));
  return bar;
}

class UserView {
  constructor(message) {
    this.message = message;
    this.body = make("div", { class: "text" }, message.content);
    const heading = make("h3", { class: "unseen" }, message.role === "tool" ? `Result of ${message.name}` : "You");
    this.element = make("article", { class: `message ${message.role}` }, heading);
    if (message.role === "tool") this.element.append(make("p", { class: "quiet" }, `Result of ${message.name}`));
    this.element.append(this.body, actionsOf(message.role === "user" ? ["copy", "edit"] : ["copy"]));
  }

  update() {
    return false;
  }
}

class AnswerView {
  constructor(message) {
    this.message = message;
    this.body = make("div", { class: "text markdown" });
    this.markdown = new StreamedMarkdown(this.body);
    this.shown = 0; // characters of the content
    this.footer = make("footer", {});
    this.element = make("article", { class: "message assistant" }, make("h3", { class: "unseen" }, message.model || "Answer"));
    this.element.append(this.body, this.footer);
    this.reasoning = null;
    this.calls = null;
    this.ended = false;
  }

  /** Show what has come since the last time. Returns whether there was anything. */
  update() {
    if (this.ended) return false;
    const { message } = this;
    this.element.classList.toggle("busy", message.state === "running");
    let changed = this.showReasoning();
    if (message.content.length > this.shown) {
      this.markdown.append(message.content.slice(this.shown));
      this.shown = message.content.length;
      changed = true;
    }
    if (message.calls.length) changed = this.showCalls() || changed;
    if (message.state !== "running") {
      this.end();
      changed = true;
    }
    return changed;
  }

  end() {
    const { message } = this;
    this.ended = true;
    this.markdown.end();
    if (this.reasoning) this.reasoning.label.textContent = "Reasoning";
    if (message.error) {
      const retry = make("button", { type: "button", class: "plain", "data-action": "regenerate" }, "Try again");
      this.footer.append(make("div", { class: "error", role: "alert" }, make("p", {}, message.error), retry));
    }
    const names = message.content ? ["copy", "regenerate"] : ["regenerate"];
    const cost = make("p", { class: "cost quiet" }, costOf(message) || (message.state === "stopped" ? "stopped" : ""));
    this.footer.append(make("div", { class: "under" }, actionsOf(names), cost));
  }

  showReasoning() {
    const { reasoning } = this.message;
    if (!reasoning || reasoning.length === this.reasoning?.length) return false;
    if (this.reasoning === null) {
      const text = make("div", { class: "markdown" });
      const label = make("summary", {}, "Reasoning…");
      this.element.insertBefore(make("details", { class: "reasoning" }, label, text), this.body);
      this.reasoning = { label, markdown: new StreamedMarkdown(text), length: 0 };
    }
    this.reasoning.markdown.append(reasoning.slice(this.reasoning.length));
    this.reasoning.length = reasoning.length;
    return true;
  }

  showCalls() {
    const { calls } = this.message;
    const length = calls.reduce((sum, call) => sum + (call?.name.length ?? 0) + (call?.arguments.length ?? 0), 0);
    const key = `${length} ${this.message.state}`;
    if (key === this.calls?.key) return false;
    if (this.calls === null) {
      this.calls = { element: make("div", { class: "calls" }), parts: [] };
      this.element.insertBefore(this.calls.element, this.footer);
    }
    this.calls.key = key;
    calls.forEach((call, index) => {
      const part = (this.calls.parts[index] ??= this.addCall());
      part.name.textContent = call.name;
      part.code.textContent = this.message.state === "running" ? call.arguments : indented(call.arguments);
    });
    return true;
  }

  addCall() {
    const name = make("b");
    const code = make("code");
    const summary = make("summary", {}, "Calls ", name);
    this.calls.element.append(make("details", { class: "call", open: true }, summary, make("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, code)));
    return { name, code };
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function viewOf(message) {
  return message.role === "assistant" ? new AnswerView(message) : new UserView(message);
}
