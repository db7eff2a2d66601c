// The messages of the shown conversation. Drawn at most once a frame; scrolls along only while the reader is at the end.

import { make } from "../dom/element.js";
import { viewOf } from "./message_view.js";

const NEAR = 40; // pixels from the end that still count as the end

export class Transcript {
  constructor(scroller, list, endButton) {
    this.scroller = scroller;
    this.list = list;
    this.endButton = endButton;
    this.views = [];
    this.conversation = null;
    this.frame = null;
    this.atEnd = true;
    scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    endButton.addEventListener("click", () => this.scrollToEnd());
    new ResizeObserver(() => this.follow()).observe(scroller);
  }

  /** Show a conversation from its beginning on; nothing of another one stays. */
  show(conversation) {
    this.conversation = conversation;
    this.views = [];
    this.list.replaceChildren();
    this.draw();
    this.scrollToEnd();
  }

  /** Draw what has changed, in the next frame. */
  refresh() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { messages } = this.conversation;
    while (this.views.length > messages.length || this.differsAt(this.views.length - 1)) this.views.pop().element.remove();
    for (let index = this.views.length; index < messages.length; index += 1) {
      const view = viewOf(messages[index]);
      view.element.dataset.index = String(index);
      this.views.push(view);
      view.update();
      this.list.append(view.element);
    }
    this.views[this.views.length - 1]?.update();
    this.follow();
  }

  differsAt(index) {
    return index >= 0 && this.views[index].message !== this.conversation.messages[index];
  }

  /** The message that an element belongs to: its index. */
  indexOf(element) {
    return Number(element.closest("[data-index]").dataset.index);
  }

  follow() {
    if (this.atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.noteScroll();
  }

  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.atEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    this.endButton.hidden = this.atEnd;
  }

  scrollToEnd() {
    this.atEnd = true;
    this.follow();
    this.endButton.hidden = true;
  }

  /** Put a form in place of a message's text; `onDone(text)` gets the new one, null if it was given up. */
  edit(index, onDone) {
    const { element, message } = this.views[index];
    const field = make("textarea", { "aria-label": "Message", rows: Math.min(12, message.content.split("\n").length + 1) });
    field.value = message.content;
    const cancel = make("button", { type: "button", class: "plain" }, "Cancel");
    const form = make("form", { class: "edit" }, field, make("div", {}, cancel, make("button", { type: "submit" }, "Send")));
    const end = (text) => {
      form.remove();
      element.classList.remove("edited");
      onDone(text);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) end(field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end(null);
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    cancel.addEventListener("click", () => end(null));
    element.classList.add("edited");
    element.append(form);
    field.focus();
  }
}
