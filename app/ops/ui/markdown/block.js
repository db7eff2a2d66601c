// A block of a document: a container with children, or a leaf with lines.

export const MAX_DEPTH = 32; // of nested quotes, lists and items; deeper markers are text

export class Block {
  /** `type`: document, quote, list, item, paragraph, heading, code, math, rule or table. `fields`: what the type has. */
  constructor(type, fields = {}) {
    this.type = type;
    this.children = [];
    this.lines = [];
    this.size = 0; // characters of `lines`
    this.open = true;
    this.final = false; // will never change again
    this.blank = false; // the last line inside was blank
    Object.assign(this, fields);
  }

  get contains() {
    return this.type === "document" || this.type === "quote" || this.type === "item";
  }

  /** Lines of code and maths are taken as they are. */
  get verbatim() {
    return this.type === "code" || this.type === "math";
  }

  push(line) {
    this.lines.push(line);
    this.size += line.length + 1;
  }

  /** The state that `restore` brings back, as long as lines and children were only appended since. */
  save() {
    return { fields: { ...this }, numChildren: this.children.length, numLines: this.lines.length };
  }

  restore({ fields, numChildren, numLines }) {
    Object.assign(this, fields);
    this.children.length = numChildren;
    this.lines.length = numLines;
  }
}
