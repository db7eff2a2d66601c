// A table that scrolls by itself where it is too wide.

import { make } from "../dom/element.js";
import { inlineFragment } from "./inline_view.js";
import { parseInlines } from "./inline_parser.js";
import { cells } from "./table_row.js";

export class TableView {
  constructor(block) {
    this.type = "table";
    this.body = make("tbody");
    this.head = make("thead");
    this.element = make("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
    this.element.append(make("table", {}, this.head, this.body));
    this.block = block;
    this.header = null;
    this.settled = 0;
  }

  suits(block) {
    return block.type === "table" && this.settled === 0;
  }

  update() {
    const { block, body } = this;
    const { lines } = block;
    if (this.header !== block.header) {
      this.header = block.header;
      this.head.replaceChildren(this.row("th", block.header));
      body.replaceChildren();
      this.settled = 0;
    }
    while (body.childNodes.length > lines.length) body.lastChild.remove();
    for (let index = this.settled; index < lines.length; index += 1) {
      const row = this.row("td", cells(lines[index]));
      if (body.childNodes[index]) body.childNodes[index].replaceWith(row);
      else body.append(row);
    }
    this.settled = block.final ? lines.length : Math.max(this.settled, lines.length - 1);
  }

  row(name, texts) {
    const row = make("tr");
    this.block.columns.forEach((alignment, column) => {
      const attributes = { class: alignment || null, scope: name === "th" ? "col" : null };
      row.append(make(name, attributes, inlineFragment(parseInlines(texts[column] ?? ""))));
    });
    return row;
  }
}
