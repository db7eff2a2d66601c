// The API key, where the server wants one: asked for once, kept in this tab's session storage.

const STORED = "tessera-api-key";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key");
const note = document.getElementById("key-note");
const forget = document.getElementById("forget-key");

let asking = null;

function headers() {
  const key = sessionStorage.getItem(STORED);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Like `fetch` of a path below the page's own address, with the key; asks for one until the server takes it. */
export async function fetchWithKey(path, options = {}) {
  for (;;) {
    const sent = headers();
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...sent } });
    if (response.status !== 401) {
      forget.hidden = !sent.authorization;
      return response;
    }
    if (sent.authorization === headers().authorization) sessionStorage.removeItem(STORED);
    await ask(Boolean(sent.authorization));
  }
}

function ask(wasWrong) {
  asking ??= new Promise((resolve) => {
    if (wasWrong) note.textContent = "The server did not take that key. Try another.";
    input.value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => { asking = null; resolve(); }, { once: true });
  });
  return asking;
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // What no header can carry is no key.
  if (!/^[\x21-\x7e]+$/.test(input.value.trim())) {
    note.textContent = "A key has only letters, digits and signs, and no spaces.";
    return;
  }
  sessionStorage.setItem(STORED, input.value.trim());
  dialog.close();
});
forget.addEventListener("click", () => {
  sessionStorage.removeItem(STORED);
  location.reload();
});
