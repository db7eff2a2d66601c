// Maths: the part of LaTeX that models write, as MathML. What is not known is shown as its source.

import { make } from "../dom/element.js";
import { ACCENTS, ALPHABETS, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OPERATORS, SPACES } from "./tex_symbols.js";

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const TOKEN = /\s+|%[^\n]*|\\(?:[a-zA-Z]+\*?|[\s\S])|\d+(?:\.\d+)?|[\s\S]/gu;
const MAX_DEPTH = 40;
const MAX_TOKENS = 4000;
const TEXTS = new Set(["text", "textrm", "textbf", "textit", "mathrm", "operatorname", "operatorname*", "mbox", "texttt", "mathsf", "mathtt"]);
const FENCES = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
  smallmatrix: ["", ""], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], array: ["", ""],
  gathered: ["", ""], split: ["", ""], equation: ["", ""], "equation*": ["", ""], gather: ["", ""], "gather*": ["", ""],
};
const LEFT = new Set(["cases", "array"]);
const IGNORED = new Set([
  "displaystyle", "textstyle", "limits", "nolimits", "bigl", "bigr", "Bigl", "Bigr", "big", "Big", "bigg", "Bigg", "biggl",
  "biggr", "notag", "nonumber", "hline", "left.", "boxed", "tag",
]);

/** No Error: thousands of them may be thrown, and their stack traces would cost time. */
class FormulaError {
  constructor(reason) {
    this.reason = reason;
  }
}

/** A formula as an element: maths, or its source as code where it has what is not supported. */
export function formula(source, display) {
  try {
    const body = new FormulaParser(source, display).parse();
    const attributes = { display: display ? "block" : "inline", "aria-label": source.trim() };
    return mathElement("math", attributes, body);
  } catch (error) {
    if (!(error instanceof FormulaError)) throw error;
    return make("code", { class: "formula" }, source.trim());
  }
}

