// Rows of GFM's tables.

const DELIMITER = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** The cells of a row; a bar after a backslash is text. */
export function cells(row) {
  const text = row.trim();
  const found = [];
  let begin = text[0] === "|" ? 1 : 0;
  let cell = "";
  for (let position = begin; position < text.length; position += 1) {
    if (text[position] === "\\" && text[position + 1] === "|") {
      cell += text.slice(begin, position);
      begin = position + 1;
      position += 1;
    } else if (text[position] === "|") {
      found.push((cell + text.slice(begin, position)).trim());
      cell = "";
      begin = position + 1;
    }
  }
  if (begin < text.length || cell) found.push((cell + text.slice(begin)).trim());
  return found;
}

/** The columns' alignments ("", "left", "center", "right") in a delimiter row; null if it is none. */
export function alignments(row) {
  if (!row.includes("-") || !row.includes("|") || row.length > 10000 || !DELIMITER.test(row)) return null;
  return cells(row).map((cell) => {
    if (cell.endsWith(":")) return cell[0] === ":" ? "center" : "right";
    return cell[0] === ":" ? "left" : "";
  });
}
