// Budgets, counters, charts, the last plan, and the chunks in store.

import { call, path } from "./api.js";
import { forgetStats, openMenu } from "./card.js";
import { draw } from "./charts.js";
import { bytes, count, driftOf, el, failed, find, plural, redraw, seconds, toast } from "./dom.js";
import { edit } from "./editor.js";
import { HOWS, howOf, tally } from "./strip.js";

const LISTED = 200;
const SIGN = Object.fromEntries(HOWS.map(({ how, sign }) => [how, sign]));

export function server(status) {
  find("model").textContent = status.model;
  find("model").title = status.model;
  find("namespace").hidden = !status.namespace;
  find("namespace").textContent = status.namespace ? `namespace ${status.namespace}` : "";
  const facts = [["active", status.active], ["waiting", status.waiting], ["contexts", status.contexts], ["chunks", status.chunks]];
  redraw(find("counters"), facts, () => facts.map(([term, n]) => el("div", { data: { hot: term === "waiting" && n > 0 } },
    el("dt", {}, n === 1 ? term.replace(/s$/, "") : term), el("dd", {}, count(n)))));
}

export function budgets(rows) {
  redraw(find("budgets").querySelector(".bars"), rows, () => {
    if (!rows.some((row) => row.used || row.budget)) return el("p", { class: "empty" }, "Nothing stored yet.");
    return rows.map(({ tier, used, budget }) => {
      const fill = el("i");
      fill.style.width = `${budget ? Math.min(100, (100 * used) / budget) : 0}%`;
      const full = budget ? used / budget : 0;
      const says = budget ? `${bytes(used)} of ${bytes(budget)}` : bytes(used);
      return el("div", { class: "budget" }, el("span", { class: "tier-name" }, tier),
        el("span", { class: "meter", role: "meter", "aria-label": `KV in ${tier}`, "aria-valuemin": 0, "aria-valuemax": budget ?? used, "aria-valuenow": used, "aria-valuetext": says, data: { full: full > 0.9, open: !budget } }, fill),
        el("span", { class: "num" }, says));
    });
  });
}

const percent = (value) => `${Math.round(100 * value)} %`;

export function charts(history) {
  const points = (key) => history.filter((h) => Number.isFinite(h[key])).map((h) => ({ time: h.time, value: h[key] }));
  draw(find("hits"), points("hit_rate"), { top: 1, format: percent, label: "Prompt tokens reused", empty: "No answers yet." });
  draw(find("ttft"), points("ttft"), { format: seconds, label: "Time to first token", empty: "No answers yet." });
}

const COLUMNS = ["part", "id", "tokens", "how", "from", "at", "moved", "repaired", "prefilled"];

function cells(span) {
  const how = howOf(span);
  return [
    el("th", { scope: "row", title: span.part }, span.part, span.saw?.length ? el("span", { class: "soft" }, ` saw ${span.saw.map((id) => `#${id}`).join(" ")}`) : null),
    el("td", {}, `#${span.id}`), el("td", {}, count(span.n_tokens)),
    el("td", { class: "how" }, el("span", { class: "key-box", data: { how } }), `${SIGN[how]} ${how}${span.patched ? ", patched" : ""}`),
    el("td", {}, span.tier), el("td", {}, count(span.position)),
    el("td", {}, span.moved ? `${span.moved > 0 ? "+" : ""}${count(span.moved)}` : "-"),
    el("td", {}, span.n_repaired ? `${count(span.n_repaired)} (${Math.round((100 * span.n_repaired) / span.n_tokens)} %)` : "-"),
    el("td", {}, span.n_prefilled ? count(span.n_prefilled) : "-"),
  ];
}

export function plan(found, of = "") {
  find("plan-of").textContent = found ? [of, `strategy ${found.strategy}`, plural(found.n_tokens, "token"), driftOf(found)].filter(Boolean).join(", ") : "";
  redraw(find("plan"), found, () => {
    if (!found) return el("p", { class: "empty" }, "No answer yet. After one, this says where the KV of each chunk came from.");
    return [
      el("p", { class: "tallies" }, tally(found)),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Plan, part by part" }, el("table", {},
        el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, found.spans.map((span) => el("tr", {}, cells(span)))))),
    ];
  });
}

