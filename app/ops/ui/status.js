// The figures: /status.json asked once a second while the page is seen, and drawn.

import { setServed } from "./chat.js";
import { fetchWithKey } from "./key.js";

const INTERVAL = 1000;
const TIMEOUT = 5000;
const MOST_SQUARES = 480;
const LEAST_SECONDS = 20; // that a line is drawn over

const at = (id) => document.getElementById(id);
const show = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const whole = (value) => Math.round(value).toLocaleString("en");

function short(value, unit = "") {
  const prefixes = ["", "k", "M", "G", "T"];
  let power = 0;
  while (value >= 999.5 && power < prefixes.length - 1) { value /= 1000; power += 1; }
  const digits = power === 0 && Number.isInteger(value) ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)}${unit || prefixes[power] ? " " : ""}${prefixes[power]}${unit}`.trim();
}

function rate(value) {
  return value >= 99.5 ? whole(value) : value.toFixed(1);
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}

const bytes = (value) => short(value, "B");

function showState(state) {
  show("state", state.ready ? "ready" : state.reason);
  at("state").className = state.ready ? "pill good" : "pill bad";
}

function showEngine(status) {
  const { engine, models, version } = status;
  show("model", models[0] ?? "Tessera");
  document.title = `${models[0] ?? ""} – Tessera`;
  show("facts", engine
    ? `Tessera ${version} · ${short(engine.num_parameters)} parameters · ${engine.dtype} · ${engine.device_name} · ${whole(engine.max_model_len)} tokens of context`
    : `Tessera ${version}`);
  at("chat").hidden = Boolean(engine) && !engine.generates;
  at("blocks-card").hidden = Boolean(engine) && !engine.generates;
  setServed(models[0] ?? null, status.chat);
  if (!engine) return;
  show("max-running", whole(engine.max_num_seqs));
  const facts = {
    architecture: engine.architecture,
    device: engine.device,
    weights: bytes(engine.weight_bytes),
    "KV cache": bytes(engine.kv_cache_bytes),
    "tokens a step": whole(engine.max_num_batched_tokens),
    ...(models.length > 1 ? { "also called": models.slice(1).join(", ") } : {}),
  };
  const rows = Object.entries(facts).flatMap(([name, value]) => {
    const row = [document.createElement("dt"), document.createElement("dd")];
    row[0].textContent = name;
    row[1].textContent = value;
    return row;
  });
  const text = rows.map((row) => row.textContent).join();
  if (at("engine").dataset.text !== text) {
    at("engine").dataset.text = text;
    at("engine").replaceChildren(...rows);
  }
}

function showBlocks(now, blockSize) {
  const total = now.blocks_used + now.blocks_cached + now.blocks_free;
  const each = Math.ceil(total / MOST_SQUARES) || 1;
  const squares = Math.ceil(total / each);
  const grid = at("blocks");
  while (grid.childElementCount < squares) grid.append(document.createElement("i"));
  while (grid.childElementCount > squares) grid.lastChild.remove();
  // What is there at all is seen, be it less than one square.
  const used = Math.ceil(now.blocks_used / each);
  const cached = Math.min(squares, used + Math.ceil(now.blocks_cached / each));
  [...grid.children].forEach((square, index) => {
    const kind = index < used ? "used" : index < cached ? "cached" : "";
    if (square.className !== kind) square.className = kind;
  });
  for (const kind of ["used", "cached", "free"]) show(`blocks-${kind}`, whole(now[`blocks_${kind}`]));
  const share = total ? `${((100 * now.blocks_used) / total).toFixed(1)} % in use` : "";
  show("blocks-share", share);
  const words = `KV blocks: ${whole(now.blocks_used)} in use, ${whole(now.blocks_cached)} cached, ${whole(now.blocks_free)} free`;
  if (grid.getAttribute("aria-label") !== words) grid.setAttribute("aria-label", words);
  if (blockSize) show("blocks-scale", `a square is ${each > 1 ? `${whole(each)} blocks, ` : ""}${whole(each * blockSize)} tokens`);
}

function drawLine(id, history, name) {
  const most = Math.max(1, ...history.map((point) => point[name]));
  const span = Math.max(LEAST_SECONDS, ...history.map((point) => point.age));
  const points = history.map((point) => [
    120 * (1 - point.age / span),
    31 - (29 * point[name]) / most,
  ]);
  const line = points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join(" L ");
  const [area, stroke] = at(id).children;
  stroke.setAttribute("d", line ? `M ${line}` : "");
  area.setAttribute("d", line ? `M ${points[0][0].toFixed(2)} 32 L ${line} L 120 32 Z` : "");
}

function showFigures(status) {
  const { now, rates, latency, totals, engine, gpu } = status;
  if (now) {
    show("running", whole(now.running));
    show("waiting", whole(now.waiting));
    showBlocks(now, engine?.block_size);
  }
  if (rates) {
    show("generation-rate", rate(rates.generation_tokens));
    show("prompt-rate", rate(rates.prompt_tokens));
    show("request-rate", rate(rates.requests));
  }
  for (const name of ["ttft", "itl", "e2e"]) {
    for (const share of ["p50", "p99"]) show(`${name}-${share}`, seconds(latency?.[name][share] ?? null));
  }
  if (totals) {
    show("total-requests", whole(Object.values(totals.finished).reduce((sum, count) => sum + count, 0)));
    show("total-prompt", whole(totals.prompt_tokens));
    show("total-generation", whole(totals.generation_tokens));
    show("prefix-share", totals.prefix_queries ? `${((100 * totals.prefix_hits) / totals.prefix_queries).toFixed(1)} %` : "–");
    show("preemptions", whole(totals.preemptions));
  }
  drawLine("rate-line", status.history, "generation_tokens");
  drawLine("running-line", status.history, "running");
  at("gpu").hidden = !gpu;
  if (gpu) {
    show("gpu-memory", bytes(gpu.memory_used));
    show("gpu-total", bytes(gpu.memory_total));
    at("gpu-bar").value = gpu.memory_used / gpu.memory_total;
    show("gpu-utilization", gpu.utilization === null ? "–" : `${Math.round(100 * gpu.utilization)} %`);
  }
}

async function refresh() {
  try {
    const response = await fetchWithKey("/status.json", { signal: AbortSignal.timeout(TIMEOUT) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const status = await response.json();
    showState(status.state);
    showEngine(status);
    showFigures(status);
  } catch {
    showState({ ready: false, reason: "no answer from the server" });
  }
}

async function keepRefreshing() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

keepRefreshing();
