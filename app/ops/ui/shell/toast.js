// A line at the bottom that says what was done, and may undo it.

import { announce } from "./announcer.js";

const SECONDS = 8;
const toast = document.getElementById("toast");
const words = document.getElementById("toast-text");
const button = document.getElementById("toast-undo");

let timer = null;
let undo = null;

/** Show a sentence; `onUndo` is offered as a button. */
export function showToast(text, onUndo = null) {
  clearTimeout(timer);
  undo = onUndo;
  words.textContent = text;
  button.hidden = onUndo === null;
  toast.hidden = false;
  announce(text);
  timer = setTimeout(hide, 1000 * SECONDS);
}

function hide() {
  toast.hidden = true;
  undo = null;
}

button.addEventListener("click", () => {
  undo?.();
  hide();
});
