// Single characters as Markdown sees them: entities, punctuation, white space.

const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", deg: "°",
  plusmn: "±", times: "×", divide: "÷", minus: "−", middot: "·", bull: "•", hellip: "…", ndash: "–", mdash: "—",
  lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»", euro: "€", pound: "£", yen: "¥",
  cent: "¢", sect: "§", para: "¶", larr: "←", rarr: "→", uarr: "↑", darr: "↓", harr: "↔", rArr: "⇒", hArr: "⇔",
  le: "≤", ge: "≥", ne: "≠", asymp: "≈", equiv: "≡", infin: "∞", sum: "∑", prod: "∏", radic: "√", int: "∫",
  part: "∂", nabla: "∇", isin: "∈", notin: "∉", cap: "∩", cup: "∪", sub: "⊂", sup: "⊃", forall: "∀", exist: "∃",
  empty: "∅", alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", theta: "θ", lambda: "λ", mu: "μ",
  pi: "π", sigma: "σ", tau: "τ", phi: "φ", omega: "ω", Delta: "Δ", Sigma: "Σ", Omega: "Ω", check: "✓",
  auml: "ä", ouml: "ö", uuml: "ü", Auml: "Ä", Ouml: "Ö", Uuml: "Ü", szlig: "ß", eacute: "é", egrave: "è",
  agrave: "à", ccedil: "ç", ntilde: "ñ",
};
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,10}));/y;

export const ASCII_PUNCTUATION = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** The entity at a position: its length and the text that it means; null if there is none that is known. */
export function entityAt(text, position) {
  ENTITY.lastIndex = position;
  const match = ENTITY.exec(text);
  if (!match) return null;
  const [whole, decimal, hexadecimal, name] = match;
  if (name !== undefined) return Object.hasOwn(NAMED, name) ? { length: whole.length, text: NAMED[name] } : null;
  const code = decimal !== undefined ? Number(decimal) : parseInt(hexadecimal, 16);
  const valid = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return { length: whole.length, text: valid ? String.fromCodePoint(code) : "\ufffd" };
}

/** Backslash escapes and entities of a link's destination or title as what they mean. */
export function plain(text) {
  if (!/[\\&]/.test(text)) return text;
  let result = "";
  for (let position = 0; position < text.length; position += 1) {
    const sign = text[position];
    const entity = sign === "&" ? entityAt(text, position) : null;
    if (entity) {
      result += entity.text;
      position += entity.length - 1;
    } else if (sign === "\\" && position + 1 < text.length && ASCII_PUNCTUATION.test(text[position + 1])) {
      position += 1;
      result += text[position];
    } else {
      result += sign;
    }
  }
  return result;
}

/** "" stands for the beginning and the end of a text. */
export function isSpace(character) {
  return character === "" || /\s/.test(character);
}

export function isPunctuation(character) {
  return PUNCTUATION.test(character);
}
