// The figures of this moment, from /status.json.

import { make } from "../dom/element.js";
import { bytes, percent, rate, seconds, short, whole } from "./numbers.js";

const MOST_SQUARES = 480;
const LEAST_SECONDS = 20; // that a line is drawn over
const UNKNOWN = "–"; // a figure of a model that is not loaded
const NO_BLOCKS = { blocks_used: 0, blocks_cached: 0, blocks_free: 0 };

const at = (id) => document.getElementById(id);
const show = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };

export function showState(state) {
  show("state", state.ready ? "ready" : state.reason);
  at("state").className = state.ready ? "pill good" : "pill bad";
}

export function showEngine({ engine, models, version }) {
  show("model", models[0] ?? "Tessera");
  document.title = `${models[0] ?? ""} – Tessera`;
  show("facts", engine
    ? `Tessera ${version} · ${short(engine.num_parameters)} parameters · ${engine.dtype} · ${engine.device_name} · ${whole(engine.max_model_len)} tokens of context`
    : `Tessera ${version}`);
  at("blocks-card").hidden = Boolean(engine) && !engine.generates;
  show("max-running", engine ? whole(engine.max_num_seqs) : UNKNOWN);
  const facts = !engine ? {} : {
    architecture: engine.architecture,
    device: engine.device,
    weights: bytes(engine.weight_bytes),
    "KV cache": bytes(engine.kv_cache_bytes),
    ...(engine.num_host_kv_blocks ? { "in host memory": `${short(engine.num_host_kv_blocks * engine.block_size)} tokens` } : {}),
    ...(engine.num_disk_kv_blocks ? { "on disk": `${short(engine.num_disk_kv_blocks * engine.block_size)} tokens` } : {}),
    "tokens a step": whole(engine.max_num_batched_tokens),
    ...(models.length > 1 ? { "also served": models.slice(1).join(", ") } : {}),
  };
  const rows = Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  replaceRows(at("engine"), rows);
}

/** Replace children whose text has changed. */
export function replaceRows(element, rows) {
  const text = rows.map((row) => row.textContent).join("\n");
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.replaceChildren(...rows);
}

function showBlocks(now, blockSize) {
  const total = now.blocks_used + now.blocks_cached + now.blocks_free;
  const each = Math.ceil(total / MOST_SQUARES) || 1;
  const squares = Math.ceil(total / each);
  const grid = at("blocks");
  while (grid.childElementCount < squares) grid.append(make("i"));
  while (grid.childElementCount > squares) grid.lastChild.remove();
  // What is there at all is seen, be it less than one square.
  const used = Math.ceil(now.blocks_used / each);
  const cached = Math.min(squares, used + Math.ceil(now.blocks_cached / each));
  [...grid.children].forEach((square, index) => {
    const kind = index < used ? "used" : index < cached ? "cached" : "";
    if (square.className !== kind) square.className = kind;
  });
  for (const kind of ["used", "cached", "free"]) show(`blocks-${kind}`, whole(now[`blocks_${kind}`]));
  show("blocks-share", total ? `${percent(now.blocks_used / total)} in use` : "");
  const words = `KV blocks: ${whole(now.blocks_used)} in use, ${whole(now.blocks_cached)} cached, ${whole(now.blocks_free)} free`;
  if (grid.getAttribute("aria-label") !== words) grid.setAttribute("aria-label", words);
  if (blockSize) show("blocks-scale", `a square is ${each > 1 ? `${whole(each)} blocks, ` : ""}${whole(each * blockSize)} tokens`);
}

function drawLine(id, history, name) {
  const most = Math.max(1, ...history.map((point) => point[name]));
  const span = Math.max(LEAST_SECONDS, ...history.map((point) => point.age));
  const points = history.map((point) => [120 * (1 - point.age / span), 31 - (29 * point[name]) / most]);
  const line = points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join(" L ");
  const [area, stroke] = at(id).children;
  stroke.setAttribute("d", line ? `M ${line}` : "");
  area.setAttribute("d", line ? `M ${points[0][0].toFixed(2)} 32 L ${line} L 120 32 Z` : "");
}

export function showFigures({ now, rates, latency, totals, engine, gpu, history }) {
  show("running", now ? whole(now.running) : UNKNOWN);
  show("waiting", now ? whole(now.waiting) : UNKNOWN);
  showBlocks(now ?? NO_BLOCKS, engine?.block_size);
  show("generation-rate", rates ? rate(rates.generation_tokens) : UNKNOWN);
  show("prompt-rate", rates ? rate(rates.prompt_tokens) : UNKNOWN);
  show("request-rate", rates ? rate(rates.requests) : UNKNOWN);
  for (const name of ["ttft", "itl", "e2e"]) {
    for (const share of ["p50", "p99"]) show(`${name}-${share}`, seconds(latency?.[name][share] ?? null));
  }
  const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
  show("total-requests", totals ? whole(sum(totals.finished)) : UNKNOWN);
  show("total-prompt", totals ? whole(totals.prompt_tokens) : UNKNOWN);
  show("total-generation", totals ? whole(totals.generation_tokens) : UNKNOWN);
  show("prefix-share", totals?.prefix_queries ? percent(totals.prefix_hits / totals.prefix_queries) : UNKNOWN);
  show("preemptions", totals ? whole(totals.preemptions) : UNKNOWN);
  // Of a request: an accepted draft token is one that needed no step of its own.
  const steps = totals ? totals.generation_tokens - (totals.accepted_draft_tokens ?? 0) : 0;
  show("step-tokens", totals?.draft_tokens && steps > 0 ? (totals.generation_tokens / steps).toFixed(2) : UNKNOWN);
  drawLine("rate-line", history, "generation_tokens");
  drawLine("running-line", history, "running");
  at("gpu").hidden = !gpu;
  if (gpu) {
    show("gpu-memory", bytes(gpu.memory_used));
    show("gpu-total", bytes(gpu.memory_total));
    at("gpu-bar").value = gpu.memory_used / gpu.memory_total;
    show("gpu-utilization", gpu.utilization === null ? UNKNOWN : percent(gpu.utilization));
  }
}
