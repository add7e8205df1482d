package inprocess

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/test/harness"
)

var nodesSeeds = flag.Int("nodes.seeds", 4, "how many random walks over three nodes")

// Sizes of a walk over nodes.
const (
	nodeSteps   = 14
	nodeRest    = 4 * time.Second  // longest pause between most steps
	nodeLong    = 20 * time.Second // between some: longer than a lease
	settledIn   = 60 * time.Second // after the last heal, with the longest backoff of a restart on top
	longestWait = 64 * time.Second
)

// TestRandomWalkOverNodes cuts, silences and delays links, kills engines, deploys and asks at random; once
// all is healed, everything must be as wanted, with one view everywhere. A failing walk names its seed: -run
// 'TestRandomWalkOverNodes/seed_7$'.
func TestRandomWalkOverNodes(t *testing.T) {
	n := *nodesSeeds
	if testing.Short() {
		n = min(n, 2)
	}
	for seed := range n {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { walkNodes(t, uint64(seed)) })
		})
	}
}

// nodeWalk runs one random walk over nodes.
type nodeWalk struct {
	t       *testing.T
	c       *harness.Cluster
	rand    *rand.Rand
	clients sync.WaitGroup
	steps   []string
}

func walkNodes(t *testing.T, seed uint64) {
	r := &nodeWalk{t: t, rand: rand.New(rand.NewPCG(seed, 1))}
	rule := []string{"serve", "fence"}[r.rand.IntN(2)]
	r.c = harness.New(t, harness.Nodes(3), harness.Slots(8), harness.OnLeaseLoss(rule))
	r.c.Expect(harness.NodeFails, harness.EngineFails, harness.RequestsFail)
	r.c.WaitVoters(3)
	r.c.Deploy(spread("a", 6) + simApp("gang", 6, "lockstep", "sim_step_ms: 10, sim_startup_s: 1",
		"placement_group_strategy: SPREAD")[len("applications:\n"):])
	r.c.WaitStatus("a", "RUNNING")
	r.c.WaitStatus("gang", "RUNNING")
	dies := r.rand.IntN(3 * nodeSteps)
	for i := range nodeSteps {
		r.step()
		if i == dies {
			p := r.peer()
			r.note("drop %s, leads %v", p.ID, p.Leads())
			p.Drop()
		}
		limit := nodeRest
		if r.rand.IntN(4) == 0 {
			limit = nodeLong
		}
		time.Sleep(time.Duration(r.rand.Int64N(int64(limit))))
	}
	r.settle(rule)
	if t.Failed() {
		t.Logf("seed %d (%s); steps:\n%s", seed, rule, lines(r.steps))
	}
}

func (r *nodeWalk) note(format string, args ...any) {
	r.steps = append(r.steps, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

func (r *nodeWalk) peer() *harness.Peer {
	list := r.c.Running()
	return list[r.rand.IntN(len(list))]
}

// pair draws two nodes.
func (r *nodeWalk) pair() (a, b *harness.Peer) {
	a, b = r.peer(), r.peer()
	for a == b {
		b = r.peer()
	}
	return a, b
}

func (r *nodeWalk) step() {
	switch n := r.rand.IntN(14); {
	case n < 2:
		p := r.peer()
		r.note("silence around %s", p.ID)
		p.Silence()
	case n < 3:
		a, b := r.pair()
		r.note("silence from %s to %s", a.ID, b.ID)
		r.c.Net.Silence(a.Host, b.Host)
	case n < 4:
		a, b := r.pair()
		r.note("cut between %s and %s", a.ID, b.ID)
		r.c.Net.Cut(a.Host, b.Host)
	case n < 5:
		a, b := r.pair()
		d := time.Duration(r.rand.IntN(100)) * time.Millisecond
		r.note("%s from %s to %s", d, a.ID, b.ID)
		r.c.Net.Delay(a.Host, b.Host, d)
	case n < 8:
		r.note("heal")
		r.c.Reconnect()
	case n < 10:
		if live := r.c.Engines.Live(); len(live) > 0 {
			e := live[r.rand.IntN(len(live))]
			r.note("kill %s", e)
			e.Kill()
		}
	default:
		r.ask(r.peer())
	}
}

// ask sends some requests to a node.
func (r *nodeWalk) ask(p *harness.Peer) {
	n := 1 + r.rand.IntN(20)
	r.note("%d requests to %s", n, p.ID)
	for i := range n {
		model, tokens := []string{"a", "gang"}[i%2], 1+r.rand.IntN(300)
		r.clients.Go(func() {
			s := p.StreamChat(r.t.Context(), model, tokens)
			switch {
			case s.OK(), p.Gone(), s.Error == "500": // the engine's own words
			case s.Status == http.StatusOK:
				assert.Contains(r.t, []string{"upstream_lost", "stalled", "drained"}, s.Error, s)
				assert.False(r.t, s.Whole(), s)
			default:
				assert.Contains(r.t, []string{
					"overloaded", "queue_timeout", "no_ready_rank",
					"upstream_failed", "first_token_timeout",
				}, s.Error, s)
			}
		})
	}
}

// settle heals everything; then nothing may be left over.
func (r *nodeWalk) settle(rule string) {
	r.note("heal for good")
	r.c.Reconnect()
	healed := time.Now()
	r.c = r.c.Running()[0].Cluster
	r.c.Until("one view", func() error { return oneView(r.c) })
	r.note("one view after %s", time.Since(healed))
	assert.LessOrEqual(r.t, time.Since(healed), oneViewIn+5*time.Second)
	r.c.Led()
	r.c.Until("all ranks serve", func() error {
		if err := allReady(r.c, "a", 6); err != nil {
			return err
		}
		return allReady(r.c, "gang", 6)
	})
	r.note("all ready after %s", time.Since(healed))
	assert.LessOrEqual(r.t, time.Since(healed), settledIn+longestWait)
	r.c.Until("12 engines", func() error {
		if n := len(r.c.Engines.Live()); n != 12 {
			return fmt.Errorf("%d live", n)
		}
		return nil
	})
	r.clients.Wait()
	for _, p := range r.c.Running() {
		for _, model := range []string{"a", "gang"} {
			ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
			s := p.StreamChat(ctx, model, 5)
			cancel()
			assert.True(r.t, s.OK(), "%s at %s: %s", model, p.ID, s)
		}
		p.Quiet()
	}
	if rule == "fence" {
		assert.Empty(r.t, r.c.Engines.Overlaps())
	}
}
