// One context: its headline, its strip, why it is so, what an edit costs, and the way back.

import { call, path } from "./api.js";
import { openMenu, peek, unpeek } from "./card.js";
import { count, driftOf, el, failed, plural, redraw, seconds, toast } from "./dom.js";
import { edit } from "./editor.js";
import { past, sentence } from "./history.js";
import { words } from "./saving.js";
import { forgetStats, statOf } from "./stats.js";
import { split, strip, tally } from "./strip.js";

const short = (n) => Number(n.toPrecision(2));

/**
 * The parts as they are drawn: what the last weave made of them, and, from the first part on that was
 * edited since, what the next one would.
 */
export function drawn({ parts, plan }) {
  let same = true;
  return parts.map((part, index) => {
    const span = plan?.spans[index];
    same = same && Boolean(span) && span.id === part.id && span.position === part.position
      && span.n_tokens === part.n_tokens && !part.n_prefilled;
    if (!same) return part;
    const { how, exact, n_repaired, n_prefilled, moved, saw, patched } = span;
    const tier = span.tier === "-" ? part.tier : span.tier;
    return { ...part, how, exact, n_repaired, n_prefilled, moved, saw, patched, tier };
  });
}

/** What the answers cost, in a sentence; nothing before there is one. */
function spent(ledger) {
  if (!ledger?.answers) return "";
  const { answers, unknown, nats } = ledger;
  if (unknown === answers) return `Ledger: what ${plural(answers, "answer")} cost is unknown.`;
  const known = `${plural(answers - unknown, "answer")} cost at most ${nats ? nats.toPrecision(2) : 0} nats`;
  return `Ledger: ${known}${unknown ? `; of ${unknown} it is unknown` : ""}.`;
}

export class Card {
  /** on: {choose, gone, close}: the chat goes there; what an edit left; it shall be closed. */
  constructor(name, on) {
    this.name = name;
    this.on = on;
    this.parts = [];
    this.causes = new Map(); // uid -> why the part is as it is
    this.asked = 0;
    this.title = el("button", { type: "button", class: "link", onclick: () => on.choose(name) }, name);
    this.facts = el("span", { class: "count" });
    this.turn = el("button", { type: "button", class: "quiet", "aria-expanded": "false", "aria-label": `History of ${name}`, onclick: () => this.unfold() }, "History");
    this.more = el("button", { type: "button", class: "quiet", "aria-haspopup": "menu", "aria-label": `Actions on ${name}`, onclick: () => this.menu() }, "…");
    this.saving = el("p", { class: "saving" });
    this.body = el("div", { class: "body" }, el("p", { class: "empty" }, "…"));
    this.why = el("p", { class: "why soft" });
    this.nats = el("p", { class: "nats soft", hidden: true });
    this.cost = el("div", { class: "cost", role: "status", hidden: true });
    this.past = el("section", { class: "past", "aria-label": `History of ${name}`, hidden: true });
    this.box = el("article", { class: "context", "aria-label": `Context ${name}`, data: { name } },
      el("div", { class: "line" }, el("h3", {}, this.title), this.facts, el("span", { class: "deeds" }, this.turn, this.more)),
      this.saving, this.body, this.why, this.nats, this.cost, this.past);
  }

  url(verb = "") {
    return `v1/contexts/${path(this.name)}${verb && `:${verb}`}`;
  }

  summary({ n_tokens, n_parts, busy }) {
    this.facts.textContent = `${plural(n_tokens, "token")} in ${plural(n_parts, "chunk")}${busy ? ", answering" : ""}`;
    this.box.classList.toggle("busy", Boolean(busy));
  }

