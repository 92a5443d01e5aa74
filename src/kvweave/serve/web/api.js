// Requests to this server: JSON, errors with their hint, and streamed answers.

const KEY = "kvweave.key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? "";
    this.hint = error.hint ?? "";
  }
}

/** A name in a path: its slashes stay, the rest is encoded. */
export const path = (name) => String(name).split("/").map(encodeURIComponent).join("/");

async function send(method, url, body, { signal, version, keepalive } = {}) {
  const headers = {};
  if (Number.isFinite(version)) headers["If-Match"] = `"${version}"`;
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const text = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(url, { method, headers, body: text, signal, keepalive, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the server does not answer", code: "offline" });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* not JSON: the status says it */ }
  const wait = response.headers.get("Retry-After");
  if (wait && !error.hint) error.hint = `try again in ${wait} s`;
  return new ApiError(response.status, error);
}

/**
 * Return the JSON of an answer. Throws ApiError.
 * options: signal; version (of a context: on another one it is refused with 412); keepalive.
 */
export async function call(method, url, body, options) {
  const response = await send(method, url, body, options);
  return response.status === 204 ? null : response.json();
}

const PAGES = 10; // of a list that goes on

/** Return all entries of a list, page by page. Throws ApiError. */
export async function all(url, options) {
  const found = [];
  let after = "";
  for (let n = 0; n < PAGES; n += 1) {
    const { data, next } = await call("GET", after ? `${url}?after=${encodeURIComponent(after)}` : url, undefined, options);
    found.push(...data);
    if (!next) break;
    after = next;
  }
  return found;
}

/** Yield the JSON of each server-sent event. Throws ApiError, also for one in the stream. */
export async function* stream(url, body, signal) {
  const response = await send("POST", url, body, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (!data || data === "[DONE]") continue;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(response.status, parsed.error);
      yield parsed;
    }
  }
}
