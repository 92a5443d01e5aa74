// Budgets, counters, charts, and the chunks in store.

import { call, path } from "./api.js";
import { openMenu } from "./card.js";
import { draw } from "./charts.js";
import { bytes, count, el, failed, find, plural, redraw, seconds, toast } from "./dom.js";
import { edit } from "./editor.js";
import { forgetStats } from "./stats.js";
import { HOWS } from "./strip.js";
import { soon } from "./undo.js";

const LISTED = 200;
const leaving = new Set(); // names that are about to be removed

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

/** The last answers, a bar each; a click on one shows its plan. */
export function charts(history, picked, onpick) {
  const reused = history.filter((answer) => answer.kv && Number.isFinite(answer.hit_rate));
  const timed = history.filter((answer) => Number.isFinite(answer.ttft));
  const share = ({ kv }) => {
    const whole = HOWS.reduce((sum, { how }) => sum + (kv[how] ?? 0), 0) || 1;
    return HOWS.map(({ how }) => ({ how, value: (kv[how] ?? 0) / whole }));
  };
  const common = { picked, onpick, empty: "No answers yet." };
  draw(find("hits"), reused, { ...common, top: 1, format: percent, label: "Prompt tokens reused", value: (answer) => answer.hit_rate, layers: share });
  draw(find("ttft"), timed, { ...common, format: seconds, label: "Time to first token", value: ({ ttft }) => ttft, layers: ({ ttft }) => [{ value: ttft, how: "plain" }] });
}

async function act(method, entry, verb, body) {
  try {
    await call(method, `v1/chunks/${path(entry.name)}${verb}`, body);
    forgetStats();
    await chunks();
  } catch (error) { failed(error); }
}

/** Remove a name in some seconds; until then it is only out of sight. */
function remove({ name }) {
  leaving.add(name);
  chunks().catch(failed);
  const back = () => { leaving.delete(name); chunks().catch(failed); };
  soon({
    says: `Removing ${name}.`, hint: "Its KV is freed where nothing else holds it.",
    done: `${name} is removed.`, off: `${name} stays.`, back,
    act: async (options) => {
      await call("DELETE", `v1/chunks/${path(name)}`, undefined, options);
      forgetStats();
      back();
    },
  });
}

function chunkMenu(at, entry, chosen) {
  const context = chosen();
  openMenu(at, [
    [entry.pinned ? "Unpin" : "Pin", () => act("POST", entry, entry.pinned ? ":unpin" : ":pin", {})],
    ...(context ? [[`Append to ${context.name}`, () => context.change(`Appended ${entry.name}`, "append", { chunk: entry.name })
      .then((made) => made && toast(`${entry.name} stands at the end of ${context.name}`))]] : []),
    ["Remove", () => remove(entry), "the name, and its KV when nothing else holds it"],
  ], null, `Actions on ${entry.name}`);
}

let chosenContext = () => null;

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
    found = (await call("GET", `v1/chunks?${query}`, undefined, { signal })).data;
  } catch (error) {
    if (error.status !== 404) throw error; // a name that is not there (yet)
  }
  found = found.filter(({ name }) => !leaving.has(name));
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

/** Wire the list of chunks; `chosen()` gives the card of the context the chat is in. */
export function start({ chosen }) {
  chosenContext = chosen;
  let typed = 0;
  find("pattern").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => chunks().catch(failed), 250);
  });
  find("put").addEventListener("click", put);
}