  async refresh(signal) {
    this.asked = Date.now();
    const detail = await call("GET", this.url(), undefined, { signal });
    this.show(detail);
    const key = JSON.stringify([detail.version, detail.plan, detail.parts.map(({ how }) => how)]);
    if (key !== this.told) {
      this.tell(await call("GET", this.url("why"), undefined, { signal }));
      this.told = key;
      if (!this.past.hidden) await this.recall();
    }
    const [large, small] = words(this.name, detail.plan, this.woven);
    redraw(this.saving, [large, small], () => large && [el("strong", {}, large), " ", el("span", { class: "soft" }, small)]);
    return detail;
  }

  /** An answer was given: what an edit would have cost is no more. */
  settle() {
    this.cost.hidden = true;
  }

  show(detail) {
    this.parts = detail.parts;
    this.nats.textContent = spent(detail.ledger);
    this.nats.hidden = !this.nats.textContent;
    this.version = detail.version;
    const focused = [...this.body.querySelectorAll(".chunk")].indexOf(document.activeElement);
    redraw(this.body, drawn(detail), (parts) => {
      if (!parts.length) return el("p", { class: "empty" }, "No chunks yet. Write to it in the chat.");
      const onpeek = (part, at) => peek({ ...part, why: this.causes.get(part.uid) }, at);
      const { list, items } = strip(this.name, parts, { onopen: (part, at) => this.open(part, at), onpeek, onleave: unpeek });
      if (focused >= 0) queueMicrotask(() => items[Math.min(focused, items.length - 1)].focus());
      return list;
    });
  }

  tell(why) {
    this.woven = !(why.pending && why.since === null);
    this.causes = new Map(why.parts.map((part) => [part.uid, part.says]));
    this.why.textContent = why.n_tokens ? `${why.pending ? "Next weave" : "Last weave"}: ${sentence(why.says)}` : "";
  }

  async unfold() {
    const open = this.past.hidden;
    this.past.hidden = !open;
    this.turn.setAttribute("aria-expanded", String(open));
    if (open) await this.recall();
  }

  async recall() {
    const revert = ({ version, says }) => this.change(`Reverted to version ${version} (${says})`, "revert", { to: version });
    try {
      const lines = await past(this.name, this.version, revert);
      const focused = this.past.contains(document.activeElement);
      this.past.replaceChildren(...lines);
      if (focused) this.turn.focus();
    } catch (error) { failed(error); }
  }

  open(part, at) {
    const version = this.version; // what is seen now; the strip may change behind the menu
    openMenu(at, [
      ["Drop", () => this.drop(part, "forget", version), "forget: as if never there"],
      ["Drop, keep its trace", () => this.drop(part, "evict", version), "evict: only its memory goes"],
      [part.pinned ? "Unpin" : "Pin", () => this.pin(part)],
      ["Replace text…", () => this.replace(part, version)],
      ["Amend…", () => this.amend(part, version), "a correction, at the end"],
    ], { ...part, why: this.causes.get(part.uid) });
  }

  menu() {
    openMenu(this.more, [
      ["Weave now", () => this.weave()],
      ["Make exact", () => this.refine(), "recomputes what is approximate"],
      ["Check against a full prefill", () => this.check(), "costs that prefill"],
      ["Fork…", () => this.fork()],
      ["Close", () => this.on.close(this)],
    ], null, `Actions on ${this.name}`);
  }

  /**
   * Send an edit of the version that was seen, then show the strip as it is now and what the next
   * answer would cost. Returns whether it was done: not when somebody else was first.
   */
  async change(what, verb, body, version = this.version, back = "Undo") {
    try {
      const before = await call("POST", this.url("preview"), {});
      await call("POST", this.url(verb), body, { version });
      const [after] = await Promise.all([call("POST", this.url("preview"), {}), this.refresh()]);
      const undo = () => this.change(back === "Undo" ? `Taken back: ${what.toLowerCase()}` : `Done again: ${what.toLowerCase()}`, "revert", { to: version }, this.version, back === "Undo" ? "Redo" : "Undo");
      this.price(what, after, before, [back, undo]);
      this.on.gone(this.name, this.parts);
      return true;
    } catch (error) {
      if (error.status === 412) {
        await this.refresh().catch(failed);
        toast(`${this.name} was changed by somebody else meanwhile.`, { hint: "Nothing was done; the strip shows it as it is now.", error: true });
      } else failed(error);
      return false;
    }
  }

