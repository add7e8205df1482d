// Calls of the admin API. The token is in the Authorization field and in this tab's sessionStorage, never in
// a URL.

const key = "dpserve.token";

export const token = {
  get: () => sessionStorage.getItem(key) ?? "",
  set: (text) => sessionStorage.setItem(key, text),
  forget: () => sessionStorage.removeItem(key),
};

// Fault is an answer that is not a success.
export class Fault extends Error {
  constructor(status, error) {
    super(error?.message ?? `the node answered ${status}`);
    this.status = status;
    this.hint = error?.hint ?? "";
  }
  toString() { return this.hint ? `${this.message}. ${this.hint}` : this.message; }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Fault(answer.status, body.error);
}

export const get = async (path) => (await send(path)).json();

export const post = async (path, body) => (await send(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).json();

// parts passes what comes between separators to give, until the stream ends.
export async function parts(path, separator, signal, give) {
  const reader = (await send(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const list = (rest + value).split(separator);
    rest = list.pop();
    give(list);
  }
}
