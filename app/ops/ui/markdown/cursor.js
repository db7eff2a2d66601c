// A place in a line, in columns: a tab reaches to the next multiple of four, and may be taken in part.

export class Cursor {
  constructor(line) {
    this.line = line;
    this.position = 0;
    this.column = 0;
    this.spare = 0; // columns left of a tab that was taken in part
  }

  /** Columns of white space ahead. */
  get indent() {
    let column = this.column + this.spare;
    for (let position = this.position; position < this.line.length; position += 1) {
      if (this.line[position] === " ") column += 1;
      else if (this.line[position] === "\t") column += 4 - (column % 4);
      else break;
    }
    return column - this.column;
  }

  get blank() {
    for (let position = this.position; position < this.line.length; position += 1) {
      if (this.line[position] !== " " && this.line[position] !== "\t") return false;
    }
    return true;
  }

  /** Take at most `columns` of white space. */
  skip(columns) {
    let left = columns;
    while (left > 0) {
      if (this.spare === 0) {
        const sign = this.line[this.position];
        if (sign !== " " && sign !== "\t") return;
        this.spare = sign === " " ? 1 : 4 - (this.column % 4);
        this.position += 1;
      }
      const taken = Math.min(left, this.spare);
      this.spare -= taken;
      this.column += taken;
      left -= taken;
    }
  }

  /** Take `length` characters that are no white space. */
  take(length) {
    this.position += length;
    this.column += length;
  }

  /** What follows the white space ahead. */
  get words() {
    let position = this.position;
    while (this.line[position] === " " || this.line[position] === "\t") position += 1;
    return this.line.slice(position);
  }

  get rest() {
    return " ".repeat(this.spare) + this.line.slice(this.position);
  }
}
