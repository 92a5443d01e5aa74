// One dialog for a name, a text, or both.

import { find } from "./dom.js";

/** Ask; returns {name, text}, or null when the dialog is cancelled. Leave out what is not asked. */
export function edit({ title, name, text, note = "" }) {
  const dialog = find("editor");
  const nameField = find("editor-name");
  const textField = find("editor-text");
  find("editor-title").textContent = title;
  find("editor-note").textContent = note;
  find("editor-name-row").hidden = name === undefined;
  textField.parentElement.hidden = text === undefined;
  nameField.required = name !== undefined;
  textField.required = text !== undefined;
  nameField.value = name ?? "";
  textField.value = text ?? "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  (name === undefined ? textField : nameField).focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "ok" ? { name: nameField.value.trim(), text: textField.value } : null);
    }, { once: true });
  });
}
