// Keyboard shortcuts, and the dialog that lists them.

import { make } from "../dom/element.js";
import { showView } from "./views.js";

const help = document.getElementById("shortcuts");
const search = document.getElementById("search");
const HELP = [
  ["Enter", "send the message"],
  ["Shift + Enter", "a new line"],
  ["Esc", "stop the answer"],
  ["/", "write a message"],
  ["↑ in an empty message", "edit the last message"],
  ["Ctrl + K", "search conversations"],
  ["Alt + N", "new conversation"],
  ["Alt + R", "answer again"],
  ["Alt + C", "copy the last answer"],
  ["Alt + S", "settings"],
  ["Alt + 1, Alt + 2", "chat, dashboard"],
  ["?", "this list"],
];

function isField(element) {
  return element.matches("input, textarea, select");
}

/** `setDrawer(open)` shows the list of conversations on small screens. */
export function installShortcuts(chat, setDrawer) {
  const alt = {
    KeyN: () => { showView("chat"); chat.begin(); },
    KeyR: () => chat.regenerateLast(),
    KeyC: () => chat.copyLast(),
    KeyS: () => chat.settings(),
    Digit1: () => showView("chat"),
    Digit2: () => showView("dashboard"),
  };
  const searching = () => {
    showView("chat");
    setDrawer(true);
    search.focus();
    search.select();
  };
  const plain = { "/": () => { showView("chat"); chat.composer.focus(); }, "?": () => help.showModal() };

  function actionFor(event) {
    if (event.isComposing || document.querySelector("dialog[open]")) return null;
    if (event.altKey && !event.ctrlKey && !event.metaKey) return alt[event.code];
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") return searching;
    if (event.key === "Escape") return () => { setDrawer(false); chat.stop(); };
    if (event.ctrlKey || event.metaKey) return null;
    if (event.key === "ArrowUp" && event.target === chat.composer.field && !chat.composer.text) return () => chat.editLast();
    return isField(event.target) ? null : plain[event.key];
  }

  addEventListener("keydown", (event) => {
    const action = actionFor(event);
    if (!action) return;
    event.preventDefault();
    action();
  });
  document.getElementById("help").addEventListener("click", () => help.showModal());
  document.getElementById("shortcut-list").append(
    ...HELP.flatMap(([keys, meaning]) => [make("dt", {}, make("kbd", {}, keys)), make("dd", {}, meaning)])
  );
}
