package simulate

import (
	"fmt"
	"slices"
	"time"

	"github.com/dpserve/dpserve/routing"
)

// firstSeed is what the first of a study's seeds is.
const firstSeed = 11

// Setting is what a row of a study plays.
type Setting struct {
	Name      string
	Config    GroupConfig
	IsGroup   bool // the ranks are a lockstep group
	NewPolicy func() (routing.Policy, error)
}

// play is one run; work is in the order of time.
func (s *Setting) play(seed uint64, work []Request, each func(sent int) error) (*Result, error) {
	cfg := s.Config
	cfg.Seed, cfg.Each = seed, each
	if !s.IsGroup {
		return Run(cfg.Config, work, s.NewPolicy)
	}
	cfg.Until = work[len(work)-1].At + time.Nanosecond
	r, err := RunGroup(cfg, work, s.NewPolicy)
	if err != nil {
		return nil, err
	}
	return r.Whole, nil
}

// Study compares settings at several loads. Every setting plays the same requests at a seed. Its runs need
// nothing of each other, so several may be played at a time.
type Study struct {
	Loads    []float64
	Seeds    int
	Work     func(load float64, seed uint64) []Request // at least one, in the order of time
	settings []Setting                                 // the last one is a bound: all ranks in one
	runs     []studyRun
}

// studyRun is one run with what it came to.
type studyRun struct {
	load, setting, seed int
	offered, refused    int
	figures             []float64 // by Measure
	alone               []float64 // likewise, of each request by itself; of the first setting alone
}

// NewStudy adds the bounds to the settings, of which there is at least one.
func NewStudy(settings []Setting, loads []float64, seeds int,
	work func(load float64, seed uint64) []Request,
) *Study {
	pooled := settings[0].Config.Pooled()
	settings = append(slices.Clip(settings), Setting{
		Name: "one pooled rank", Config: GroupConfig{Config: pooled},
		NewPolicy: func() (routing.Policy, error) { return routing.New("round-robin", "", nil) },
	})
	s := &Study{Loads: loads, Seeds: seeds, Work: work, settings: settings}
	for load := range loads {
		for setting := range settings {
			for seed := range seeds {
				s.runs = append(s.runs, studyRun{load: load, setting: setting, seed: seed})
			}
		}
	}
	return s
}

// Runs is the number of runs.
func (s *Study) Runs() int { return len(s.runs) }

// Name names a run to people.
func (s *Study) Name(run int) string {
	r := &s.runs[run]
	return fmt.Sprintf("%s, load %g, seed %d", s.settings[r.setting].Name, s.Loads[r.load], firstSeed+r.seed)
}

// Play plays a run. each is called with the share of its requests that came; an error ends the run.
func (s *Study) Play(run int, each func(share float64) error) error {
	r := &s.runs[run]
	seed := firstSeed + uint64(r.seed)
	work := s.Work(s.Loads[r.load], seed)
	setting := &s.settings[r.setting]
	got, err := setting.play(seed, work, func(sent int) error {
		return each(float64(sent) / float64(len(work)))
	})
	if err != nil {
		return fmt.Errorf("%s: %w", setting.Name, err)
	}
	r.offered, r.refused, r.figures = got.Offered, got.Refused, figuresOf(got)
	if r.setting == 0 {
		r.alone = figuresOf(setting.Config.Bound(work))
	}
	return nil
}

// Measure is a figure of a run.
type Measure struct {
	Key    string // in JSON
	Title  string // of its column
	Name   string // of its plot
	Format string // of a mean
	Rare   bool   // it is shown if some run has it
	of     func(r *Result) float64
}

