// Light, dark, or as the system is.

const STORED = "tessera-theme";
const THEMES = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const button = document.getElementById("theme");

function apply(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  button.setAttribute("aria-label", THEMES[theme]);
  button.title = THEMES[theme];
  button.querySelector("use").setAttribute("href", `#icon-${theme}`);
}

function stored() {
  const theme = localStorage.getItem(STORED);
  return theme !== null && Object.hasOwn(THEMES, theme) ? theme : "system";
}

button.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(stored()) + 1) % names.length];
  localStorage.setItem(STORED, next);
  apply(next);
});
apply(stored());
