// A block of code: its language, a button that copies it, and its lines, each highlighted once.

import { make } from "../dom/element.js";
import { Highlighter } from "../code/highlighter.js";

export class CodeView {
  constructor(block) {
    this.type = "code";
    this.code = make("code");
    this.label = make("span", { class: "language" });
    this.button = make("button", { type: "button", class: "copy", "data-copy": "code" }, "Copy");
    const pre = make("pre", { tabindex: "0", role: "group" }, this.code);
    this.element = make("figure", { class: "code" }, make("figcaption", {}, this.label, this.button), pre);
    this.block = block;
    this.info = null;
    this.settled = 0; // lines that will not change any more
  }

  /** Whether another block can be shown in its place. */
  suits(block) {
    return block.type === "code" && this.settled === 0;
  }

  update() {
    const { block, code } = this;
    const name = block.fence === undefined ? "" : (block.info.split(/[\s{]/, 1)[0] ?? "").slice(0, 30);
    if (name !== this.info) this.start(name);
    const { lines } = block;
    let length = lines.length;
    if (block.final && block.fence === undefined) while (length && !lines[length - 1].trim()) length -= 1;
    while (code.childNodes.length > length) code.lastChild.remove();
    if (!length) return;
    while (this.settled < length - 1) this.showLine(this.settled, true);
    this.showLine(length - 1, block.final);
  }

  start(name) {
    this.info = name;
    this.highlighter = new Highlighter(name);
    this.settled = 0;
    this.label.textContent = name || "text";
    this.button.setAttribute("aria-label", `Copy ${name} code`.replace("  ", " "));
    this.code.parentElement.setAttribute("aria-label", `${name || "text"} code`);
    this.code.replaceChildren();
  }

  showLine(index, settle) {
    const text = this.block.lines[index];
    let line = this.code.childNodes[index];
    if (!line) {
      line = make("span", { class: "line" });
      this.code.append(line);
    }
    if (line.shown !== text) line.replaceChildren(this.highlighter.fragment(text), "\n");
    line.shown = text;
    if (!settle) return;
    this.highlighter.settle(text);
    this.settled = index + 1;
  }
}
