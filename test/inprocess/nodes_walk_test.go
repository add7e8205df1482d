package inprocess

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

var nodesSeeds = flag.Int("nodes.seeds", 20, "how many random walks over several nodes")

// Sizes of a walk over nodes.
const (
	nodeShort   = 4 // walks with -short
	nodeSteps   = 16
	tick        = 200 * time.Millisecond // between looks at the nodes that are away
	nodeRest    = 4 * time.Second        // longest pause between most steps
	nodeLong    = 20 * time.Second       // between some: longer than a lease
	awayFor     = 30 * time.Second       // longest time for which a node is down
	briefly     = 3 * time.Second        // the same where nothing may be started again
	settledIn   = 60 * time.Second       // after the last heal, with the longest backoff of a restart on top
	longestWait = 64 * time.Second
)

// world is a kind of cluster, and what may happen in it.
type world struct {
	name    string
	options []harness.Option
	fence   bool // --on-lease-loss
	gentle  bool // nothing that happens may cost the restart of an engine
	workers int  // nodes without role control; the others have every role, in a gentle world all but worker
	nodes   int
	kinds   []nodeFault
}

func worlds() []world {
	gentle := world{name: "gentle", gentle: true, nodes: 5, workers: 2, kinds: gentleFaults()}
	for i := range 3 {
		gentle.options = append(gentle.options, harness.Roles(i, "control", "ingress"))
	}
	for i := 3; i < 5; i++ {
		gentle.options = append(gentle.options, harness.Roles(i, "worker", "ingress"))
	}
	return []world{
		{name: "serve", nodes: 3, kinds: nodeFaults()},
		{name: "fence", nodes: 3, fence: true, kinds: nodeFaults()},
		gentle,
		{
			name: "removal", nodes: 4, workers: 1,
			options: []harness.Option{harness.Roles(3, "worker", "ingress")},
			kinds:   append(nodeFaults(), nodeFault{"remove", 2, (*nodeWalk).remove}),
		},
	}
}

// EN2, FS7, MB2, MB5, MB9, SK7: TestRandomWalkOverNodes cuts, silences and delays links, hangs disks, stops,
// crashes and removes nodes, kills engines, deploys and asks at random, over whole nodes with their own
// consensus, streams and disks. All the time the laws of nodes_laws_test.go hold; once all is healed,
// everything must be as wanted, with one view everywhere. A failing walk names its seed: -run
// 'TestRandomWalkOverNodes/seed_7$'.
func TestRandomWalkOverNodes(t *testing.T) {
	n := *nodesSeeds
	if testing.Short() {
		n = min(n, nodeShort)
	}
	all := worlds()
	for seed := range n {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { walkNodes(t, uint64(seed), &all[seed%len(all)]) })
		})
	}
}

// nodeWalk runs one random walk over nodes.
type nodeWalk struct {
	*world
	t        *testing.T
	c        *harness.Cluster
	rand     *rand.Rand
	laws     *laws
	clients  sync.WaitGroup
	steps    []string
	away     []*absence
	sick     []*harness.Peer // their disks are
	badLinks map[string]bool // nodes whose links fail
	removed  *harness.Peer
	revision int
}

// absence is a node that is down, or goes down.
type absence struct {
	*harness.Peer
	until time.Time     // it is started then
	ended chan struct{} // it is down
	start func() error
	up    chan error // nil = it was not started yet
}

func walkNodes(t *testing.T, seed uint64, w *world) {
	r := &nodeWalk{t: t, world: w, rand: rand.New(rand.NewPCG(seed, 1)), badLinks: map[string]bool{}}
	options := []harness.Option{
		harness.Nodes(w.nodes), harness.Slots(12), harness.OnDisk(),
	}
	if w.fence {
		options = append(options, harness.OnLeaseLoss("fence"))
	} else { // nobody fences an engine that has outlived its node
		options = append(options, harness.EnginesLiveOn())
	}
	r.c = harness.New(t, append(options, w.options...)...)
	r.c.Expect(harness.NodeFails, harness.NodeRemoved, harness.DiskFails, harness.NoLeaderAtStart,
		harness.EngineFails, harness.RequestsFail)
	r.c.WaitVoters(3)
	r.laws = newLaws(t)
	r.c.Deploy(spread("a", 6) + simApp("gang", 6, "lockstep", "sim_step_ms: 10, sim_startup_s: 1",
		"placement_group_strategy: "+map[bool]string{true: "PACK", false: "SPREAD"}[w.gentle],
	)[len("applications:\n"):])
	r.c.WaitStatus("a", "RUNNING")
	r.c.WaitStatus("gang", "RUNNING")
	for _, p := range r.c.Peers() {
		r.laws.follow(p)
	}
	for range nodeSteps {
		r.step()
		limit := nodeRest
		if r.rand.IntN(4) == 0 {
			limit = nodeLong
		}
		r.rest(limit)
	}
	r.settle()
	for _, fault := range r.laws.broken() {
		t.Error(fault)
	}
	if t.Failed() {
		t.Logf("seed %d (%s); steps:\n%s", seed, w.name, lines(r.steps))
	}
}

