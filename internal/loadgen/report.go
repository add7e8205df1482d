package loadgen

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dpserve/dpserve/internal/process"
)

// APIVersion of the JSON forms of Report and Overhead.
const APIVersion = "dpserve/v1"

// Report holds the results of a run. Times are milliseconds. An open loop measures from the intended send
// time, so that a late client does not hide a slow server.
type Report struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"` // BenchReport

	Load
	Results
	Latencies

	Goodput Goodput `json:"goodput"`
	// answers per app/group/rank, if the server names the rank
	Ranks map[string]int `json:"ranks,omitempty"`
	// answers of the busiest rank over the mean of the ranks that answered
	Busiest  float64        `json:"max_mean,omitempty"`
	Sessions *SessionReport `json:"sessions,omitempty"` // of RunSessions
	CPU      *CPU           `json:"cpu,omitempty"`
}

// Load is what a run sent.
type Load struct {
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
}

// Results are the requests of a run and their tokens.
type Results struct {
	// from the start of the measurement to the end of its last request
	DurationS float64        `json:"duration_s"`
	Offered   int            `json:"offered"` // measured requests
	OK        int            `json:"ok"`
	Failed    int            `json:"failed"`
	Errors    map[string]int `json:"errors,omitempty"` // by kind

	RequestsPerS     float64 `json:"requests_per_s"` // good requests
	OutputTokensPerS float64 `json:"output_tokens_per_s"`
	PromptTokens     int     `json:"prompt_tokens"` // as the engine counts them, of good requests
	OutputTokens     int     `json:"output_tokens"`
	CachedTokens     int     `json:"cached_tokens"`
	HitShare         float64 `json:"hit_share"` // cached over prompt tokens, 0 to 1
}

// Latencies are the times of a run's requests; nil: none was measured.
type Latencies struct {
	TTFT *Percentiles `json:"ttft,omitempty"` // time to the first token; streams only
	ITL  *Percentiles `json:"itl,omitempty"`  // every gap between chunks; chunks of one read have a gap of 0
	TPOT *Percentiles `json:"tpot,omitempty"` // (last − first) / (tokens − 1) per request
	E2E  *Percentiles `json:"e2e,omitempty"`
	// delay of the client's sends; large values mean that the client is the bottleneck
	Lag *Percentiles `json:"send_lag,omitempty"`
}

// SessionReport holds the results that only sessions have: their number, and the hits that an unlimited cache
// would have had for the same prompts (see oracle).
type SessionReport struct {
	Sessions      int     `json:"sessions"` // asked for
	Turns         int     `json:"turns"`
	SystemPrompts int     `json:"system_prompts"`
	SystemTokens  int     `json:"system_tokens"` // tokens of 4 bytes, as in the next fields
	TurnTokens    int     `json:"turn_tokens"`
	ThinkMs       float64 `json:"think_ms"`
	LongShare     float64 `json:"long_share,omitempty"`
	LongTokens    int     `json:"long_tokens,omitempty"`

	Begun int `json:"begun"`
	Whole int `json:"whole"` // played to the last turn
	Cut   int `json:"cut"`   // ended by a failed turn

	// prompt tokens of good requests that an unlimited cache holds
	ReusableTokens int     `json:"reusable_tokens"`
	OracleShare    float64 `json:"oracle_share"` // of the prompt tokens, 0 to 1: the bound of HitShare
	// cached over reusable tokens; above 1 if engines were warm before
	OfOracle float64 `json:"of_oracle"`
}

// Goodput counts requests that met both limits. Failed requests did not.
type Goodput struct {
	TTFTMs float64 `json:"slo_ttft_ms"`
	TPOTMs float64 `json:"slo_tpot_ms"`
	Share  float64 `json:"share"` // of the offered requests, 0 to 1
	PerS   float64 `json:"per_s"`
}

// maxOverMean returns the largest count over the mean; 0 without counts.
func maxOverMean(counts map[string]int) float64 {
	var most, sum int
	for _, n := range counts {
		most, sum = max(most, n), sum+n
	}
	if sum == 0 {
		return 0
	}
	return float64(most*len(counts)) / float64(sum)
}

