package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/state"
)

// attempt is one PutApps of the register, with the revision that it expected.
type attempt struct{ expect uint64 }

// outcome is the result of an attempt. unknown: it may be applied, even later.
type outcome struct {
	revision uint64
	stale    bool
	unknown  bool
}

// register is a revision: a write that expects it increments it, any other write is refused.
func register() porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{uint64(0)} },
		Step: func(st, in, out any) []any {
			rev, a, o := st.(uint64), in.(attempt), out.(outcome)
			fits := a.expect == rev
			switch {
			case o.unknown && fits:
				return []any{rev, rev + 1}
			case o.unknown:
				return []any{rev}
			case o.stale && !fits:
				return []any{rev}
			case !o.stale && fits && o.revision == rev+1:
				return []any{rev + 1}
			}
			return nil
		},
		Equal:             func(a, b any) bool { return a == b },
		DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v → %+v", in, out) },
	}
	return m.ToModel()
}

// history is what the clients observed.
type history struct {
	mu  sync.Mutex
	ops []porcupine.Operation
}

func (h *history) add(op porcupine.Operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ops = append(h.ops, op)
}

// decided leaves out impossible operations: a write of unknown outcome whose revision another write made, and
// all but the earliest of those that may have made one. A write that is left out may always have done
// nothing, so the verdict stays the same.
func decided(ops []porcupine.Operation) []porcupine.Operation {
	maker := map[uint64]porcupine.Operation{} // by the revision expected
	var left []porcupine.Operation
	for _, op := range ops {
		if out := op.Output.(outcome); !out.unknown {
			left = append(left, op)
			if !out.stale {
				maker[op.Input.(attempt).expect] = op
			}
		}
	}
	for _, op := range ops {
		expect := op.Input.(attempt).expect
		known, ok := maker[expect]
		if op.Output.(outcome).unknown && (!ok || known.Output.(outcome).unknown && op.Call < known.Call) {
			maker[expect] = op
		}
	}
	for _, op := range maker {
		if op.Output.(outcome).unknown {
			left = append(left, op)
		}
	}
	return left
}

// ask makes one write through any member.
func ask(ctx context.Context, c *cluster.Cluster, a attempt, spec string) (outcome, bool) {
	cmd := putApp("demo", spec)
	cmd.PutApps.Expect = map[string]uint64{"demo": a.expect}
	res, err := c.Propose(ctx, cmd)
	switch {
	case err == nil:
		return outcome{revision: res.Apps["demo"]}, true
	case errors.Is(err, state.ErrStaleRevision):
		return outcome{stale: true}, true
	case errors.Is(err, cluster.ErrNotLeader), errors.Is(err, cluster.ErrNoMajority):
		return outcome{}, false // nothing was done
	default:
		return outcome{unknown: true}, true
	}
}

// TestRegister: the model refuses histories that must not happen.
func TestRegister(t *testing.T) {
	t.Parallel()
	op := func(call, back int64, a attempt, o outcome) porcupine.Operation {
		return porcupine.Operation{Input: a, Call: call, Output: o, Return: back}
	}
	for name, tc := range map[string]struct {
		legal bool
		ops   []porcupine.Operation
	}{
		"one after the other": {true, []porcupine.Operation{
			op(0, 1, attempt{0}, outcome{revision: 1}),
			op(2, 3, attempt{1}, outcome{revision: 2}),
		}},
		"two makers of one revision": {false, []porcupine.Operation{op(0, 9, attempt{0},
			outcome{revision: 1}), op(1, 8, attempt{0}, outcome{revision: 1})}},
		"a lost write": {false, []porcupine.Operation{op(0, 1, attempt{0},
			outcome{revision: 1}), op(2, 3, attempt{1}, outcome{stale: true})}},
		"of an unknown write": {true, []porcupine.Operation{op(0, 9, attempt{0},
			outcome{unknown: true}), op(2, 3, attempt{1}, outcome{revision: 2})}},
		"of one that came later": {false, []porcupine.Operation{op(4, 9, attempt{0},
			outcome{unknown: true}), op(2, 3, attempt{1}, outcome{revision: 2})}},
	} {
		assert.Equal(t, tc.legal, porcupine.CheckOperations(register(), decided(tc.ops)), name)
	}
}

// MB9: clients compete for the next revision through every member while leaders are killed and cut off. One
// register must explain all their observations.
func TestLinearizable(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	rounds, clients := 3, 4
	if testing.Short() {
		rounds = 2
	}
	g := threeVoters(t, true)
	h := &history{}
	ctx, stop := context.WithCancel(t.Context())
	begin := time.Now()
	var wg sync.WaitGroup
	for id := range clients {
		wg.Go(func() { g.client(ctx, h, id, rand.New(rand.NewPCG(seed, uint64(id)+1)), begin) })
	}
	for range rounds {
		time.Sleep(time.Duration(50+random.IntN(150)) * time.Millisecond)
		m := g.leader()
		if random.IntN(2) == 0 {
			g.testNetwork.isolate(m.address, true)
			g.leader(g.others(m)...)
			g.testNetwork.isolate(m.address, false)
			continue
		}
		g.stop(m)
		g.leader()
		g.start(m)
	}
	stop()
	wg.Wait()
	require.NotEmpty(t, h.ops)
	ops := decided(h.ops)
	res := porcupine.CheckOperationsTimeout(register(), ops, limit)
	assert.Equal(t, porcupine.Ok, res, "seed %d: %d operations have no order that explains them", seed,
		len(ops))
	g.same()
}

// client writes until ctx ends, with the revision that its member shows or the last one that it observed.
func (g *group) client(ctx context.Context, h *history, id int, random *rand.Rand, begin time.Time) {
	for n := 0; ctx.Err() == nil; n++ {
		all := g.clusters()
		m := all[random.IntN(len(all))]
		a := attempt{}
		if app := m.State().Apps["demo"]; app != nil {
			a.expect = app.Revision
		}
		each, cancel := context.WithTimeout(ctx, 2*time.Second)
		called := time.Since(begin).Nanoseconds()
		out, done := ask(each, m, a, fmt.Sprint(id, "-", n))
		cancel()
		if done {
			back := time.Since(begin).Nanoseconds()
			if out.unknown {
				back = 1 << 62 // it may happen at any time after the call
			}
			h.add(porcupine.Operation{ClientId: id, Input: a, Call: called, Output: out, Return: back})
		}
		time.Sleep(time.Duration(random.IntN(5)) * time.Millisecond)
	}
}
