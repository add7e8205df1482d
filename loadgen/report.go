package loadgen

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// APIVersion of the JSON forms of Report and Overhead.
const APIVersion = "dpserve/v1"

// Report is what the clients of a run saw. Times are milliseconds. An open loop measures from the intended send time, so
// that a slow server cannot hide behind a late client.
type Report struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"` // BenchReport

	URL         string   `json:"url"`
	Model       string   `json:"model"`
	Route       Route    `json:"route"`
	Stream      bool     `json:"stream"`
	Mode        Mode     `json:"mode"`
	Rate        float64  `json:"rate_per_s,omitempty"`
	Arrivals    Arrivals `json:"arrivals,omitempty"`
	Concurrency int      `json:"concurrency"`
	PromptBytes int      `json:"prompt_bytes"`
	MaxTokens   int      `json:"max_tokens"`
	Seed        uint64   `json:"seed"`

	DurationS float64        `json:"duration_s"` // start of the measurement to the end of its last request
	Offered   int            `json:"offered"`    // measured requests
	OK        int            `json:"ok"`
	Failed    int            `json:"failed"`
	Errors    map[string]int `json:"errors,omitempty"` // by kind

	RequestsPerS     float64 `json:"requests_per_s"` // good ones
	OutputTokensPerS float64 `json:"output_tokens_per_s"`
	PromptTokens     int     `json:"prompt_tokens"` // as the engine counts them, of good requests
	OutputTokens     int     `json:"output_tokens"`
	CachedTokens     int     `json:"cached_tokens"`

	TTFT *Percentiles `json:"ttft,omitempty"` // first token; streams only
	ITL  *Percentiles `json:"itl,omitempty"`  // every gap between chunks; chunks of one read have a gap of 0
	TPOT *Percentiles `json:"tpot,omitempty"` // (last − first) / (tokens − 1) per request
	E2E  *Percentiles `json:"e2e,omitempty"`
	Lag  *Percentiles `json:"send_lag,omitempty"` // how late the client sent; large values mean the client is the bottleneck

	Goodput Goodput        `json:"goodput"`
	Ranks   map[string]int `json:"ranks,omitempty"` // answers per app/group/rank, where the server names it
	CPU     *CPU           `json:"cpu,omitempty"`
}

// Goodput counts requests that met both limits; failed ones count against it.
type Goodput struct {
	TTFTMs float64 `json:"slo_ttft_ms"`
	TPOTMs float64 `json:"slo_tpot_ms"`
	Share  float64 `json:"share"` // of the offered requests, 0 to 1
	PerS   float64 `json:"per_s"`
}

func (c *collector) report(cfg Config, start time.Time) *Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &Report{
		APIVersion: APIVersion, Kind: "BenchReport",
		URL: cfg.URL, Model: cfg.Model, Route: cfg.Route, Stream: cfg.Stream, Mode: cfg.Mode, Concurrency: cfg.Concurrency,
		PromptBytes: cfg.PromptBytes, MaxTokens: cfg.MaxTokens, Seed: cfg.Seed,
		Offered: c.offered, OK: c.ok, Failed: c.offered - c.ok, Errors: maps.Clone(c.errors), Ranks: maps.Clone(c.ranks),
		PromptTokens: c.usage.prompt, OutputTokens: c.usage.completion, CachedTokens: c.usage.cached,
		TTFT: c.ttft.percentiles(), ITL: c.itl.percentiles(), TPOT: c.tpot.percentiles(), E2E: c.e2e.percentiles(),
		Goodput: Goodput{TTFTMs: ms(cfg.SLO.TTFT), TPOTMs: ms(cfg.SLO.TPOT)},
	}
	if cfg.Mode == Open {
		r.Rate, r.Arrivals, r.Lag = cfg.Rate, cfg.Arrivals, c.lag.percentiles()
	}
	if c.offered > 0 {
		r.Goodput.Share = float64(c.good) / float64(c.offered)
	}
	if seconds := c.end.Sub(start).Seconds(); c.offered > 0 && seconds > 0 {
		r.DurationS = seconds
		r.RequestsPerS = float64(c.ok) / seconds
		r.OutputTokensPerS = float64(c.usage.completion) / seconds
		r.Goodput.PerS = float64(c.good) / seconds
	}
	return r
}

// WriteTable writes r for people.
func (r *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(t, format, args...) } // tabwriter reports at Flush
	p("%s\n", r.headline())
	p("%d requests in %.1f s: %d ok, %d failed%s\n", r.Offered, r.DurationS, r.OK, r.Failed, kinds(r.Errors))
	p("%.1f requests/s, %.0f output tokens/s\n", r.RequestsPerS, r.OutputTokensPerS)
	p("goodput %.1f %% (TTFT ≤ %g ms, TPOT ≤ %g ms), %.1f requests/s\n\n", 100*r.Goodput.Share, r.Goodput.TTFTMs, r.Goodput.TPOTMs, r.Goodput.PerS)
	p("ms\tmean\tp50\tp90\tp99\tmax\tcount\t\n")
	for _, row := range []struct {
		name string
		v    *Percentiles
	}{{"first token", r.TTFT}, {"between tokens", r.ITL}, {"per output token", r.TPOT}, {"end to end", r.E2E}, {"send lag", r.Lag}} {
		if v := row.v; v != nil {
			p("%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%d\t\n", row.name, v.Mean, v.P50, v.P90, v.P99, v.Max, v.Count)
		}
	}
	if r.CPU != nil {
		p("\n%s\n", r.CPU)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}

func (r *Report) headline() string {
	load := fmt.Sprintf("closed loop, %d clients", r.Concurrency)
	if r.Mode == Open {
		load = fmt.Sprintf("open loop, %g requests/s, %s", r.Rate, r.Arrivals)
	}
	stream := "whole answers"
	if r.Stream {
		stream = "streams"
	}
	return fmt.Sprintf("%s, model %s: %s, %s, %s, %d byte prompts, %d tokens", r.URL, r.Model, load, r.Route, stream, r.PromptBytes, r.MaxTokens)
}

// kinds lists errors, most frequent first.
func kinds(errors map[string]int) string {
	names := slices.SortedFunc(maps.Keys(errors), func(a, b string) int {
		if errors[a] != errors[b] {
			return errors[b] - errors[a]
		}
		return strings.Compare(a, b)
	})
	var out []string
	for _, name := range names {
		out = append(out, fmt.Sprintf("%s: %d", name, errors[name]))
	}
	if len(out) == 0 {
		return ""
	}
	return " (" + strings.Join(out, ", ") + ")"
}
