package dpserver

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/engine"
)

// FS8, HF55, RP50: each sign after a suspicion that probes have confirmed.
func TestWhatRefutesASuspicion(t *testing.T) {
	signs := map[string]func(g *healthGate, at time.Time){
		"nothing":             func(*healthGate, time.Time) {},
		"/health answers":     func(g *healthGate, at time.Time) { g.noteSign(signHealth, at) },
		"a probe":             func(g *healthGate, at time.Time) { g.noteSign(signProbe, at) },
		"tokens of a request": func(g *healthGate, at time.Time) { g.noteSign(signTokens, at) },
		"prompt counter": func(g *healthGate, at time.Time) {
			g.noteCounters(&engine.Counters{Seen: true, PromptTokens: 1}, false, at)
		},
		"generation counter": func(g *healthGate, at time.Time) {
			g.noteCounters(&engine.Counters{Seen: true, GenerationTokens: 9}, false, at)
		},
		"the probes' tokens": func(g *healthGate, at time.Time) {
			g.noteCounters(&engine.Counters{Seen: true, GenerationTokens: 3}, false, at)
		},
		"counters that stand still": func(g *healthGate, at time.Time) {
			g.noteCounters(&engine.Counters{Seen: true}, false, at)
		},
		"a page without counters": func(g *healthGate, at time.Time) {
			g.noteCounters(&engine.Counters{StartTime: 5}, false, at)
		},
		"kv events":    func(g *healthGate, at time.Time) { g.noteBatches(7, at) },
		"no kv events": func(g *healthGate, at time.Time) { g.noteBatches(6, at) },
	}
	refuted := map[string][suspicionCount]bool{ // late health, stalled, ejected
		"/health answers":     {true, false, false},
		"a probe":             {true, true, true},
		"tokens of a request": {true, true, true},
		"prompt counter":      {true, true, false},
		"generation counter":  {true, true, true},
		"the probes' tokens":  {true, true, false},
		"kv events":           {true, true, false},
	}
	for name, note := range signs {
		for k := range suspicionCount {
			begin := time.Unix(1000, 0)
			g := newHealthGate(begin)
			at := begin.Add(time.Minute)
			g.noteCounters(&engine.Counters{Seen: true}, false, at)
			g.noteBatches(6, at)
			g.probes = 3
			for range suspicionRules[k].reports {
				g.report(k, "cause", at)
			}
			for range suspicionRules[k].probes {
				g.noteFailedProbe(at.Add(time.Second), errors.New("500"))
			}
			note(&g, at.Add(2*time.Second))
			v, by := g.judge(at.Add(3*time.Second), true, time.Minute)
			want := refuted[name][k]
			assert.Equal(t, want, v == keepRank, "%s, suspicion %d: %d", name, k, v)
			if !want {
				assert.Equal(t, k, by)
			}
		}
	}
}

// HF55: the table of suspicions: a late `/health`, failed probes, and signs that the engine works.
func TestWhenARankIsFenced(t *testing.T) {
	const patience = 30 * time.Second
	silent, failed := context.DeadlineExceeded, errors.New("500")
	for name, c := range map[string]struct {
		by      suspicion
		reports int
		probes  []error
		quiet   time.Duration
		load    bool
		want    verdict
	}{
		"one late /health":                 {lateHealth, 1, []error{silent}, time.Hour, false, keepRank},
		"two, and no probe yet":            {lateHealth, 2, nil, time.Hour, false, keepRank},
		"two, idle":                        {lateHealth, 2, []error{silent}, 0, false, fenceRank},
		"two, with work, not long enough":  {lateHealth, 2, []error{silent}, patience - 1, true, holdRank},
		"two, with work, long enough":      {lateHealth, 2, []error{silent}, patience, true, fenceRank},
		"two, with work, and an error":     {lateHealth, 2, []error{failed}, 0, true, fenceRank},
		"stalled, the probe waits":         {stalled, 1, nil, time.Hour, true, keepRank},
		"stalled, silent, not long enough": {stalled, 1, []error{silent}, patience - 1, true, holdRank},
		"stalled, silent":                  {stalled, 1, []error{silent}, patience, true, fenceRank},
		"stalled, and an error":            {stalled, 1, []error{failed}, 0, true, fenceRank},
		"ejected twice":                    {ejected, 1, []error{failed, silent}, time.Hour, false, keepRank},
		"ejected":                          {ejected, 1, []error{failed, silent, failed}, 0, true, fenceRank},
		"ejected, with work, no answer": {
			ejected, 1, []error{failed, failed, silent}, 0, true, holdRank,
		},
		"ejected, idle, and no answer": {
			ejected, 1, []error{silent, silent, silent}, 0, false, fenceRank,
		},
	} {
		begin := time.Unix(1000, 0)
		g := newHealthGate(begin)
		for range c.reports {
			g.report(c.by, "cause", begin.Add(time.Nanosecond))
		}
		for _, err := range c.probes {
			g.noteFailedProbe(begin.Add(time.Nanosecond), err)
		}
		v, _ := g.judge(begin.Add(c.quiet), c.load, patience)
		assert.Equal(t, c.want, v, name)
	}
}

// HF55: an engine that worked while a probe waited had no time for it.
func TestAProbeBeforeASignDoesNotCount(t *testing.T) {
	begin := time.Unix(1000, 0)
	g := newHealthGate(begin)
	sent := begin.Add(time.Second)
	g.noteSign(signTokens, sent.Add(time.Second))
	g.report(lateHealth, "late", sent.Add(2*time.Second))
	g.report(lateHealth, "late", sent.Add(3*time.Second))
	g.noteFailedProbe(sent, errors.New("500"))
	v, _ := g.judge(sent.Add(time.Hour), false, 0)
	assert.Equal(t, keepRank, v)
}
