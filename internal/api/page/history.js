// What the page remembers of the counters, for rates, percentiles and plots. The time is the browser's steady
// clock, so a wall clock that jumps changes nothing.

const span = 900; // seconds of a plot
export const step = 5; // seconds between two points of a plot

// History holds the samples of one application.
export class History {
  constructor() {
    this.recent = []; // of the last minute, for the numbers of now
    this.points = []; // one each step, with what the plots show
    this.samples = []; // one each step, for the windows of the points
  }

  // add takes the counters of a snapshot. Counters that fall are of nodes that left or began again: what was
  // before cannot be compared with them.
  add(at, traffic, gauges) {
    const t = traffic ?? {};
    const sample = { at, t };
    const last = this.recent.at(-1);
    if (last && ((t.requests ?? 0) < (last.t.requests ?? 0) || at - last.at > 3 * step)) {
      this.recent = [];
      this.samples = [];
    }
    this.recent.push(sample);
    while (this.recent[0].at < at - 60) this.recent.shift();
    if (!this.points.length || at - this.points.at(-1).at >= step - 0.5) {
      this.samples.push(sample);
      while (this.samples.length > 5) this.samples.shift();
      this.points.push({ at, ...summary(this.samples[0], sample), ...gauges });
      while (this.points[0].at < at - span) this.points.shift();
    }
  }

  // now is over the last seconds.
  now(seconds) {
    const last = this.recent.at(-1);
    const first = this.recent.find((s) => s.at >= last.at - seconds - 0.5);
    return summary(first, last);
  }
}

// summary is what has happened between two samples.
function summary(a, b) {
  const seconds = b.at - a.at;
  const per = (n) => (seconds > 0 ? n / seconds : undefined);
  const d = (name) => (b.t[name] ?? 0) - (a.t[name] ?? 0);
  const ttft = difference(a.t.ttft, b.t.ttft), itl = difference(a.t.itl, b.t.itl);
  const met = (b.t.goodput?.met ?? 0) - (a.t.goodput?.met ?? 0);
  const judged = met + (b.t.goodput?.missed ?? 0) - (a.t.goodput?.missed ?? 0);
  return {
    requests: per(d("requests")), failed: per(d("failed")), tokens: per(d("generated_tokens")),
    hit: d("prompt_tokens") > 0 ? d("cached_tokens") / d("prompt_tokens") : undefined,
    ttft50: quantile(ttft, 0.5), ttft95: quantile(ttft, 0.95),
    itl50: quantile(itl, 0.5), itl95: quantile(itl, 0.95),
    good: judged > 0 ? met / judged : undefined,
  };
}

function difference(a, b) {
  return { bounds: b?.bounds_s ?? [], counts: (b?.counts ?? []).map((n, i) => n - (a?.counts?.[i] ?? 0)) };
}

// quantile is in ms, linear within a bucket, as Prometheus' histogram_quantile computes it.
function quantile({ bounds, counts }, q) {
  const all = counts.reduce((sum, n) => sum + n, 0);
  if (all <= 0) return undefined;
  let before = 0;
  for (const [i, n] of counts.entries()) {
    if (before + n >= q * all && n > 0) {
      if (i >= bounds.length) return 1000 * bounds.at(-1);
      const low = i ? bounds[i - 1] : 0;
      return 1000 * (low + (bounds[i] - low) * (q * all - before) / n);
    }
    before += n;
  }
  return 1000 * bounds.at(-1);
}
