// Applications, traffic, ranks, pairs, nodes and events.

import { get } from "./api.js";
import { $, Table, age, clock, el, ms, number, percent, rate, setText, state, tone } from "./dom.js";
import { History } from "./history.js";
import { Plot } from "./plot.js";

const keptEvents = 1000, shownEvents = 300;

const rankName = (u, r) => `${u.pool ? `${u.pool} ` : ""}${r.group}/${r.rank}`;

// rankWord is the state of a rank that a person should see first.
const rankWord = (r) => (r.phase === "ready" && r.ejected ? "ejected" : r.phase === "ready" && r.away ? r.away : r.phase);

// why says in words what is, or was, the matter with a unit.
function why(u, r, now) {
  if (r.phase !== "ready") return u.reason || r.progress || "";
  if (r.ejected) return "its last answers failed";
  const e = u.last_end;
  if (!e) return r.kv?.note ?? "";
  const exit = e.exit && !e.cause?.includes(e.exit) ? `engine ended with ${e.exit}` : "";
  const what = [e.cause, exit, e.line].filter(Boolean).join("; ");
  return `${age((now - Date.parse(e.at)) / 1000)} ago: ${what}`;
}

export class Board {
  constructor() {
    this.histories = new Map();
    this.notices = new Map();
    this.events = new Map();
    this.app = "";
    this.now = 0; // the node's clock, ms
    const last = (a) => this.histories.get(a.name).now(60);
    const lately = (a) => this.histories.get(a.name).now(10);
    this.apps = new Table($("apps-table"), [
      { title: "Application", cell: (a) => ({ text: a.name, button: () => this.select(a.name) }) },
      { title: "State", cell: (a) => state(a.status) },
      { title: "Ranks", num: true, cell: (a) => `${a.ready}/${a.desired}`, hint: "ready / wanted" },
      { title: "Revision", num: true, cell: (a) => `${a.revision}${a.rolling_out ? " rolling out" : ""}` },
      { title: "Policy", cell: (a) => a.policy },
      { title: "Model", cell: (a) => a.model },
      { title: "req/s", num: true, cell: (a) => rate(lately(a).requests) },
      { title: "tok/s", num: true, cell: (a) => rate(lately(a).tokens) },
      { title: "TTFT p50", num: true, cell: (a) => ms(last(a).ttft50), hint: "ms, last minute" },
      { title: "p95", num: true, cell: (a) => ms(last(a).ttft95), hint: "ms, last minute" },
      { title: "ITL p50", num: true, cell: (a) => ms(last(a).itl50), hint: "ms, last minute" },
      { title: "p95", num: true, cell: (a) => ms(last(a).itl95), hint: "ms, last minute" },
      { title: "Hit rate", num: true, cell: (a) => percent(last(a).hit), hint: "cached prompt tokens, last minute" },
      { title: "Queue", num: true, cell: (a) => number(a.queued) },
      { title: "Balance", num: true, cell: (a) => number(this.balance(a), 2), hint: "fullest rank over the mean; 1 = even" },
      { title: "Goodput", num: true, cell: (a) => this.goodput(a, last(a)), hint: "streams within the goals, last minute" },
    ], { key: (a) => a.name, row: (a) => (a.name === this.app ? "is-current" : "") });
    this.ranks = new Table($("ranks-table"), [
      { title: "Rank", cell: (x) => rankName(x.u, x.r) },
      { title: "State", cell: (x) => state(rankWord(x.r)) },
      { title: "For", num: true, cell: (x) => age((this.now - Date.parse(x.u.since)) / 1000) },
      { title: "Epoch", num: true, cell: (x) => x.r.epoch },
      { title: "Node", cell: (x) => x.r.node || "–" },
      { title: "Devices", cell: (x) => (x.r.devices ?? []).join(" ") + (x.r.share ? ` × ${x.r.share}` : "") || "–" },
      { title: "Open", num: true, cell: (x) => load(x.r), hint: "requests in flight / most" },
      { title: "KV use", num: true, cell: (x) => (x.r.kv ? { text: percent(x.r.kv.usage), share: x.r.kv.usage } : "–") },
      { title: "Hit rate", num: true, cell: (x) => (x.r.prompt_tokens ? percent(x.r.hit_rate) : "–") },
      { title: "TTFT p50", num: true, cell: (x) => ms(x.r.ttft_p50_ms), hint: "ms, last 512 requests" },
      { title: "p95", num: true, cell: (x) => ms(x.r.ttft_p95_ms), hint: "ms, last 512 requests" },
      { title: "ITL p50", num: true, cell: (x) => ms(x.r.itl_p50_ms), hint: "ms, mean of a request, last 512" },
      { title: "p95", num: true, cell: (x) => ms(x.r.itl_p95_ms), hint: "ms, mean of a request, last 512" },
      { title: "tok/s", num: true, cell: (x) => rate(x.r.tokens_per_s) },
      { title: "Requests", num: true, cell: (x) => number(x.r.requests) },
      { title: "Restarts", num: true, cell: (x) => x.u.restarts },
      { title: "Why", cls: "long", cell: (x) => why(x.u, x.r, this.now) },
    ], { key: (x) => `${x.u.unit} ${x.r.rank}`, row: (x) => (tone(rankWord(x.r)) === "bad" ? "is-bad" : "") });
    this.pools = new Table($("pools-table"), [
      { title: "Pool", cell: (p) => p.name },
      { title: "State", cell: (p) => state(p.status) },
      { title: "Ranks", num: true, cell: (p) => `${p.ready}/${p.desired}` },
      { title: "Groups × size", num: true, cell: (p) => `${p.groups} × ${p.dp_size}` },
      { title: "Coupling", cell: (p) => p.coupling },
      { title: "Policy", cell: (p) => p.policy },
    ], { key: (p) => p.name });
    this.nodes = new Table($("nodes-table"), [
      { title: "Node", cell: (n) => n.node },
      { title: "State", cell: (n) => state(n.state) },
      { title: "Leads", cell: (n) => (n.leader ? "leads" : n.voter ? "votes" : "–") },
      { title: "Roles", cell: (n) => (n.roles ?? []).join(" ") },
      { title: "Zone", cell: (n) => n.zone || "–" },
      { title: "Address", cell: (n) => n.address || "–" },
      { title: "Version", cell: (n) => n.version || "–" },
      { title: "Ranks", num: true, cell: (n) => n.ranks },
      { title: "Open", num: true, cell: (n) => n.in_flight },
      { title: "Slots", num: true, cell: (n) => `${n.slots_used}/${n.slots}` },
      { title: "GPUs", num: true, cell: (n) => `${number(n.gpus_used, n.gpus_used % 1 ? 2 : 0)}/${n.gpus}` },
      { title: "Lease left", num: true, cell: (n) => (n.lease_left_s > 0 ? `${number(n.lease_left_s)} s` : "–") },
      { title: "Devices", cell: (n) => (n.devices ?? []).map((d) => `${d.devices.length} × ${d.name}`).join(", ") || "–" },
      { title: "Notes", cls: "long", cell: (n) => [n.reason, ...(n.notes ?? [])].filter(Boolean).join("; ") },
    ], { key: (n) => n.node, row: (n) => (tone(n.state) === "bad" ? "is-bad" : "") });
    this.places = new Table($("places-table"), [
      { title: "Node", cell: (p) => p.node },
      { title: "Device", num: true, cell: (p) => p.device },
      { title: "Model", cell: (p) => p.model },
      { title: "Ranks", cls: "long", cell: (p) => ({ chips: p.ranks }) },
    ], { key: (p) => `${p.node} ${p.device}` });
    this.log = new Table($("events-table"), [
      { title: "Time", cell: (e) => clock(e.time) },
      { title: "Application", cell: (e) => e.app || "–" },
      { title: "Of", cell: (e) => e.unit || e.node || "application" },
      { title: "From", cell: (e) => e.from ?? "" },
      { title: "To", cell: (e) => (e.phase ? state(e.phase) : "") },
      { title: "Epoch", num: true, cell: (e) => e.epoch ?? "" },
      { title: "Why", cls: "long", cell: (e) => [e.reason, e.action].filter(Boolean).join("; ") },
    ], { key: (e) => e.number });
    const plot = (title, lines, format, more) => new Plot($("plots"), { title, lines, format, ...more });
    const two = (name) => [{ field: `${name}50`, name: "p50" }, { field: `${name}95`, name: "p95" }];
    this.plots = [
      plot("Requests/s", [{ field: "requests", name: "" }, { field: "failed", name: "failed" }], rate, { top: 1 }),
      plot("Tokens/s", [{ field: "tokens", name: "" }], rate, { top: 10 }),
      plot("TTFT, ms", two("ttft"), ms, { goal: (g) => g?.ttft_goal_s }),
      plot("ITL, ms", two("itl"), ms, { goal: (g) => g?.tpot_goal_s }),
      plot("Hit rate", [{ field: "hit", name: "" }], percent, { top: 1 }),
      plot("Queue", [{ field: "queued", name: "" }], number, { top: 1 }),
      plot("Balance, fullest / mean", [{ field: "balance", name: "" }], (n) => number(n, 2), { top: 2, floor: 1 }),
      plot("Goodput", [{ field: "good", name: "" }], percent, { top: 1 }),
    ];
    for (const id of ["rank-filter", "rank-bad", "event-filter"]) {
      $(id).addEventListener("input", () => this.redraw());
    }
  }

