package inprocess

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// Times of a cut. test/acceptance.md, rows MB2 and MB3.
const (
	cutFor    = 30 * time.Second
	stopsIn   = time.Second
	oneViewIn = 10 * time.Second
	fencedAt  = 9 * time.Second // after the last renewal: ttl - 1 s
)

// MB2, MB3, RG3: The leader and one of three nodes is cut off for 30 s, and keeps serving.
func TestCutOffLeaderServesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { cutOff(t, "serve") })
}

// MB2, MB3: The same with fencing: its ranks are fenced before anybody else gets them.
func TestCutOffLeaderFences(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { cutOff(t, "fence") })
}

func cutOff(t *testing.T, rule string) {
	c := harness.New(t, harness.Nodes(3), harness.Slots(4), harness.OnLeaseLoss(rule))
	// of the ranks that the cut-off node must end
	c.Expect(harness.NodeFails, harness.RanksMove, harness.StreamBreaks)
	c.WaitVoters(3)
	c.Deploy(spread("a", 6))
	c.WaitStatus("a", "RUNNING")
	minority := c.Leader()
	var others []*harness.Peer
	for _, p := range c.Peers() {
		if p != minority {
			others = append(others, p)
		}
	}
	held := ranksOn(others[0], minority.ID)
	require.Len(t, held, 2)
	time.Sleep(5 * time.Second)
	majority := make([]*traffic, len(others))
	notes := []*recordLog{follow(others[0]), follow(others[1])}
	for i, p := range others {
		majority[i] = ask(t, p, "a", 100*time.Millisecond, 10)
	}
	own := ask(t, minority, "a", 100*time.Millisecond, 5)

	cut := time.Now()
	regrants := regranted(others[0], "a", held)
	wasLost := others[0].When(lost(minority.ID))
	minority.Silence()
	taken := writes(t, minority, cut)
	lostAfter := (<-wasLost).Sub(cut)
	t.Logf("lost %s after the cut", lostAfter)
	time.Sleep(time.Until(cut.Add(cutFor)))
	again := <-regrants
	assert.Empty(t, <-taken, "writes that the cut-off leader took")
	if rule == "serve" {
		assert.Len(t, c.Engines.On(minority.Host), 2, "it serves on")
	} else {
		assert.Empty(t, c.Engines.On(minority.Host), "all fenced")
		assert.Empty(t, c.Engines.Overlaps())
		ends := c.Journal.Times(`"node":"`+minority.ID+`"`, `"msg":"unit is gone"`, `"cause":"lease_lost"`)
		assert.Len(t, ends, 2)
		for _, at := range ends {
			assert.LessOrEqual(t, at.Sub(cut), fencedAt+beat)
			assert.True(t, at.Before(again), "ended at %s, granted again at %s", at, again)
		}
	}

	seen := regranted(minority, "a", held)
	healed := time.Now()
	c.Reconnect()
	c.Until("old engines end", func() error {
		if left := c.Engines.On(minority.Host); len(left) > 0 {
			return fmt.Errorf("%v", left)
		}
		return nil
	})
	if rule == "serve" {
		sees := <-seen
		gone := c.Journal.Times(`"node":"`+minority.ID+`"`, `"msg":"unit is gone"`, `"cause":"superseded"`)
		assert.Len(t, gone, 2)
		for _, at := range gone {
			assert.LessOrEqual(t, at.Sub(sees), stopsIn)
		}
		assert.LessOrEqual(t, sees.Sub(healed), oneViewIn)
	}
	c.Until("one view", func() error { return oneView(c) })
	t.Logf("one view %s after the heal", time.Since(healed))
	assert.LessOrEqual(t, time.Since(healed), oneViewIn)
	time.Sleep(2 * time.Second)

	for i, l := range majority {
		list := l.end()
		t.Logf("%s: %d requests, %d broken", others[i].ID, len(list), clean(t, list))
	}
	list := own.end()
	served := 0
	for _, a := range list {
		if a.OK() {
			served++
		}
	}
	t.Logf("%s: %d of %d served", minority.ID, served, len(list))
	if rule == "serve" {
		clean(t, list)
	}
	for i, d := range notes {
		stale := d.all(func(h rankRecord) bool {
			return h.kind == msg.RecAdmitted && h.ingress == others[i].ID && h.epoch == 1 &&
				h.at.After(again) && held[strings.TrimPrefix(h.unit, "a/")]
		})
		assert.Empty(t, stale, "admitted under an old epoch")
	}
	for id, u := range c.Peer(0).State().Units {
		want := uint64(1)
		if held[strings.TrimPrefix(id, "a/")] {
			want = 2
		}
		assert.Equal(t, want, u.Epoch, "unit %s", id)
	}
	_, ok := c.App("late")
	assert.False(t, ok)
}

// regranted gives the moment of the first new grant of one of the ranks.
func regranted(p *harness.Peer, app string, ranks map[string]bool) <-chan time.Time {
	return p.When(func(s *state.State) bool {
		for k := range ranks {
			if s.Epochs[app+"/"+k] > 1 {
				return true
			}
		}
		return false
	})
}

// writes deploys through a node again and again and returns what was accepted.
func writes(t *testing.T, p *harness.Peer, from time.Time) <-chan []string {
	out := make(chan []string, 1)
	go func() {
		var taken []string
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, after := range []time.Duration{
			0, 50 * time.Millisecond, 500 * time.Millisecond,
			2 * time.Second, 5 * time.Second, 15 * time.Second,
		} {
			time.Sleep(time.Until(from.Add(after)))
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				code, text := put(ctx, p, spread("late", 1))
				if code == http.StatusAccepted {
					mu.Lock()
					defer mu.Unlock()
					taken = append(taken, fmt.Sprintf("after %s: %s", after, text))
				}
			})
		}
		all.Wait()
		out <- taken
	}()
	return out
}

// oneView says whether all nodes that run have the same state, and find each other alive.
func oneView(c *harness.Cluster) error {
	running := c.Running()
	index := running[0].State().Index
	for _, p := range running {
		if now := p.State().Index; now != index {
			return fmt.Errorf("%s is at %d, not %d", p.ID, now, index)
		}
		list := p.List()
		for _, o := range running {
			if n := list[o.ID]; n.State != "alive" {
				return fmt.Errorf("%s is %q for %s: %s", o.ID, n.State, p.ID, n.Reason)
			}
		}
	}
	return nil
}
