// Markdown that is still being written, shown in an element. The cost of all calls together is linear in the text.

import { BlockParser } from "./block_parser.js";
import { documentView } from "./block_view.js";

const MAX_EAGER = 4096; // characters of a line without its end; a longer one is shown when it has grown by a quarter

export class StreamedMarkdown {
  constructor(element) {
    this.parser = new BlockParser();
    this.view = documentView(this.parser.root, element);
    this.tail = ""; // the last line, without its end
    this.tried = 0; // its length when it was last shown
  }

  /** Add text and show all of it. */
  append(text) {
    const lines = text.split("\n");
    lines[0] = this.tail + lines[0];
    this.tail = lines.pop();
    for (const line of lines) this.parser.addLine(line.endsWith("\r") ? line.slice(0, -1) : line);
    if (lines.length) this.tried = 0;
    const { length } = this.tail;
    if (!lines.length && length > MAX_EAGER && length < 1.25 * this.tried) return;
    this.tried = length;
    if (length) this.parser.tryLine(this.tail);
    else this.parser.forgetTrial();
    this.view.update();
  }

  /** No more text will come. */
  end() {
    if (this.tail) this.parser.addLine(this.tail);
    this.tail = "";
    this.parser.end();
    this.view.update();
  }
}

/** A whole text, shown at once. */
export function showMarkdown(element, text) {
  const markdown = new StreamedMarkdown(element);
  markdown.append(text);
  markdown.end();
}