  // notice shows a text above everything, or takes it away.
  notice(key, cls = "", text = "") {
    const old = this.notices.get(key);
    if (!text) {
      old?.remove();
      this.notices.delete(key);
      return;
    }
    const li = old ?? $("notices").appendChild(el("li"));
    this.notices.set(key, li);
    li.className = cls;
    setText(li, text);
  }

  select(name) {
    this.app = name;
    this.redraw();
    this.onSelect?.();
  }

  current() { return this.list?.find((a) => a.name === this.app); }

  balance(a) { return this.routers?.[a.name]?.imbalance; }

  goodput(a, now) {
    const g = a.traffic?.goodput;
    if (now.good === undefined || !g) return "–";
    return { text: percent(now.good), mark: `state ${now.good >= 0.95 ? "ok" : now.good >= 0.8 ? "warn" : "bad"}` };
  }

  show(snapshot, at) {
    this.now = Date.parse(snapshot.at);
    const fault = snapshot.apps.error;
    this.notice("apps", "bad", fault ? `${fault.message}. ${fault.hint ?? ""}. What is below is the last that was known.` : "");
    this.routers = snapshot.routers;
    this.at = at;
    if (!fault) {
      this.list = snapshot.apps.apps;
      for (const a of this.list) {
        if (!this.histories.has(a.name)) this.histories.set(a.name, new History());
        this.histories.get(a.name).add(at, a.traffic, { queued: a.queued, balance: this.balance(a) });
      }
      for (const name of this.histories.keys()) {
        if (!this.list.some((a) => a.name === name)) this.histories.delete(name);
      }
    }
    if (!snapshot.nodes.error) this.nodeList = snapshot.nodes.nodes;
    if (!snapshot.events.error) this.takeEvents(snapshot.events.events);
    if (this.list && !this.current()) this.select(this.list[0]?.name ?? "");
    else this.redraw();
  }

