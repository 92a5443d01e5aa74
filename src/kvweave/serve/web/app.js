// Wires the page: the theme, the key, and a round of questions every two seconds while it is seen.

import { call, getKey, setKey } from "./api.js";
import * as chat from "./chat.js";
import * as contexts from "./contexts.js";
import { failed, find } from "./dom.js";
import * as panels from "./panels.js";
import { legend } from "./strip.js";

const ROUND = 2000; // ms
const LONGEST = 15000;
const SAYS = { 0: "no answer, trying again", 429: "busy, trying again", 503: "stopping" };

let timer = 0;
let pause = ROUND;
let chosen = "";
let round = null; // AbortController of the round under way
let history = [];
let mine = { plan: "", name: "" }; // the last answer in the chat

function live(state, says) {
  find("live").dataset.state = state;
  if (find("live").textContent !== says) find("live").textContent = says;
}

async function ask() {
  round?.abort();
  round = new AbortController();
  const { signal } = round;
  const [status, list] = await Promise.all([
    call("GET", "v1/status", undefined, signal),
    call("GET", "v1/contexts", undefined, signal),
    panels.chunks(signal),
  ]);
  const plan = status.last_plan;
  history = status.history;
  panels.server(status);
  panels.budgets(status.budgets);
  panels.charts(history);
  panels.plan(plan, plan && JSON.stringify(plan) === mine.plan ? mine.name : "");
  contexts.update(list.data);
  chat.offer(list.data.map(({ name }) => name));
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
      find("key-form").classList.add("wanted");
    } else {
      live("off", SAYS[error.status] ?? "error, trying again");
      if (![0, 429, 503].includes(error.status)) failed(error);
    }
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
    setKey(find("key").value.trim());
    find("key-form").classList.remove("wanted");
    pause = ROUND;
    poll();
  };
  find("key-form").addEventListener("submit", take);
  find("key").addEventListener("change", take);
}

function choose(name) {
  chosen = name;
  contexts.choose(name);
}

async function answered(name, plan) {
  if (plan) {
    mine = { plan: JSON.stringify(plan), name };
    panels.plan(plan, name);
  }
  contexts.update((await call("GET", "v1/contexts")).data);
  const card = contexts.cardOf(name);
  card?.settle();
  const detail = await card?.refresh();
  return detail?.parts;
}

find("legend").append(...legend());
theme();
key();
chat.start({ chosen: choose, done: answered });
contexts.start({ choose: chat.turnTo, gone: chat.mark });
panels.start({ chosen: () => chosen });
document.addEventListener("visibilitychange", poll);
addEventListener("resize", () => panels.charts(history));
poll();
