// Where messages are written. What is typed for a conversation stays with it until it is sent.

const MAX_ROWS = 10;

export class Composer {
  /** `onSend(text)` returns whether the text was taken; one that was not stays. */
  constructor(form, onSend, onStop) {
    this.form = form;
    this.field = form.querySelector("textarea");
    this.sendButton = form.querySelector("#send");
    this.stopButton = form.querySelector("#stop");
    this.drafts = new Map();
    this.id = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.field.value.trim();
      if (text && onSend(text)) this.text = "";
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.field.addEventListener("input", () => this.resize());
    this.stopButton.addEventListener("click", onStop);
  }

  get text() {
    return this.field.value;
  }

  set text(value) {
    this.field.value = value;
    this.resize();
  }

  /** Keep what was typed for the last conversation, and show what was typed for this one. */
  showDraftOf(id) {
    if (this.id !== null) this.drafts.set(this.id, this.text);
    this.id = id;
    this.text = this.drafts.get(id) ?? "";
    this.drafts.delete(id);
  }

  setBusy(busy) {
    const hadFocus = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.sendButton.hidden = busy;
    this.stopButton.hidden = !busy;
    if (hadFocus) this.field.focus();
  }

  focus() {
    this.field.focus();
  }

  resize() {
    this.field.rows = Math.min(MAX_ROWS, this.text.split("\n").length);
    while (this.field.scrollHeight > this.field.clientHeight + 2 && this.field.rows < MAX_ROWS) this.field.rows += 1;
  }
}
