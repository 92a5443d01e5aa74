// Closing and removing wait some seconds, in which they can be called off; leaving the page ends the wait.

import { el, find, toast, unhurried } from "./dom.js";

const WAIT = 8000; // ms; longer while somebody points at the notice or is in it
const waiting = new Set();

/**
 * Do something later. says: what is about to happen, and `hint`; done, off: what is said afterwards;
 * act({keepalive}): the request; back(): undo what was shown meanwhile.
 */
export function soon({ says, hint, done, off, act, back }) {
  const stop = () => { waiting.delete(now); halt(); note.remove(); };
  const undo = () => {
    stop();
    back();
    toast(off);
  };
  const now = async (options) => {
    stop();
    try {
      await act(options);
      toast(done);
    } catch (error) {
      back();
      toast(error.message, { hint: error.hint, error: true });
    }
  };
  const note = el("div", { class: "toast later" },
    el("div", {}, el("p", {}, says), el("p", { class: "soft" }, hint)),
    el("span", { class: "deeds" },
      el("button", { type: "button", onclick: undo }, "Undo"),
      el("button", { type: "button", class: "quiet", onclick: () => now() }, "Now")));
  find("toasts").append(note);
  const halt = unhurried(note, WAIT, () => now());
  waiting.add(now);
}

addEventListener("pagehide", () => { for (const now of [...waiting]) now({ keepalive: true }); });
