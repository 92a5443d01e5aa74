// What stands in place of the panels while the server wants a key: how to come by one, and where it goes.

import { el, find } from "./dom.js";

function words(known) {
  return [
    el("p", {}, known ? "The server does not know this key. Look for a space or a letter too many, or take another."
      : "Paste yours. It stays in this tab, and is sent to this server only."),
    el("details", {}, el("summary", {}, "Where to get one"),
      el("p", {}, "Who runs the server has it: a line KEY:NAMESPACE in the file given to"),
      el("pre", {}, "kvweave serve MODEL --keys FILE"),
      el("p", {}, "A key opens the chunks and contexts of its namespace, nothing else. A shell takes it like this:"),
      el("pre", {}, `export KVWEAVE_URL=${location.origin}\nexport KVWEAVE_KEY=...\nkvweave ls`)),
  ];
}

/** Hide the panels and ask. wrong: a key was given, and is not known. */
export function close(wrong) {
  document.body.dataset.locked = "true";
  find("gate").hidden = false;
  find("gate-words").replaceChildren(...words(wrong));
  find("gate-key").setAttribute("aria-invalid", String(wrong));
  find("gate-key").focus();
}

export function open() {
  if (find("gate").hidden) return;
  delete document.body.dataset.locked;
  find("gate").hidden = true;
  find("gate-key").value = "";
}

/** Wire the form; `use(key)` tries a key. */
export function start(use) {
  find("gate-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(find("gate-key").value);
  });
}