async function act(method, entry, verb, body) {
  try {
    await call(method, `v1/chunks/${path(entry.name)}${verb}`, body);
    forgetStats();
    await chunks();
  } catch (error) { failed(error); }
}

function chunkMenu(at, entry, chosen) {
  const context = chosen();
  openMenu(at, [
    [entry.pinned ? "Unpin" : "Pin", () => act("POST", entry, entry.pinned ? ":unpin" : ":pin", {})],
    ...(context ? [[`Append to ${context}`, () => call("POST", `v1/contexts/${path(context)}:append`, { chunk: entry.name })
      .then(() => toast(`${entry.name} stands at the end of ${context}`), failed)]] : []),
    ["Remove", () => act("DELETE", entry, ""), "the name, and its KV when nothing else holds it"],
  ], null, `Actions on ${entry.name}`);
}

let chosenContext = () => "";

function row(entry) {
  const more = el("button", { type: "button", class: "quiet", "aria-haspopup": "menu", "aria-label": `Actions on ${entry.name}`, onclick: () => chunkMenu(more, entry, chosenContext) }, "…");
  return el("tr", {},
    el("th", { scope: "row", title: entry.name }, entry.pinned ? el("span", { class: "pin", role: "img", "aria-label": "pinned" }) : null, entry.name),
    el("td", {}, `#${entry.id}`), el("td", {}, entry.kind), el("td", {}, count(entry.n_tokens)),
    el("td", {}, entry.tier), el("td", {}, bytes(entry.n_bytes)), el("td", {}, count(entry.n_uses)), el("td", {}, more));
}

function noChunks(pattern) {
  if (pattern) return el("p", { class: "empty" }, `No name matches ${pattern}`);
  return el("div", { class: "guide" }, el("p", {}, "No chunks in store. Put one here, or from a shell:"),
    el("pre", {}, `kvweave put docs/faq faq.md --url ${location.origin}`));
}

/** A word finds all names with it; a glob, `docs/` and `#17` are taken as they are. */
function patternOf(typed) {
  if (!typed || /[*?[\]{}]/.test(typed) || typed.startsWith("#")) return typed;
  return typed.endsWith("/") ? `${typed}**` : `**${typed}**`;
}

/** Ask for the stored chunks that match the pattern, the largest first. */
export async function chunks(signal) {
  const pattern = find("pattern").value.trim();
  const query = new URLSearchParams({ sort: "n_tokens", reverse: "true", limit: String(LISTED), pattern: patternOf(pattern) });
  let found = [];
  try {
    found = (await call("GET", `v1/chunks?${query}`, undefined, signal)).data;
  } catch (error) {
    if (error.status !== 404) throw error; // a name that is not there (yet)
  }
  find("n-chunks").textContent = found.length >= LISTED ? `the largest ${LISTED}` : found.length ? count(found.length) : "";
  const shown = found.map(({ last_used, created, ...rest }) => rest);
  redraw(find("stored"), [shown, pattern], () => {
    if (!found.length) return noChunks(pattern);
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Stored chunks" }, el("table", {},
      el("thead", {}, el("tr", {}, ["name", "id", "kind", "tokens", "tier", "bytes", "uses", ""].map((name) => el("th", { scope: "col" }, name || el("span", { class: "sr" }, "actions"))))),
      el("tbody", {}, found.map(row))));
  });
}

async function put() {
  const made = await edit({ title: "Put a chunk", name: "docs/", text: "", note: "Its KV is computed once, and reused wherever the chunk stands." });
  if (!made) return;
  try {
    const entry = await call("PUT", `v1/chunks/${path(made.name)}`, { text: made.text });
    toast(`${entry.name} is #${entry.id}`, { hint: `${plural(entry.n_tokens, "token")}, ${bytes(entry.n_bytes)}` });
    await chunks();
  } catch (error) { failed(error); }
}

/** Wire the list of chunks; `chosen()` names the context the chat is in. */
export function start({ chosen }) {
  chosenContext = chosen;
  let typed = 0;
  find("pattern").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => chunks().catch(failed), 250);
  });
  find("put").addEventListener("click", put);
}