  drop(part, mode, version) {
    return this.change(`Dropped ${part.name} (${mode})`, "drop", { parts: [{ uid: part.uid }], mode }, version);
  }

  async pin(part) {
    const verb = part.pinned ? "unpin" : "pin";
    try {
      await call("POST", `v1/chunks/${path(`#${part.id}`)}:${verb}`, {});
      forgetStats();
      await this.refresh();
    } catch (error) { failed(error); }
  }

  async replace(part, version) {
    const stat = await statOf(part.id).catch(() => ({ text: "" }));
    const note = "What stands behind it is woven anew; its KV is reused or repaired.";
    return this.write(part, version, ["Replace", "Replaced", "replace"], stat.text ?? "", note);
  }

  amend(part, version) {
    const note = "A correction at the end of the context. What it corrects stays, and can still be read.";
    return this.write(part, version, ["Amend", "Amended", "amend"], "", note);
  }

  async write(part, version, [title, done, verb], text, note) {
    for (;;) { // what was written is not lost when somebody else was first
      const made = await edit({ title: `${title} ${part.name}`, text, note });
      if (!made || await this.change(`${done} ${part.name}`, verb, { part: { uid: part.uid }, text: made.text }, version)) return;
      ({ text } = made);
      ({ version } = this);
      note = `It was not ${done.toLowerCase()}: the context is another now. Save again, or cancel.`;
    }
  }

  async weave() {
    try {
      const plan = await call("POST", this.url("weave"), {});
      await this.refresh();
      this.price("Woven", plan);
    } catch (error) { failed(error); }
  }

  async refine() {
    try {
      const { refined, exact } = await call("POST", this.url("refine"), {});
      await this.refresh();
      toast(`${this.name} is ${exact ? "" : "not yet "}that of a full prefill`, { hint: `${plural(refined, "row")} recomputed` });
    } catch (error) { failed(error); }
  }

  async check() {
    const started = performance.now();
    try {
      const found = await call("POST", this.url("check"), {});
      const says = `KL ${short(found.kl)} nats (largest ${short(found.kl_max)}), same first choice ${Math.round(100 * found.top1)} %`;
      const over = `over ${plural(found.n_compared, "prediction")}, measured in ${seconds((performance.now() - started) / 1000)}`;
      toast(`${this.name} against a full prefill: ${says}`, { hint: over });
    } catch (error) { failed(error); }
  }

  async fork() {
    const to = await edit({ title: `Fork ${this.name}`, name: `${this.name}-2`, note: "The copy has the same chunks and rows; the two do not affect each other." });
    if (!to) return;
    await call("POST", this.url("fork"), { to: to.name }).then(() => toast(`${to.name} is a copy of ${this.name}`), failed);
  }

  price(what, plan, before = null, undo = null) {
    const grew = before ? plan.prefilled + plan.repaired - before.prefilled - before.repaired : 0;
    const than = before && grew > 0 ? `, ${count(grew)} more than before` : "";
    const focused = this.cost.contains(document.activeElement);
    this.cost.hidden = false;
    this.cost.replaceChildren(el("div", { class: "facts" },
      el("span", { class: "what" }, `${what}.`),
      el("span", { class: "soft" }, before ? `The next weave computes ${plural(plan.prefilled + plan.repaired, "token")} of ${count(plan.n_tokens)}${than}:` : "This weave:"),
      split(plan), ...tally(plan), el("span", { class: "soft" }, driftOf(plan))),
    el("span", { class: "deeds" },
      undo ? el("button", { type: "button", onclick: undo[1] }, undo[0]) : null,
      el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => { this.cost.hidden = true; } }, "×")));
    if (focused) this.cost.querySelector("button").focus();
  }
}
