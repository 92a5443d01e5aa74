// What the server knows of a chunk: asked for once in a while, its words once.

import { call, path } from "./api.js";

const FRESH = 10000; // ms; the text stays what it is, the bytes may not
const stats = new Map(); // chunk id -> its stat with text, as a promise, and when it was asked for
const texts = new Map(); // chunk id -> the first words of its text; it never changes

export const forgetStats = () => stats.clear();

export function statOf(id) {
  const known = stats.get(id);
  if (known && Date.now() - known.at < FRESH) return known.asked;
  const asked = call("GET", `v1/chunks/${path(`#${id}`)}?text=true`);
  asked.catch(() => stats.delete(id));
  stats.delete(id);
  stats.set(id, { asked, at: Date.now() });
  if (stats.size > 500) stats.delete(stats.keys().next().value);
  return asked;
}

/** Give `then` the first words of a chunk, at once when they are known. */
export function wordsOf(id, then) {
  if (texts.has(id)) return then(texts.get(id));
  return statOf(id).then(({ text }) => {
    const words = (text ?? "").replace(/\s+/g, " ").trim().slice(0, 120);
    texts.set(id, words);
    if (texts.size > 2000) texts.delete(texts.keys().next().value);
    then(words);
  }, () => {});
}
