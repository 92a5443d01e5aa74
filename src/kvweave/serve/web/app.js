// Wires the page: the theme, the key, and a round of questions every two seconds while it is seen.

import { all, call, getKey, setKey } from "./api.js";
import * as chat from "./chat.js";
import * as contexts from "./contexts.js";
import { failed, find } from "./dom.js";
import * as gate from "./gate.js";
import * as panels from "./panels.js";
import * as plans from "./plans.js";
import { know } from "./saving.js";
import { legend } from "./strip.js";

const ROUND = 2000; // ms
const LONGEST = 15000;
const SAYS = { 0: "no answer, trying again", 429: "busy, trying again", 503: "stopping" };

let timer = 0;
let pause = ROUND;
let chosen = "";
let round = null; // AbortController of the round under way
let history = [];
let charted = ""; // what the charts show

function live(state, says) {
  find("live").dataset.state = state;
  if (find("live").textContent !== says) find("live").textContent = says;
}

/** Draw the charts, unless they are as they were: who points at a bar goes on pointing at it. */
function charts() {
  const key = [history.length, history.at(-1)?.time, plans.picked(), innerWidth].join();
  if (key === charted) return;
  charted = key;
  panels.charts(history, plans.picked(), plans.show);
}

async function take(status) {
  history = status.history;
  know(history);
  panels.server(status);
  panels.budgets(status.budgets);
  await plans.update(history);
  charts();
}

function list(summaries) {
  contexts.update(summaries);
  chat.offer(summaries.map(({ name }) => name).filter((name) => !contexts.isLeaving(name)));
}

async function ask() {
  round?.abort();
  round = new AbortController();
  const { signal } = round;
  const [status, summaries] = await Promise.all([
    call("GET", "v1/status", undefined, { signal }),
    all("v1/contexts", { signal }),
    panels.chunks(signal),
  ]);
  gate.open();
  await take(status);
  list(summaries);
  await contexts.refresh(signal);
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return live("paused", "paused");
  try {
    await ask();
    pause = ROUND;
    live("on", "live");
  } catch (error) {
    if (error.name === "AbortError") return;
    pause = Math.min(LONGEST, pause * 1.6);
    if (error.status === 401) {
      live("off", getKey() ? "this key is not known" : "needs an API key");
      return gate.close(Boolean(getKey())); // and ask no more until there is another
    }
    live("off", SAYS[error.status] ?? "error, trying again");
    if (![0, 429, 503].includes(error.status)) failed(error);
  }
  timer = setTimeout(poll, pause);
}

function theme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  const show = () => { find("theme").textContent = now() === "dark" ? "Light" : "Dark"; };
  find("theme").addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    try { localStorage.setItem("kvweave.theme", root.dataset.theme); } catch { /* not kept, then */ }
    show();
  });
  dark.addEventListener("change", show);
  show();
}

function key() {
  find("key").value = getKey();
  const take = (event) => {
    event.preventDefault();
    use(find("key").value);
  };
  find("key-form").addEventListener("submit", take);
  find("key").addEventListener("change", take);
}

function use(given) {
  setKey(given.trim());
  find("key").value = getKey();
  pause = ROUND;
  poll();
}

function choose(name) {
  chosen = name;
  contexts.choose(name);
}

async function answered(name) {
  const [status, summaries] = await Promise.all([call("GET", "v1/status"), all("v1/contexts")]);
  const n = status.history.findLast(({ context }) => context === name)?.n;
  contexts.update(summaries);
  const card = contexts.cardOf(name);
  card?.settle();
  await take(status);
  const detail = await card?.refresh();
  return { parts: detail?.parts, show: n && (() => plans.show(n)) };
}

find("legend").append(...legend());
theme();
key();
chat.start({ chosen: choose, done: answered });
contexts.start({ choose: chat.turnTo, gone: chat.mark, left: chat.offer });
panels.start({ chosen: () => contexts.cardOf(chosen) });
plans.start({ chosen: charts });
gate.start(use);
document.addEventListener("visibilitychange", poll);
addEventListener("resize", charts);
poll();