// Measures are all figures, in the order in which they are shown.
func Measures() []Measure {
	seconds := func(p float64) func(r *Result) float64 {
		return func(r *Result) float64 { return Percentile(r.TTFT, p).Seconds() }
	}
	tpot := func(p float64) func(r *Result) float64 {
		return func(r *Result) float64 { return ms(Percentile(r.TPOT, p)) }
	}
	share := func(of func(r *Result) int) func(r *Result) float64 {
		return func(r *Result) float64 { return 100 * float64(of(r)) / float64(max(r.Offered, 1)) }
	}
	return []Measure{
		{
			Key: "goodput_percent", Title: "GOODPUT %", Name: "goodput, %", Format: "%.1f",
			of: func(r *Result) float64 { return 100 * r.Goodput },
		},
		{
			Key: "ttft_mean_s", Title: "TTFT s MEAN", Name: "first token, mean, s", Format: "%.2f",
			of: func(r *Result) float64 { return Mean(r.TTFT).Seconds() },
		},
		{Key: "ttft_p50_s", Title: "P50", Name: "first token, p50, s", Format: "%.2f", of: seconds(.5)},
		{Key: "ttft_p99_s", Title: "P99", Name: "first token, p99, s", Format: "%.2f", of: seconds(.99)},
		{Key: "tpot_p50_ms", Title: "TPOT ms P50", Name: "per token, p50, ms", Format: "%.1f", of: tpot(.5)},
		{Key: "tpot_p99_ms", Title: "P99", Name: "per token, p99, ms", Format: "%.0f", of: tpot(.99)},
		{
			Key: "hit_percent", Title: "HIT %", Name: "prompt tokens from a cache, %", Format: "%.1f",
			of: func(r *Result) float64 { return 100 * r.Hit },
		},
		{
			Key: "max_mean_requests", Title: "MAX/MEAN REQUESTS", Name: "requests, busiest rank over mean",
			Format: "%.2f", of: func(r *Result) float64 { return MaxMean(r.Requests) },
		},
		{
			Key: "max_mean_work", Title: "WORK", Name: "prefill, busiest rank over mean",
			Format: "%.2f", of: func(r *Result) float64 { return MaxMean(r.Work) },
		},
		{Key: "split_percent", Title: "SPLIT %", Format: "%.1f", Rare: true, of: share((*Result).split)},
		{Key: "max_mean_burst", Title: "OF A BURST", Format: "%.2f", Rare: true, of: func(r *Result) float64 {
			mean, _ := r.BurstMaxMean()
			return mean
		}},
		{
			Key: "failed_percent", Title: "FAILED %", Format: "%.2f", Rare: true,
			of: share(func(r *Result) int { return r.Failed }),
		},
	}
}

// split is how many prompts prefill ranks computed.
func (r *Result) split() (n int) {
	for _, requests := range r.Prefill.Requests {
		n += requests
	}
	return n
}

func figuresOf(r *Result) []float64 {
	var out []float64
	for _, m := range Measures() {
		out = append(out, m.of(r))
	}
	return out
}

// Report is what a study came to.
type Report struct {
	App       string  `json:"app"`
	Trace     string  `json:"trace"`
	Seeds     int     `json:"seeds"`
	Ingresses int     `json:"ingresses"`
	LagMs     float64 `json:"lag_ms"`
	TTFTMs    float64 `json:"slo_ttft_ms"`
	TPOTMs    float64 `json:"slo_tpot_ms"`
	Loads     []Load  `json:"loads"`
}

// Load is what the settings came to at one load.
type Load struct {
	Load     float64 `json:"load"`
	Requests int     `json:"requests"`
	Refused  int     `json:"refused"` // longer than a rank holds
	Settings []Row   `json:"settings"`
	// Alone is what each request gets by itself on an idle rank, whose cache holds all prompts before it.
	// Pooled is one rank as fast as all together, first come first served. Above its capacity a policy may
	// answer more in time, because it lets some requests wait for the others.
	Alone  Row `json:"alone"`
	Pooled Row `json:"pooled"`
}

// Row is a setting's figures at one load.
type Row struct {
	Name    string              `json:"name"`
	Figures map[string]Interval `json:"figures"` // by the Key of a Measure
}

// Report sums up the runs, which have all been played.
func (s *Study) Report() *Report {
	cfg := &s.settings[0].Config
	out := &Report{
		Seeds: s.Seeds, Ingresses: cfg.Ingresses, LagMs: ms(cfg.Lag), TTFTMs: ms(cfg.Goals.TTFT),
		TPOTMs: ms(cfg.Goals.TPOT),
	}
	runs := s.runs
	for _, load := range s.Loads {
		l := Load{Load: load, Requests: runs[0].offered, Refused: runs[0].refused}
		l.Alone = newRow("alone, idle rank", runs[:s.Seeds], func(r *studyRun) []float64 { return r.alone })
		delete(l.Alone.Figures, "max_mean_requests")
		delete(l.Alone.Figures, "max_mean_work")
		for i := range s.settings {
			played := func(r *studyRun) []float64 { return r.figures }
			row := newRow(s.settings[i].Name, runs[:s.Seeds], played)
			if runs = runs[s.Seeds:]; i < len(s.settings)-1 {
				l.Settings = append(l.Settings, row)
			} else {
				l.Pooled = row
			}
		}
		out.Loads = append(out.Loads, l)
	}
	return out
}

func newRow(name string, runs []studyRun, figures func(r *studyRun) []float64) Row {
	row := Row{Name: name, Figures: map[string]Interval{}}
	for i, m := range Measures() {
		var values []float64
		for k := range runs {
			values = append(values, figures(&runs[k])[i])
		}
		if !m.Rare || slices.Max(values) > 0 {
			row.Figures[m.Key] = NewInterval(values)
		}
	}
	return row
}
