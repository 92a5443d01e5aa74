// The list of contexts: those with a name of their own first, those of OpenAI's clients in a fold behind them.

import { call } from "./api.js";
import { closeMenu } from "./card.js";
import { Card } from "./context.js";
import { count, el, find, isAuto } from "./dom.js";
import { soon } from "./undo.js";

const SHOWN = 24; // cards drawn; the rest waits behind a button
const PER_ROUND = 6; // contexts asked for in one round of polling

const cards = new Map(); // name -> Card
const leaving = new Set(); // names that are about to be closed
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) target.dataset.inview = isIntersecting;
});
let known = []; // summaries of the last round
let limit = SHOWN;
let chosen = "";
let on = {};

const autos = el("details", { class: "autos", hidden: true },
  el("summary", {}, "From OpenAI clients ", el("span", { class: "count" })),
  el("p", { class: "soft" }, "The server named these itself; each holds what one conversation has in store."), el("div", {}));

/** Close a context in some seconds; until then it is only out of sight. */
function close(card) {
  const { name, version } = card;
  const again = () => { leaving.delete(name); update(known); on.left(known.map((each) => each.name)); };
  leaving.add(name);
  update(known);
  on.left(known.map((each) => each.name).filter((each) => !leaving.has(each)));
  soon({
    says: `Closing ${name}.`, hint: "Its rows are freed in a few seconds; names of chunks stay.",
    done: `${name} is closed.`, off: `${name} stays open.`,
    act: async (options) => {
      await call("DELETE", card.url(), undefined, { version, ...options });
      known = known.filter((each) => each.name !== name);
      leaving.delete(name);
      update(known);
    },
    back: again,
  });
}

function remove(name) {
  const card = cards.get(name);
  if (!card) return;
  if (card.box.contains(document.activeElement)) {
    closeMenu();
    find("contexts").focus({ preventScroll: true });
  }
  seen.unobserve(card.box);
  card.box.remove();
  cards.delete(name);
}

function guide() {
  return el("div", { class: "guide" },
    el("p", {}, "No contexts yet. Write a message in the chat, or point an OpenAI client at"),
    el("pre", {}, `${location.origin}/v1`));
}

/** Draw the list. listeners: choose(name), gone(name, parts), left(names) when one is closed or is back. */
export function start(listeners) {
  on = listeners;
  find("list").append(autos);
}

export function choose(name) {
  chosen = name;
  for (const card of cards.values()) card.box.classList.toggle("chosen", card.name === name);
}

export const cardOf = (name) => cards.get(name);
export const isLeaving = (name) => leaving.has(name);

function made(name) {
  const card = new Card(name, { ...on, close });
  cards.set(name, card);
  seen.observe(card.box);
  return card;
}

/** Put cards into a box in this order, moving none that stands where it should: focus would be lost. */
function arrange(box, summaries) {
  let before = null;
  for (const summary of summaries) {
    const card = cards.get(summary.name) ?? made(summary.name);
    const there = before ? before.nextElementSibling : box.firstElementChild;
    if (there !== card.box) box.insertBefore(card.box, there);
    card.summary(summary);
    before = card.box;
  }
}

export function update(summaries) {
  known = summaries;
  const list = find("list");
  const open = summaries.filter(({ name }) => !leaving.has(name));
  const ranked = [...open].sort((a, b) => (b.name === chosen) - (a.name === chosen) || isAuto(a.name) - isAuto(b.name));
  const names = new Set(ranked.slice(0, limit).map(({ name }) => name));
  for (const name of [...cards.keys()]) if (!names.has(name)) remove(name);
  list.querySelector(".guide")?.remove();
  list.querySelector(".rest")?.remove();
  find("n-contexts").textContent = open.length ? count(open.length) : "";
  const drawn = open.filter(({ name }) => names.has(name));
  const ours = drawn.filter(({ name }) => !isAuto(name));
  const theirs = drawn.filter(({ name }) => isAuto(name));
  arrange(list, ours);
  arrange(autos.lastElementChild, theirs);
  autos.querySelector(".count").textContent = count(open.filter(({ name }) => isAuto(name)).length);
  if (theirs.length && autos.hidden) autos.open = !ours.length;
  autos.hidden = !theirs.length;
  if (!open.length) list.append(guide());
  const rest = open.length - names.size;
  if (rest > 0) list.append(el("button", { type: "button", class: "rest quiet", onclick: () => { limit += SHOWN; update(known); } }, `${count(rest)} more`));
  choose(chosen);
}

/** Ask again for the contexts in view, those asked longest ago first. */
export async function refresh(signal) {
  const inView = [...cards.values()].filter((card) => card.box.dataset.inview !== "false");
  const turn = inView.sort((a, b) => a.asked - b.asked).slice(0, PER_ROUND);
  await Promise.all(turn.map((card) => card.refresh(signal).catch((error) => {
    if (error.status !== 404) throw error;
  })));
}
