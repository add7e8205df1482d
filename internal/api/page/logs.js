// Log lines of the engines, which follow.

import { parts } from "./api.js";
import { $, el, setText } from "./dom.js";

const most = 2000, past = 200; // lines that are kept, and lines before now of each rank

export class Logs {
  constructor(board) {
    this.board = board;
    this.lines = $("log-lines");
    $("log-follow").addEventListener("click", () => (this.stop ? this.end() : this.follow()));
    $("log-rank").addEventListener("change", () => this.stop && this.follow());
    $("log-filter").addEventListener("input", () => {
      for (const line of this.lines.children) line.hidden = !this.isShown(line.textContent);
    });
    board.onSelect = () => this.end("");
  }

  isShown(text) { return text.toLowerCase().includes($("log-filter").value.toLowerCase()); }

  // show keeps the list of ranks.
  show() {
    const a = this.board.current();
    $("logs").hidden = !a;
    const ranks = [...new Set((a?.units ?? []).flatMap((u) => u.ranks.map((r) => `${r.group}/${r.rank}`)))];
    const drawn = `${this.board.app} ${ranks.join(" ")}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const chosen = $("log-rank").value;
    $("log-rank").replaceChildren(el("option", { value: "" }, "all"), ...ranks.map((r) => el("option", { value: r }, r)));
    $("log-rank").value = ranks.includes(chosen) ? chosen : "";
  }

  end(text = "Stopped.") {
    this.stop?.abort();
    this.stop = null;
    $("log-follow").setAttribute("aria-pressed", "false");
    setText($("log-follow"), "Follow");
    setText($("log-state"), text);
  }

  async follow() {
    this.end("");
    this.lines.replaceChildren();
    const stop = this.stop = new AbortController();
    $("log-follow").setAttribute("aria-pressed", "true");
    setText($("log-follow"), "Stop");
    const [group, rank] = $("log-rank").value.split("/");
    const path = `/api/v1/apps/${encodeURIComponent(this.board.app)}/logs?follow=true` +
      (rank ? `&group=${group}&rank=${rank}` : "");
    for (let tail = past; this.stop === stop; tail = 0) {
      try {
        await parts(`${path}&tail=${tail}`, "\n", stop.signal, (lines) => {
          setText($("log-state"), "");
          this.add(lines);
        });
      } catch (fault) {
        if (this.stop === stop) setText($("log-state"), `The log has ended (${fault}). It is asked again.`);
      }
      await new Promise((done) => setTimeout(done, 2000));
    }
  }

  add(lines) {
    const box = this.lines, isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 20;
    for (const text of lines.slice(-most)) {
      const line = box.appendChild(el("div"));
      line.textContent = text;
      line.hidden = !this.isShown(text);
    }
    while (box.children.length > most) box.firstElementChild.remove();
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
}
