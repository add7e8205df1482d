//go:build linux

package main

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/loadgen"
)

// TestSettingsAreAccepted: every row of the comparison is a file that deploys.
func TestSettingsAreAccepted(t *testing.T) {
	names := map[string]bool{}
	for _, r := range settings() {
		_, warnings, err := app.Parse(app.Default(), "bench.yaml", []byte(simApp(r)))
		require.NoError(t, err, r.name)
		assert.Empty(t, warnings, r.name)
		assert.False(t, names[r.name], r.name)
		names[r.name] = true
	}
	assert.Equal(t, "round-robin", settings()[0].name, "ratios are to the first row")
}

func TestTrafficsFitTheRanks(t *testing.T) {
	for _, x := range traffics() {
		assert.LessOrEqual(t, x.talk.SystemTokens+x.talk.LongTokens+x.talk.Turns*(x.talk.TurnTokens+x.tokens),
			32768, x.name)
		assert.Positive(t, x.rate, x.name)
		assert.Positive(t, x.warmup, x.name)
	}
}

func TestChosen(t *testing.T) {
	name := func(r routed) string { return r.name }
	all, err := chosen(settings(), "", name)
	require.NoError(t, err)
	assert.Len(t, all, len(settings()))
	some, err := chosen(settings(), "lmetric-1,kv-tuned", name)
	require.NoError(t, err)
	assert.Len(t, some, 2)
	_, err = chosen(settings(), "lmetric-1,best", name)
	require.ErrorContains(t, err, `no row "best": there are round-robin, power-of-two`)
	rows, err := (&policyFlags{policies: "lmetric-1"}).rows()
	require.NoError(t, err)
	assert.Equal(t, "round-robin", rows[0].name)
}

func TestBusiestCountsIdleRanks(t *testing.T) {
	assert.InDelta(t, 4, busiest(map[string]int{"bench/0/1": 10}), 1e-9)
	assert.InDelta(t, 1, busiest(map[string]int{"0": 5, "1": 5, "2": 5, "3": 5}), 1e-9)
	assert.Zero(t, busiest(nil))
}

func TestFiguresOfAnEmptyReport(t *testing.T) {
	r := &loadgen.Report{Sessions: &loadgen.SessionReport{}}
	for _, f := range figures() {
		assert.Zero(t, f.of(r, r), f.head)
	}
}

func TestFreshPromptsDiffer(t *testing.T) {
	req := payload(64, 1, 0, false, false)
	c := &client{req: bytes.Clone(req)}
	c.tag = tagged(c.req)
	seen := map[string]bool{string(req): true}
	for range 100 {
		c.nextPrompt()
		require.Len(t, c.req, len(req))
		require.False(t, seen[string(c.req)])
		seen[string(c.req)] = true
	}
	assert.Contains(t, string(c.req), fmt.Sprintf(`"content":"%s`, c.tag))
}
