// Elements and tables. Text from outside is set as text and never as markup.

export const $ = (id) => document.getElementById(id);

export function el(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

export function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

const good = ["ready", "RUNNING", "alive", "on", "ok", "live", "load-even"];
const bad = ["backoff", "killing", "fenced", "failed", "gone", "unreachable", "lost", "UNHEALTHY", "DEPLOY_FAILED",
  "ejected"];

// tone is how a state looks. The word of the state is always beside the colour.
export const tone = (word) => (good.includes(word) ? "ok" : bad.includes(word) ? "bad" : "warn");

// state is a cell with a coloured mark.
export const state = (word, shown = word) => ({ text: shown, mark: `state ${tone(word)}` });

// Table shows rows by columns {title, num, cell, cls}. A cell is a text or {text, mark, share, button}. Rows
// keep their elements, so only what has changed is written.
export class Table {
  constructor(table, columns, { key, row = () => "" }) {
    this.columns = columns;
    this.key = key;
    this.row = row;
    this.rows = new Map();
    this.body = el("tbody");
    const head = columns.map((c) => el("th", { scope: "col", class: c.num ? "num" : "", title: c.hint ?? "" }, c.title));
    table.append(el("thead", {}, el("tr", {}, ...head)), this.body);
  }

  show(list) {
    const seen = new Set();
    let at = this.body.firstElementChild;
    for (const item of list) {
      const key = this.key(item);
      if (seen.has(key)) continue;
      seen.add(key);
      let tr = this.rows.get(key);
      if (!tr) this.rows.set(key, tr = this.make());
      const cls = this.row(item);
      if (tr.className !== cls) tr.className = cls;
      this.columns.forEach((c, i) => fill(tr.children[i], c.cell(item)));
      if (tr === at) at = at.nextElementSibling;
      else this.body.insertBefore(tr, at);
    }
    for (const [key, tr] of this.rows) {
      if (!seen.has(key)) {
        tr.remove();
        this.rows.delete(key);
      }
    }
  }

  make() {
    return el("tr", {}, ...this.columns.map((c, i) => el(i ? "td" : "th", {
      ...(i ? {} : { scope: "row" }), class: `${c.num ? "num" : ""} ${c.cls ?? ""}`.trim(),
    })));
  }
}

function fill(td, cell) {
  const c = typeof cell === "object" ? cell : { text: cell };
  const text = String(c.text ?? "");
  if (c.chips) return fillChips(td, c.chips);
  if ((c.mark || c.button) && !td.firstElementChild) {
    td.replaceChildren(c.button ? el("button", { type: "button", class: "link" }) : el("span"));
  }
  const into = td.firstElementChild ?? td;
  setText(into, text);
  if (into.tagName === "SPAN" && into.className !== (c.mark ?? "")) into.className = c.mark ?? "";
  if (c.button) into.onclick = c.button;
  if (c.share !== undefined) {
    td.classList.add("gauge");
    td.style.setProperty("--share", `${Math.round(100 * c.share)}%`);
  }
}

function fillChips(td, chips) {
  while (td.children.length > chips.length) td.lastElementChild.remove();
  chips.forEach((c, i) => {
    const chip = td.children[i] ?? td.appendChild(el("span"));
    setText(chip, c.text);
    const cls = `chip ${c.mark}`;
    if (chip.className !== cls) chip.className = cls;
  });
}

// Numbers and times. "–" is what is not known.
export const number = (n, digits = 0) => (n === undefined || n === null || Number.isNaN(n) ? "–" :
  n.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
export const ms = (n) => (n > 0 ? (n < 10 ? number(n, 1) : number(n)) : "–");
export const percent = (share) => (share === undefined || share === null || Number.isNaN(share) ? "–" :
  `${number(100 * share, share < 0.9995 && share > 0 ? 1 : 0)} %`);
export const rate = (n) => number(n, n !== undefined && n < 100 ? 1 : 0);

export function age(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 100) return `${Math.floor(seconds)} s`;
  if (seconds < 6000) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

export const clock = (time) => new Date(time).toLocaleTimeString("en-GB");