func (r *nodeWalk) note(format string, args ...any) {
	r.steps = append(r.steps, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

func (r *nodeWalk) span(limit time.Duration) time.Duration {
	return time.Duration(r.rand.Int64N(int64(limit)))
}

// rest lets time pass. Nodes that are away start meanwhile.
func (r *nodeWalk) rest(limit time.Duration) {
	for until := time.Now().Add(r.span(limit)); time.Now().Before(until); r.starts() {
		time.Sleep(min(time.Until(until), tick))
	}
}

// peers are the nodes that are up and stay so.
func (r *nodeWalk) peers() []*harness.Peer {
	return slices.DeleteFunc(r.c.Running(), func(p *harness.Peer) bool {
		return p == r.removed || slices.ContainsFunc(r.away, func(a *absence) bool { return a.Peer == p })
	})
}

// control are those of them with role control.
func (r *nodeWalk) control() []*harness.Peer {
	n := r.nodes - r.workers
	return slices.DeleteFunc(r.peers(), func(p *harness.Peer) bool {
		return slices.Index(r.c.Peers(), p) >= n
	})
}

// draw draws one of a list; nil if it is empty.
func (r *nodeWalk) draw(list []*harness.Peer) *harness.Peer {
	if len(list) == 0 {
		return nil
	}
	return list[r.rand.IntN(len(list))]
}

// pair draws two nodes.
func (r *nodeWalk) pair(list []*harness.Peer) (a, b *harness.Peer, ok bool) {
	if len(list) < 2 {
		return nil, nil, false
	}
	i := r.rand.IntN(len(list))
	j := (i + 1 + r.rand.IntN(len(list)-1)) % len(list)
	return list[i], list[j], true
}

// step does one thing, drawn by weight.
func (r *nodeWalk) step() {
	sum := 0
	for _, k := range r.kinds {
		sum += k.weight
	}
	n := r.rand.IntN(sum)
	for _, k := range r.kinds {
		if n -= k.weight; n < 0 {
			k.do(r)
			return
		}
	}
}

// starts starts the nodes whose time has come.
func (r *nodeWalk) starts() {
	r.away = slices.DeleteFunc(r.away, func(a *absence) bool {
		select {
		case <-a.ended:
		default:
			return false
		}
		if a.up == nil && time.Now().After(a.until) {
			r.note("start %s", a.ID)
			a.up = make(chan error, 1)
			go func() { a.up <- a.start() }()
		}
		if len(a.up) == 0 {
			return false
		}
		if err := <-a.up; err != nil { // a service manager starts it again
			r.note("start of %s: %v", a.ID, err)
			a.up, a.until = nil, time.Now().Add(briefly)
			return false
		}
		r.note("%s is up", a.ID)
		if !r.badLinks[a.ID] && !slices.Contains(r.sick, a.Peer) {
			r.laws.mended(a.ID)
		}
		r.laws.follow(a.Peer)
		return true
	})
}

// ask sends some requests to a node.
func (r *nodeWalk) ask() {
	p := r.draw(r.peers())
	if p == nil {
		return
	}
	n := 1 + r.rand.IntN(20)
	r.note("%d requests to %s", n, p.ID)
	for i := range n {
		model, tokens := []string{"a", "gang"}[i%2], 1+r.rand.IntN(300)
		r.clients.Go(func() {
			s := p.StreamChat(r.t.Context(), model, tokens)
			switch {
			case s.OK(), s.Status == 0 || s.Err != nil: // its node went down
			case s.Error == "500", s.Error == "503": // the engine's own words
			case s.Status == http.StatusOK:
				assert.Contains(r.t, breaks(s), s.Error, s)
				assert.False(r.t, s.Whole(), s)
			default:
				assert.Contains(r.t, []string{
					"overloaded", "queue_timeout", "no_ready_rank", "upstream_failed",
					"first_token_timeout", "shutting_down", "model_not_found",
				}, s.Error, s)
			}
		})
	}
}

// settle heals everything; then nothing may be left over.
func (r *nodeWalk) settle() {
	r.note("heal for good")
	r.heal()
	for _, a := range r.away {
		a.until = time.Now()
	}
	for len(r.away) > 0 {
		r.starts()
		time.Sleep(100 * time.Millisecond)
	}
	if r.removed != nil {
		r.c.Until(r.removed.ID+" ends", func() error {
			if !r.removed.HasEnded() {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		assert.Empty(r.t, r.c.Engines.On(r.removed.Host), "engines of a node that was removed")
		_ = r.removed.End()
	}
	healed := time.Now()
	r.c = r.peers()[0].Cluster
	r.c.Until("one view", func() error { return oneView(r.c) })
	r.note("one view after %s", time.Since(healed))
	assert.LessOrEqual(r.t, time.Since(healed), oneViewIn+10*time.Second)
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
	for _, p := range r.peers() {
		for _, model := range []string{"a", "gang"} {
			ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
			s := p.StreamChat(ctx, model, 5)
			cancel()
			assert.True(r.t, s.OK(), "%s at %s: %s", model, p.ID, s)
		}
		p.Quiet()
	}
	if r.fence {
		assert.Empty(r.t, r.c.Engines.Overlaps())
	}
	for id, u := range r.peers()[0].State().Units {
		assert.Equal(r.t, state.Ready, u.Phase, id)
		if r.gentle {
			assert.Equal(r.t, uint64(1), u.Epoch, "%s was started again, and nothing had happened to it", id)
		}
	}
}
