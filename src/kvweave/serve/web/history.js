// What was done to a context: its versions, what changed since each, the way back, and what the last weave cost.

import { call, path } from "./api.js";
import { ago, count, el, plural } from "./dom.js";

const LINES = 60; // versions listed
const CAUSES = 10; // parts told of one by one

/** Fetch and draw; `revert(entry)` is called for a version to come back to. */
export async function past(name, version, revert) {
  const [log, why] = await Promise.all([
    call("GET", `v1/contexts/${path(name)}:log?limit=${LINES}`),
    call("GET", `v1/contexts/${path(name)}:why`),
  ]);
  return [
    el("h4", {}, "History"),
    el("ol", { class: "versions" }, log.data.map((entry) => line(name, entry, entry.version === version, revert))),
    ...causes(why),
  ];
}

function line(name, entry, isNow, revert) {
  const diff = el("p", { class: "diff soft", hidden: true, role: "status" });
  const compare = el("button", {
    type: "button", class: "quiet", "aria-expanded": "false", "aria-label": `What changed since version ${entry.version}`,
    onclick: async () => {
      const open = diff.hidden;
      diff.hidden = !open;
      compare.setAttribute("aria-expanded", String(open));
      if (open) diff.textContent = await changes(name, entry.version);
    },
  }, "Compare");
  const back = el("button", { type: "button", class: "quiet", "aria-label": `Revert to version ${entry.version}`, onclick: () => revert(entry) }, "Revert");
  return el("li", { "aria-current": isNow ? "true" : null },
    el("span", { class: "num" }, `v${entry.version}`),
    el("span", { class: "says" }, entry.says),
    el("span", { class: "soft" }, `${plural(entry.n_tokens, "token")}, ${ago(entry.at)}`),
    el("span", { class: "deeds" }, ...(isNow ? [el("span", { class: "soft" }, "as it is now")] : [compare, back])),
    diff);
}

async function changes(name, since) {
  try {
    const found = await call("GET", `v1/contexts/${path(name)}:diff?from=${since}`);
    const told = ["added", "removed", "moved"].filter((what) => found[what].length)
      .map((what) => `${what}: ${found[what].map((part) => part.name).join(", ")}`);
    return told.length ? `Since version ${since}, ${told.join("; ")}.` : `The parts are those of version ${since}.`;
  } catch (error) {
    return error.message;
  }
}

function causes(why) {
  const touched = why.parts.filter((part) => part.how !== "kept");
  if (!touched.length) return [];
  const costly = [...touched].sort((a, b) => b.n_computed - a.n_computed).slice(0, CAUSES);
  const rest = touched.length - costly.length;
  return [
    el("h4", {}, why.pending ? "Why the next weave costs what it does" : "Why the last weave cost what it did"),
    el("ul", { class: "causes" }, costly.map((part) => el("li", {}, sentence(part.says))),
      rest > 0 ? el("li", { class: "soft" }, `and ${count(rest)} more that were placed anew or are new`) : null),
  ];
}

/** A sentence of the server's: begun large, ended. */
export const sentence = (says) => `${says.charAt(0).toUpperCase()}${says.slice(1)}${says.endsWith(".") ? "" : "."}`;