  // takeEvents adds events. Numbers begin again with a leader; a gap means that some were missed.
  async takeEvents(list) {
    const newest = this.newest ?? 0, last = list.at(-1)?.number ?? 0;
    const isOther = last < newest || (this.events.has(last) && this.events.get(last).time !== list.at(-1)?.time);
    if (isOther) this.events.clear();
    const isGap = list.length > 0 && (isOther || list[0].number > newest + 1) && list[0].number > 1;
    this.newest = last || newest;
    for (const e of list) this.events.set(e.number, e);
    if (isGap) {
      const { events } = await get("/api/v1/events?past=true").catch(() => ({ events: [] }));
      const all = new Map(events.map((e) => [e.number, e]));
      for (const [n, e] of this.events) if (!all.has(n)) all.set(n, e);
      this.events = all;
      this.eventsDrawn = "";
    }
    if (this.events.size > keptEvents) {
      this.events = new Map([...this.events].sort(([a], [b]) => a - b).slice(-keptEvents));
    }
  }

  redraw() {
    if (!this.list || document.hidden) return;
    const a = this.current();
    for (const e of document.querySelectorAll("h2 .of")) setText(e, this.list.length > 1 && a ? `of ${a.name}` : "");
    this.apps.show(this.list);
    $("no-apps").hidden = this.list.length > 0;
    this.showMessages();
    this.showPlots(a);
    this.showRanks(a);
    this.showPairs(a);
    this.nodes.show(this.nodeList ?? []);
    this.places.show(this.placesOf());
    this.showEvents();
  }

  showMessages() {
    for (const key of [...this.notices.keys()]) {
      if (key.startsWith("app ") && !this.list.some((a) => key === `app ${a.name}`)) this.notice(key);
    }
    for (const a of this.list) {
      const halt = a.halt ? `Roll-out of revision ${a.halt.revision} halted: ${a.halt.unit}: ${a.halt.cause}` : "";
      this.notice(`app ${a.name}`, tone(a.status) === "bad" ? "bad" : "",
        a.message || halt ? `${a.name}: ${[a.message, halt].filter(Boolean).join("\n")}` : "");
    }
    const wanted = this.list.reduce((n, a) => n + a.desired, 0), ready = this.list.reduce((n, a) => n + a.ready, 0);
    document.title = `${ready}/${wanted} · dpserve`;
  }

