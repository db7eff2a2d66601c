// Blocks as elements. A view shows its block as far as it is known; what is final is never touched again.

import { CodeView } from "./code_view.js";
import { make } from "../dom/element.js";
import { formula } from "../maths/formula.js";
import { InlineView } from "./inline_view.js";
import { TableView } from "./table_view.js";

const TASK = /^\[([ xX])\](?=\s)/;

class ContainerView {
  constructor(block, element) {
    this.type = block.type;
    this.block = block;
    this.element = element;
    this.views = [];
    this.settled = 0; // children that will not change any more
  }

  suits(block) {
    return block.type === this.type && block.kind === this.block.kind && block.start === this.block.start;
  }

  update() {
    const { block, views } = this;
    if (this.type === "list") this.element.classList.toggle("tight", !block.loose);
    while (views.length > block.children.length) views.pop().element.remove();
    for (let index = this.settled; index < block.children.length; index += 1) {
      const child = block.children[index];
      const view = this.viewOf(child, index);
      view.update();
      if (child.final && index === this.settled) this.settled += 1;
    }
    if (this.type === "item") this.element.classList.toggle("task", Boolean(views[0]?.box));
  }

  viewOf(child, index) {
    const { views } = this;
    const old = views[index];
    if (old?.block === child && old.type === child.type) return old;
    if (old?.suits(child)) {
      old.adopt ? old.adopt(child) : (old.block = child);
      return old;
    }
    const view = viewFor(child, this.type === "item" && index === 0);
    if (old) old.element.replaceWith(view.element);
    else this.element.append(view.element);
    views[index] = view;
    return view;
  }

  /** Show another block, of which nothing is known yet. */
  adopt(block) {
    this.block = block;
    this.settled = 0;
  }
}

class TextView {
  /** `mayBeTask`: it is the first block of a list's item. */
  constructor(block, mayBeTask) {
    this.type = block.type;
    this.block = block;
    this.level = block.level;
    const level = Math.min((block.level ?? 0) + 2, 6); // below the page's own headings
    this.element = make(block.type === "heading" ? `h${level}` : "p");
    this.mayBeTask = mayBeTask;
    this.box = null;
    this.inlines = new InlineView(this.element);
  }

  suits(block) {
    return block.type === this.type && block.level === this.level;
  }

  update() {
    const { lines, size, final } = this.block;
    const task = this.mayBeTask ? TASK.exec(lines[0] ?? "") : null;
    if ((task === null) !== (this.box === null)) this.toggleBox();
    if (task !== null) this.box.checked = task[1] !== " ";
    this.inlines.update(task === null ? lines : [lines[0].slice(4), ...lines.slice(1)], size, final);
  }

  /** A task's text stands in an element of its own behind the box. */
  toggleBox() {
    this.box = this.box === null ? make("input", { type: "checkbox", disabled: true, "aria-label": "Done" }) : null;
    const text = make("span");
    this.element.replaceChildren(...(this.box === null ? [] : [this.box, " ", text]));
    this.inlines = new InlineView(this.box === null ? this.element : text);
  }
}

class MathView {
  constructor(block) {
    this.type = "math";
    this.block = block;
    this.element = make("div", { class: "math", tabindex: "0", role: "group", "aria-label": "Formula" });
    this.shown = null;
  }

  suits(block) {
    return block.type === "math";
  }

  /** The source, until the formula is whole. */
  update() {
    const { lines, opening, whole } = this.block;
    const source = lines.join("\n");
    const key = `${whole} ${source}`;
    if (key === this.shown) return;
    this.shown = key;
    this.element.replaceChildren(whole ? formula(source, true) : make("code", {}, opening + source));
  }
}

class RuleView {
  constructor(block) {
    this.type = "rule";
    this.block = block;
    this.element = make("hr");
  }

  suits(block) {
    return block.type === "rule";
  }

  update() {}
}

function viewFor(block, mayBeTask) {
  switch (block.type) {
    case "quote": return new ContainerView(block, make("blockquote"));
    case "list": return new ContainerView(block, listElement(block));
    case "item": return new ContainerView(block, make("li"));
    case "code": return new CodeView(block);
    case "table": return new TableView(block);
    case "math": return new MathView(block);
    case "rule": return new RuleView(block);
    default: return new TextView(block, mayBeTask);
  }
}

function listElement({ start }) {
  if (start === null) return make("ul");
  return make("ol", { start: start === 1 ? null : String(start) });
}

/** A view of a whole document in `element`. */
export function documentView(block, element) {
  return new ContainerView(block, element);
}