// WriteTable writes r as a table.
func (r *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	// tabwriter returns errors at Flush
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(t, format, args...) }
	p("%s\n", r.headline())
	p("%d requests in %.1f s: %d ok, %d failed%s\n", r.Offered, r.DurationS, r.OK, r.Failed,
		formatErrorKinds(r.Errors))
	p("%.1f requests/s, %.0f output tokens/s\n", r.RequestsPerS, r.OutputTokensPerS)
	p("goodput %.1f %% (TTFT ≤ %g ms, TPOT ≤ %g ms), %.1f requests/s\n\n", 100*r.Goodput.Share,
		r.Goodput.TTFTMs, r.Goodput.TPOTMs, r.Goodput.PerS)
	r.writeCache(p)
	p("ms\tmean\tp50\tp90\tp95\tp99\tmax\tcount\t\n")
	for _, row := range []struct {
		name string
		v    *Percentiles
	}{
		{"first token", r.TTFT},
		{"between tokens", r.ITL},
		{"per output token", r.TPOT},
		{"end to end", r.E2E},
		{"send lag", r.Lag},
	} {
		if v := row.v; v != nil {
			p("%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%d\t\n", row.name, v.Mean, v.P50, v.P90, v.P95, v.P99,
				v.Max, v.Count)
		}
	}
	r.writeRanks(p)
	if r.CPU != nil {
		p("\n%s\n", r.CPU)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}

// writeCache writes the share of cached tokens and the share that was possible.
func (r *Report) writeCache(p func(format string, args ...any)) {
	if r.CachedTokens > 0 || r.Sessions != nil {
		p("cached %.1f %% of %d prompt tokens", 100*r.HitShare, r.PromptTokens)
		if s := r.Sessions; s != nil {
			p("; a perfect cache holds %.1f %%, of which that is %.1f %%", 100*s.OracleShare, 100*s.OfOracle)
		}
		p("\n\n")
	}
}

// writeRanks writes a line per rank.
func (r *Report) writeRanks(p func(format string, args ...any)) {
	if len(r.Ranks) == 0 {
		return
	}
	p("\nrank\trequests\t\n")
	for _, name := range slices.SortedFunc(maps.Keys(r.Ranks), compareRanks) {
		p("%s\t%d\t\n", name, r.Ranks[name])
	}
	p("busiest over mean\t%.2f\t\n", r.Busiest)
}

// compareRanks orders app/group/rank with numeric groups and ranks.
func compareRanks(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

func (r *Report) headline() string {
	load := fmt.Sprintf("closed loop, %d clients", r.Concurrency)
	if r.Mode == Open {
		load = fmt.Sprintf("open loop, %g requests/s, %s", r.Rate, r.Arrivals)
	}
	if s := r.Sessions; s != nil {
		return fmt.Sprintf(
			"%s, model %s: %d sessions of %d turns, %g/s, %s; %s of %d tokens, %d tokens a message, %g ms "+
				"between turns, %d tokens an answer",
			r.URL, r.Model, s.Begun, s.Turns, r.Rate, r.Arrivals, plural(s.SystemPrompts,
				"system prompt"), s.SystemTokens, s.TurnTokens, s.ThinkMs, r.MaxTokens)
	}
	stream := "whole answers"
	if r.Stream {
		stream = "streams"
	}
	return fmt.Sprintf("%s, model %s: %s, %s, %s, %d byte prompts, %d tokens", r.URL, r.Model, load, r.Route,
		stream, r.PromptBytes, r.MaxTokens)
}

func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// formatErrorKinds lists the kinds of errors, most frequent first.
func formatErrorKinds(errors map[string]int) string {
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

// CPU is the processor time of the watched processes, without children, during a run and its warm-up.
type CPU struct {
	Seconds      float64 `json:"seconds"`
	Cores        float64 `json:"cores"`          // mean number of busy cores
	UsPerRequest float64 `json:"us_per_request"` // total time over all requests
	UsPerChunk   float64 `json:"us_per_chunk"`   // total time over all chunks; 0 without chunks
}

// String returns one line.
func (c *CPU) String() string {
	line := fmt.Sprintf("CPU %.2f s (%.2f cores), %.1f µs per request", c.Seconds, c.Cores, c.UsPerRequest)
	if c.UsPerChunk > 0 {
		line += fmt.Sprintf(", %.2f µs per chunk", c.UsPerChunk)
	}
	return line
}

// cpuReading is the processor time so far; ok is false if it could not be read.
type cpuReading struct {
	used time.Duration
	ok   bool
}

// chargeCPU divides the time between two readings by the work done; nil if a reading failed.
func chargeCPU(before, after cpuReading, wall time.Duration, done counts) *CPU {
	used := after.used - before.used
	if !before.ok || !after.ok || used < 0 || wall <= 0 || done.requests == 0 {
		return nil
	}
	c := &CPU{Seconds: used.Seconds(), Cores: used.Seconds() / wall.Seconds()}
	c.UsPerRequest = float64(used.Microseconds()) / float64(done.requests)
	if done.chunks > 0 {
		c.UsPerChunk = float64(used.Microseconds()) / float64(done.chunks)
	}
	return c
}

// cpuTime returns the processor time of pids so far.
func cpuTime(pids []int) cpuReading {
	var sum time.Duration
	for _, pid := range pids {
		stat, there := process.ReadStat(pid)
		if !there || stat.CPU < 0 {
			return cpuReading{}
		}
		sum += stat.CPU
	}
	return cpuReading{sum, len(pids) > 0}
}