function mathElement(name, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

const identifier = (text, attributes = {}) => mathElement("mi", attributes, text);
const operator = (text, attributes = {}) => mathElement("mo", attributes, text);
const row = (children) => (children.length === 1 ? children[0] : mathElement("mrow", {}, ...children));

class FormulaParser {
  constructor(source, display) {
    this.tokens = (source.match(TOKEN) ?? []).filter((token) => !/^(?:\s|%)/.test(token));
    if (this.tokens.length > MAX_TOKENS) throw new FormulaError("too long");
    this.source = source;
    this.spaced = source.match(TOKEN) ?? [];
    this.position = 0;
    this.depth = 0;
    this.display = display;
  }

  parse() {
    const lines = this.table(() => this.position >= this.tokens.length);
    if (this.position < this.tokens.length) throw new FormulaError("unexpected");
    if (lines.length === 1 && lines[0].length === 1) return lines[0][0];
    return this.grid(lines, "aligned");
  }

  get next() {
    return this.tokens[this.position];
  }

  take(expected) {
    const token = this.tokens[this.position];
    if (token === undefined || (expected !== undefined && token !== expected)) throw new FormulaError("unexpected end");
    this.position += 1;
    return token;
  }

  /** Rows of cells, parted by \\ and &. */
  table(atEnd) {
    const rows = [[]];
    for (;;) {
      rows[rows.length - 1].push(row(this.list(() => atEnd() || this.next === "&" || this.next === "\\\\")));
      if (this.position >= this.tokens.length || atEnd()) break;
      if (this.take() === "\\\\") {
        if (atEnd()) break;
        rows.push([]);
      }
    }
    return rows;
  }

  grid(rows, name) {
    const isAligned = !LEFT.has(name) && !name.includes("matrix");
    const lines = rows.map((cells) =>
      mathElement("mtr", {}, ...cells.map((cell, index) => {
        const side = LEFT.has(name) ? "left" : isAligned && rows.some((each) => each.length > 1) ? (index % 2 ? "left" : "right") : "center";
        return mathElement("mtd", { class: side }, cell);
      }))
    );
    return mathElement("mtable", this.display ? { displaystyle: "true" } : {}, ...lines);
  }

  list(atEnd) {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new FormulaError("too deep");
    const found = [];
    while (this.position < this.tokens.length && !atEnd()) {
      const atom = this.scripted();
      if (atom !== null) found.push(atom);
    }
    this.depth -= 1;
    return found;
  }

  /** An atom with what stands below and above it. */
  scripted() {
    let base = this.next === "^" || this.next === "_" ? mathElement("mrow", {}) : this.atom();
    if (base === null) return null;
    let below = null;
    let above = null;
    let primes = "";
    for (;;) {
      if (this.next === "'") {
        this.take();
        primes += "′";
      } else if (this.next === "_" && below === null) {
        this.take();
        below = this.argument();
      } else if (this.next === "^" && above === null) {
        this.take();
        above = this.argument();
      } else break;
    }
    if (primes) above = above === null ? operator(primes) : mathElement("mrow", {}, operator(primes), above);
    if (below === null && above === null) return base;
    const kind = base.limits && this.display ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (above === null) return mathElement(kind[0], {}, base, below);
    if (below === null) return mathElement(kind[1], {}, base, above);
    return mathElement(kind[2], {}, base, below, above);
  }

  argument() {
    if (this.next === "{") return row(this.group());
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new FormulaError("too deep");
    const atom = this.atom();
    this.depth -= 1;
    if (atom === null) throw new FormulaError("an argument is missing");
    return atom;
  }

  group() {
    this.take("{");
    const found = this.list(() => this.next === "}");
    this.take("}");
    return found;
  }

  atom() {
    const token = this.next;
    if (token === "{") return mathElement("mrow", {}, ...this.group());
    if (token === "}" || token === "&" || token === "^" || token === "_" || token === "#") throw new FormulaError("unexpected");
    this.take();
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return mathElement("mn", {}, token);
    if (/^\p{L}/u.test(token)) return identifier(token);
    if (token === "-") return operator("−");
    if (token === "*") return operator("∗");
    if (token === "~") return mathElement("mspace", { width: "0.33em" });
    return operator(token, "()[]|/".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (LETTERS.has(name)) return identifier(LETTERS.get(name), /^[A-Z]/.test(name) || /[^\p{L}]/u.test(LETTERS.get(name)) ? { mathvariant: "normal" } : {});
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name), { stretchy: "false" });
    if (LARGE.has(name)) return Object.assign(operator(LARGE.get(name)), { limits: true });
    if (INTEGRALS.has(name)) return operator(INTEGRALS.get(name));
    if (FUNCTIONS.has(name)) return identifier(name);
    if (LIMITS.has(name)) return Object.assign(operator(LIMITS.get(name).replace("_", " ")), { limits: true });
    if (SPACES.has(name)) return mathElement("mspace", { width: SPACES.get(name) });
    if (ACCENTS.has(name)) return mathElement("mover", { accent: "true" }, this.argument(), operator(ACCENTS.get(name)));
    if (ALPHABETS.has(name)) return inAlphabet(this.argument(), ALPHABETS.get(name));
    if (TEXTS.has(name)) return this.text(name);
    if (name === "frac" || name === "dfrac" || name === "tfrac" || name === "cfrac") {
      return mathElement("mfrac", {}, this.argument(), this.argument());
    }
    if (name === "binom") {
      const fraction = mathElement("mfrac", { linethickness: "0" }, this.argument(), this.argument());
      return mathElement("mrow", {}, operator("("), fraction, operator(")"));
    }
    if (name === "sqrt") return this.root();
    if (name === "underline") return mathElement("munder", {}, this.argument(), operator("_"));
    if (name === "overbrace" || name === "underbrace") return this.brace(name);
    if (name === "overset" || name === "stackrel" || name === "underset") return this.stack(name);
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (name === "not") return mathElement("mrow", {}, operator("̸"), this.argument());
    if (name === "pmod") return mathElement("mrow", {}, operator("("), identifier("mod"), mathElement("mspace", { width: "0.3em" }), this.argument(), operator(")"));
    if (name === "mod" || name === "bmod") return operator("mod");
    if (IGNORED.has(name)) return name === "boxed" ? this.argument() : null;
    if (/^[{}%$#&_|]$/.test(name)) return operator(name === "|" ? "‖" : name, { stretchy: "false" });
    throw new FormulaError(`\\${name}`);
  }

  /** Words; white space counts in them, so they are read from the source's own tokens. */
  text(name) {
    this.take("{");
    const pieces = [];
    let depth = 1;
    let place = this.spacedPosition();
    for (; place < this.spaced.length; place += 1) {
      const token = this.spaced[place];
      if (token === "{") depth += 1;
      if (token === "}" && (depth -= 1) === 0) break;
      if (token !== "{" && token !== "}") pieces.push(token.replace(/^\\(?=[^a-zA-Z])/, ""));
      if (!/^(?:\s|%)/.test(token)) this.position += 1;
    }
    this.take("}");
    const text = pieces.join("").replace(/\s+/g, "\u00a0");
    if (name.startsWith("operatorname") || name === "mathrm") return identifier(text, { mathvariant: "normal" });
    return mathElement("mtext", name === "textbf" ? { class: "bold" } : name === "texttt" ? { class: "mono" } : {}, text);
  }

  /** Where the next token is among those with white space. */
  spacedPosition() {
    let place = 0;
    for (let count = 0; count < this.position; place += 1) if (!/^(?:\s|%)/.test(this.spaced[place])) count += 1;
    return place;
  }

  root() {
    if (this.next !== "[") return mathElement("msqrt", {}, this.argument());
    this.take("[");
    const index = row(this.list(() => this.next === "]"));
    this.take("]");
    return mathElement("mroot", {}, this.argument(), index);
  }

  brace(name) {
    const over = name === "overbrace";
    const brace = operator(over ? "⏞" : "⏟", { stretchy: "true" });
    return Object.assign(mathElement(over ? "mover" : "munder", {}, this.argument(), brace), { limits: true });
  }

  stack(name) {
    const script = this.argument();
    return mathElement(name === "underset" ? "munder" : "mover", {}, this.argument(), script);
  }

  fenced() {
    const left = this.fence();
    const inside = this.list(() => this.next === "\\right" || this.next === "\\\\" || this.next === "&");
    this.take("\\right");
    const right = this.fence();
    return mathElement("mrow", {}, ...[left, ...inside, right].filter((part) => part !== null));
  }

  fence() {
    const token = this.take();
    if (token === ".") return null;
    const name = token.slice(1);
    const sign = token.length === 1 ? token : OPERATORS.get(name) ?? (name === "|" ? "‖" : name);
    return operator(sign, { stretchy: "true" });
  }

  environment() {
    const name = this.name();
    const fences = Object.hasOwn(FENCES, name) ? FENCES[name] : null;
    if (fences === null) throw new FormulaError(name);
    if (name === "array") this.group();
    const rows = this.table(() => this.next === "\\end");
    this.take("\\end");
    if (this.name() !== name) throw new FormulaError(`\\end{${name}} is missing`);
    const parts = [this.grid(rows, name)];
    if (fences[0]) parts.unshift(operator(fences[0], { stretchy: "true" }));
    if (fences[1]) parts.push(operator(fences[1], { stretchy: "true" }));
    return row(parts);
  }

  name() {
    this.take("{");
    let name = "";
    while (this.next !== "}") name += this.take();
    this.take("}");
    return name;
  }
}

/** The same letters in another of Unicode's mathematical alphabets. */
function inAlphabet(element, alphabet) {
  for (const leaf of element.matches("mi, mn") ? [element] : element.querySelectorAll("mi, mn")) {
    const text = [...leaf.textContent].map((letter) => {
      if (alphabet.but?.[letter]) return alphabet.but[letter];
      const first = /[A-Z]/.test(letter) ? "A" : /[a-z]/.test(letter) ? "a" : /\d/.test(letter) ? "0" : "";
      return alphabet[first] ? String.fromCodePoint(alphabet[first] + letter.codePointAt(0) - first.codePointAt(0)) : letter;
    });
    leaf.textContent = text.join("");
    leaf.setAttribute("mathvariant", "normal");
  }
  return element;
}