  showPlots(a) {
    $("traffic").hidden = !a;
    if (!a) return;
    const points = this.histories.get(a.name).points;
    for (const p of this.plots) p.draw(points, this.at, 1000 * (p.goalOf?.(a.traffic?.goodput) ?? 0));
  }

  showRanks(a) {
    const all = (a?.units ?? []).flatMap((u) => u.ranks.map((r) => ({ u, r })));
    const counts = new Map();
    for (const { r } of all) counts.set(rankWord(r), (counts.get(rankWord(r)) ?? 0) + 1);
    setText($("rank-sum"), [...counts].map(([word, n]) => `${n} ${word}`).join(", "));
    const map = $("rank-map");
    while (map.children.length > all.length) map.lastElementChild.remove();
    all.forEach(({ r }, i) => {
      const dot = map.children[i] ?? map.appendChild(el("i"));
      if (dot.className !== tone(rankWord(r))) dot.className = tone(rankWord(r));
    });
    const words = $("rank-filter").value.toLowerCase(), onlyBad = $("rank-bad").checked;
    this.ranks.show(all.filter((x) => (!onlyBad || rankWord(x.r) !== "ready") &&
      (!words || `${rankName(x.u, x.r)} ${x.r.node} ${rankWord(x.r)} ${why(x.u, x.r, this.now)}`.toLowerCase().includes(words))));
  }

  showPairs(a) {
    const pd = a?.pd;
    $("pairs").hidden = $("pairs-link").hidden = !pd;
    if (!pd) return;
    this.pools.show(a.pools);
    const facts = {
      Pairs: pd.pairs, Connected: `${pd.connected} of ${pd.all}`, Transfer: pd.transfer, Decides: pd.decide,
      Fallback: pd.fallback, "Prompts computed by prefill ranks": number(pd.remote),
      "by the decode rank, as decided": number(pd.local), "because no prefill rank could": number(pd.fallbacks),
      "Mean transfer": pd.transfer_ms ? `${ms(pd.transfer_ms)} ms` : "–",
    };
    const dl = $("pair-facts");
    Object.entries(facts).forEach(([name, value], i) => {
      const row = dl.children[i] ?? dl.appendChild(el("div", {}, el("dt"), el("dd")));
      setText(row.firstChild, name);
      setText(row.lastChild, value);
    });
  }

  // placesOf lists the devices of all nodes, each with the ranks on it; "–" are ranks without a device.
  placesOf() {
    const places = new Map();
    const place = (node, device, model = "–") => {
      const key = `${node} ${device}`;
      if (!places.has(key)) places.set(key, { node, device, model, ranks: [] });
      return places.get(key);
    };
    for (const n of this.nodeList ?? []) {
      for (const d of n.devices ?? []) {
        for (const device of d.devices) place(n.node, device, d.name);
      }
    }
    for (const a of this.list) {
      for (const u of a.units) {
        for (const r of u.ranks) {
          const chip = { text: `${u.unit}${u.unit.split("/").length > 2 ? "" : `/${r.rank}`}`, mark: `state ${tone(rankWord(r))}` };
          if (!r.node) continue;
          for (const d of r.devices?.length ? r.devices : ["–"]) place(r.node, d).ranks.push(chip);
        }
      }
    }
    return [...places.values()];
  }

  showEvents() {
    const words = $("event-filter").value.toLowerCase();
    const drawn = `${this.newest} ${this.events.size} ${words}`;
    if (drawn === this.eventsDrawn) return;
    this.eventsDrawn = drawn;
    const list = [...this.events.values()].sort((a, b) => b.number - a.number).filter((e) => !words ||
      `${e.app} ${e.unit ?? ""} ${e.node ?? ""} ${e.kind} ${e.from ?? ""} ${e.phase ?? ""} ${e.reason ?? ""}`.toLowerCase().includes(words));
    this.log.show(list.slice(0, shownEvents));
  }
}

const load = (r) => ({
  text: r.max_ongoing ? `${r.in_flight}/${r.max_ongoing}` : String(r.in_flight),
  share: r.max_ongoing ? r.in_flight / r.max_ongoing : 0,
});
