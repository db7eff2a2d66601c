// What a screen reader says: short sentences, never an answer token by token.

const MAX_LENGTH = 600;
const region = document.getElementById("announcer");

export function announce(text) {
  region.textContent = text.length > MAX_LENGTH ? `${text.slice(0, MAX_LENGTH)}…` : text;
}
