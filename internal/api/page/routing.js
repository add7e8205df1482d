// The last routing decisions, and where a prompt would go now.

import { get, post } from "./api.js";
import { $, Table, clock, number, percent, setText } from "./dom.js";

const shown = 50, every = 2; // decisions, and seconds between two questions

export class Routing {
  constructor(board) {
    this.board = board;
    this.asked = 0;
    this.isVisible = false;
    this.decisions = new Table($("decisions-table"), [
      { title: "Time", cell: (d) => clock(d.at) },
      { title: "Request", cls: "mono", cell: (d) => ({ text: d.request_id, button: () => this.replay(d.request_id) }) },
      { title: "Rank", cell: (d) => d.pick },
      { title: "Prefill", cell: (d) => (d.pair ? d.pair.prefill || d.pair.way : "–") },
      { title: "Reason", cell: (d) => d.reason },
      { title: "Policy", cell: (d) => d.policy },
      { title: "Prompt tokens", num: true, cell: (d) => number(d.tokens) },
      { title: "Cached there", num: true, cell: (d) => number(d.hit_tokens) },
      { title: "Most cached", num: true, cell: (d) => mostOf(d.hits), hint: "on any rank" },
      { title: "Attempt", num: true, cell: (d) => d.attempt },
    ], { key: (d) => `${d.request_id} ${d.attempt} ${d.at}` });
    new IntersectionObserver(([e]) => { this.isVisible = e.isIntersecting; }).observe($("routing"));
    $("explain-form").addEventListener("submit", (e) => {
      e.preventDefault();
      this.explain({ prompt: $("prompt").value });
    });
  }

  path(what) { return `/api/v1/routers/${encodeURIComponent(this.board.app)}/${what}`; }

  // show asks for the decisions while a person can see them.
  async show() {
    $("routing").hidden = !this.board.app;
    const now = performance.now() / 1000;
    if (!this.board.app || !this.isVisible || document.hidden || now - this.asked < every) return;
    this.asked = now;
    try {
      const { decisions } = await get(`${this.path("decisions")}?last=${shown}`);
      this.decisions.show(decisions);
      setText($("no-decisions"), "No request has been routed by this node yet.");
      $("no-decisions").hidden = decisions.length > 0;
    } catch (fault) {
      setText($("no-decisions"), String(fault));
      $("no-decisions").hidden = false;
    }
  }

  replay(id) {
    this.explain({ replay: id });
  }

  async explain(query) {
    setText($("explain-fault"), "");
    try {
      this.showExplanation(await post(this.path("explain"), query), query);
    } catch (fault) {
      setText($("explain-fault"), String(fault));
      $("explanation").hidden = true;
    }
  }

  showExplanation(x, query) {
    const what = query.replay ? `Request ${query.replay}, as it would be decided now` : "This prompt now";
    setText($("explanation-title"), `${what}: ${x.decision} ${x.pick ?? ""} (${x.reason})`);
    const was = x.replay && `It went to ${x.replay.pick} (${x.replay.reason}), with ${number(x.replay.hit_tokens)} tokens cached there.`;
    const size = `${number(x.tokens)} prompt tokens${x.estimated ? ", estimated" : ""}, ${number(x.blocks)} blocks.`;
    const pair = x.pair && `Prefill: ${x.pair.way} ${x.pair.prefill ?? ""} (${x.pair.why}).`;
    setText($("explanation-text"), [was, size, pair, x.formula && `Score = ${x.formula}.`, ...(x.notes ?? [])]
      .filter(Boolean).join(" "));
    drawTerms($("terms-table"), x.ranks, [
      { title: "Rank", cell: (r) => r.worker },
      { title: "State", cell: (r) => r.state },
      { title: "Open", num: true, cell: (r) => `${r.in_flight}/${r.max_ongoing}` },
      { title: "KV use", num: true, cell: (r) => percent(r.kv_usage) },
      { title: "Cached", num: true, cell: (r) => number(r.hit_tokens) },
    ], { title: "Score", of: (r) => r.score }, (r) => r.worker);
    drawTerms($("candidates-table"), x.pair?.candidates ?? [], [
      { title: "Prefill", cell: (c) => c.prefill || "none" },
      { title: "Decode", cell: (c) => c.decode },
      { title: "Left out", cell: (c) => c.skip ?? "" },
    ], { title: "Cost, ms", of: (c) => c.cost_ms }, (c) => `${c.prefill} ${c.decode}`);
    $("explanation").hidden = false;
    $("explanation-title").focus();
  }
}

const mostOf = (hits) => number(Math.max(0, ...Object.values(hits ?? {})));

// drawTerms makes a table with a column per term that is not zero everywhere.
function drawTerms(table, list, before, after, key) {
  table.replaceChildren();
  if (!list.length) return;
  const valueOf = (item, name) => item.terms?.find((t) => t.name === name);
  const terms = [...new Set(list.flatMap((item) => (item.terms ?? []).map((t) => t.name)))]
    .filter((name) => list.some((item) => valueOf(item, name)?.value));
  const isWhole = list.every((item) => (item.terms ?? []).every((t) => Number.isInteger(t.value)));
  const digits = isWhole ? 0 : 3;
  const columns = terms.map((name) => ({
    title: name, num: true, cell: (item) => number(valueOf(item, name)?.value, digits),
    hint: list.map((item) => valueOf(item, name)?.unit).find(Boolean),
  }));
  const total = { title: after.title, num: true, cell: (item) => number(after.of(item), digits) };
  const why = { title: "Why", cls: "long", cell: (item) => (item.picked ? "picked" : item.why ?? "") };
  new Table(table, [...before, ...columns, total, why], { key, row: (item) => (item.picked ? "picked" : "") }).show(list);
}
