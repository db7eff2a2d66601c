// Use by model and by key since the start, over all app processes.

import { make } from "../dom/element.js";
import { replaceRows } from "./figures.js";
import { whole } from "./numbers.js";

const MODEL_COLUMNS = [["model", "name"], ["requests", "requests"], ["tokens in", "prompt_tokens"], ["tokens out", "generation_tokens"]];
const KEY_COLUMNS = [
  ["key", "name"], ["requests", "requests"], ["now", "requests_under_way"], ["refused", "refused"],
  ["tokens in", "prompt_tokens"], ["tokens out", "generation_tokens"], ["tokens/min", "tokens_last_minute"],
];

function showTable(id, columns, entries) {
  const head = make("thead", {}, make("tr", {}, ...columns.map(([title]) => make("th", { scope: "col" }, title))));
  const body = make("tbody", {}, ...entries.map((entry) =>
    make("tr", {}, ...columns.map(([, name], index) =>
      index === 0 ? make("th", { scope: "row" }, entry[name]) : make("td", {}, whole(entry[name]))
    ))
  ));
  replaceRows(document.getElementById(id), [head, body]);
}

export function showUse({ models, keys }) {
  showTable("models", MODEL_COLUMNS, models);
  document.getElementById("keys-card").hidden = keys.length === 0;
  if (keys.length) showTable("keys", KEY_COLUMNS, keys);
}
