// A plot of one or two lines over the last 15 minutes, or less while the page knows less, as SVG.

import { el, setText } from "./dom.js";

const wide = 900, high = 100; // units of the drawing
const spans = [120, 300, 900]; // seconds that it shows
const gap = 16; // seconds without a point that break a line

function shape(name, attributes = {}) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  return e;
}

export class Plot {
  // lines are one or two of {field, name}; format writes a value; top is the least end of the scale.
  constructor(parent, { title, lines, format, goal, top = 0, floor = 0 }) {
    Object.assign(this, { title, lines, format, top, floor, goalOf: goal });
    this.values = lines.map((l, i) => el("span", { class: `value ${i ? "second" : "first"}` }));
    this.svg = shape("svg", { viewBox: `0 0 ${wide} ${high}`, preserveAspectRatio: "none", role: "img" });
    this.goal = this.svg.appendChild(shape("line", { class: "goal", x1: 0, x2: wide, visibility: "hidden" }));
    this.svg.append(shape("line", { x1: 0, x2: wide, y1: high, y2: high }));
    this.paths = lines.map((l, i) => this.svg.appendChild(shape("path", { class: i ? "second" : "first" })));
    this.cursor = this.svg.appendChild(shape("line", { class: "cursor", y1: 0, y2: high, visibility: "hidden" }));
    this.from = el("span");
    this.most = el("span");
    this.note = el("span");
    parent.append(el("figure", { class: "plot" }, el("figcaption", {}, el("b", {}, title), ...this.values), this.svg,
      el("div", { class: "axis", "aria-hidden": "true" }, this.from, this.note, this.most)));
    this.svg.addEventListener("pointermove", (e) => this.point(e));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  draw(points, now, goal) {
    Object.assign(this, { points, now });
    const known = now - (points[0]?.at ?? now);
    this.span = spans.find((s) => s >= known) ?? spans.at(-1);
    setText(this.from, `${this.span / 60} min ago`);
    let most = this.top;
    for (const p of points) for (const l of this.lines) most = Math.max(most, p[l.field] ?? 0);
    if (goal && most > goal / 4) most = Math.max(most, goal * 1.05);
    this.scale = (v) => high - 2 - (high - 6) * (v - this.floor) / (most - this.floor || 1);
    const x = (p) => wide * (1 - (now - p.at) / this.span);
    this.lines.forEach((l, i) => {
      let d = "", last = -Infinity;
      for (const p of points) {
        if (p[l.field] === undefined) continue;
        d += `${p.at - last > gap ? "M" : "L"}${x(p).toFixed(1)} ${this.scale(p[l.field]).toFixed(1)}`;
        last = p.at;
      }
      this.paths[i].setAttribute("d", d);
    });
    this.goal.setAttribute("visibility", goal && goal <= most ? "visible" : "hidden");
    if (goal) for (const y of ["y1", "y2"]) this.goal.setAttribute(y, this.scale(goal));
    setText(this.most, `most ${this.format(most)}`);
    setText(this.note, goal ? `goal ${this.format(goal)}` : "");
    this.say(points.at(-1));
  }

  say(point) {
    const words = this.lines.map((l) => `${l.name}${l.name && " "}${this.format(point?.[l.field])}`);
    words.forEach((w, i) => setText(this.values[i], w));
    this.svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }

  // point shows the values under the pointer.
  point(e) {
    const box = this.svg.getBoundingClientRect();
    const at = e && this.now - this.span * (1 - (e.clientX - box.left) / box.width);
    const near = e && this.points?.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a), { at: -1e9 });
    this.cursor.setAttribute("visibility", near?.at > 0 ? "visible" : "hidden");
    if (near?.at > 0) {
      for (const x of ["x1", "x2"]) this.cursor.setAttribute(x, wide * (1 - (this.now - near.at) / this.span));
      setText(this.note, `${Math.round(this.now - near.at)} s ago`);
    }
    this.say(near?.at > 0 ? near : this.points?.at(-1));
  }
}
