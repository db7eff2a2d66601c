// Asks the server for its figures while the page is seen: often for the dashboard, seldom for the chat.

import { make } from "../dom/element.js";
import { fetchWithKey } from "../shell/key.js";
import { currentView, onView } from "../shell/views.js";
import { drawHour } from "./charts.js";
import { showEngine, showFigures, showState } from "./figures.js";
import { showFineTuning } from "./fine_tuning.js";
import { showUse } from "./use_tables.js";

const INTERVAL = 1000; // milliseconds
const CHAT_INTERVAL = 5000;
const HISTORY_INTERVAL = 15000;
const TIMEOUT = 5000;

let wake = () => {};
let historyTime = -Infinity;
let shown = ""; // name of the model whose figures are shown; empty: the first

const choice = document.getElementById("shown-model");
const choiceLabel = document.getElementById("shown-model-label");

function showModel(name) {
  if (shown === name) return;
  shown = name;
  historyTime = -Infinity;
  if (!name) choice.selectedIndex = 0;
}

async function ask(path) {
  const query = shown ? `?model=${encodeURIComponent(shown)}` : "";
  const response = await fetchWithKey(path + query, { signal: AbortSignal.timeout(TIMEOUT) });
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

/** The models to choose from, where there are several. */
function showChoice(names) {
  choiceLabel.hidden = names.length < 2;
  if ([...choice.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  choice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  choice.value = names.includes(shown) ? shown : names[0];
}

async function refresh(onServed) {
  try {
    const asked = shown;
    const status = await ask("status.json");
    if (asked !== shown) return; // another model was chosen meanwhile
    showState(status.state);
    showEngine(status);
    showChoice(status.default_names);
    if (!shown) {
      onServed({
        models: status.generating_models,
        takesConversations: status.chat,
        generates: status.engine === null || status.engine.generates,
      });
    }
    if (currentView() !== "dashboard") return;
    showFigures(status);
    showUse(status.use);
    showFineTuning(status.fine_tuning);
    if (performance.now() - historyTime >= HISTORY_INTERVAL) {
      historyTime = performance.now();
      drawHour(await ask("status/history.json"));
    }
  } catch {
    showState({ ready: false, reason: "no answer from the server" });
  }
}

/** `onServed({ models, takesConversations, generates })` is told what the server serves. */
export async function startDashboard(onServed) {
  onView((name) => {
    if (name !== "dashboard") showModel("");
    wake();
  });
  choice.addEventListener("change", () => {
    showModel(choice.selectedIndex === 0 ? "" : choice.value);
    wake();
  });
  document.addEventListener("visibilitychange", () => wake());
  for (;;) {
    if (!document.hidden) await refresh(onServed);
    const interval = currentView() === "dashboard" ? INTERVAL : CHAT_INTERVAL;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, interval);
    });
  }
}
