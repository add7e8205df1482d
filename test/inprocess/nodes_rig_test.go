package inprocess

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/test/harness"
)

// spread is an app of independent ranks that go to as many nodes as there are.
func spread(name string, dp int, more ...string) string {
	return simApp(name, dp, "independent", "sim_step_ms: 10", append(more,
		"placement_group_strategy: SPREAD")...)
}

// recordLog records which news of the ranks an ingress received, and when. It implements msg.Sink.
type recordLog struct {
	mu   sync.Mutex
	seen []rankRecord
}

// rankRecord is the part of a record that tests look at.
type rankRecord struct {
	at                       time.Time
	kind                     msg.RecordKind
	unit, ingress            string
	rank                     int
	epoch, incarnation       uint64
	fenced, silent, draining bool
}

// follow records what a node's ingress receives, until the test ends.
func follow(p *harness.Peer) *recordLog {
	d := &recordLog{}
	p.T.Cleanup(p.Feed().Subscribe(d))
	return d
}

func (d *recordLog) Deliver(r *msg.Record) {
	if r.Kind == msg.RecStatus || r.Kind == msg.RecProgress {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = append(d.seen, rankRecord{
		time.Now(), r.Kind, r.Unit, r.Ingress, r.Rank.Rank(), r.Epoch, r.Incarnation, r.Fenced, r.Silent,
		r.Draining,
	})
}

// all are the records that match.
func (d *recordLog) all(is func(h rankRecord) bool) []rankRecord {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []rankRecord
	for _, h := range d.seen {
		if is(h) {
			out = append(out, h)
		}
	}
	return out
}

// asked is one request of a load.
type asked struct {
	at time.Time
	*harness.Stream
}

// traffic asks at an ingress at a steady pace, until it is ended.
type traffic struct {
	stop chan struct{}
	done sync.WaitGroup

	mu  sync.Mutex
	out []asked
}

// ask begins a load of short streams.
func ask(t *testing.T, p *harness.Peer, model string, every time.Duration, tokens int,
	header ...string,
) *traffic {
	if testing.Short() {
		every *= 3
	}
	l := &traffic{stop: make(chan struct{})}
	l.done.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			l.one(t, p, model, tokens, header...)
			select {
			case <-tick.C:
			case <-l.stop:
				return
			}
		}
	})
	return l
}

// askAtOnce sends n requests at once. More than one round of round-robin reaches every rank.
func askAtOnce(t *testing.T, p *harness.Peer, model string, n, tokens int) *traffic {
	l := &traffic{stop: make(chan struct{})}
	for range n {
		l.one(t, p, model, tokens)
	}
	return l
}

func (l *traffic) one(t *testing.T, p *harness.Peer, model string, tokens int, header ...string) {
	l.done.Go(func() {
		at := time.Now()
		s := p.StreamChat(t.Context(), model, tokens, header...)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.out = append(l.out, asked{at, s})
	})
}

// end gives all requests, once the last one is over.
func (l *traffic) end() []asked {
	close(l.stop)
	l.done.Wait()
	return l.out
}

// clean asserts that no request failed before its first byte, and that no stream broke without saying why.
func clean(t *testing.T, list []asked) (broken int) {
	t.Helper()
	for _, a := range list {
		switch {
		case a.OK():
		case a.Status == 200 && a.FirstByte() && a.Error != "":
			broken++
		default:
			assert.Fail(t, "failed before the first byte, or without an error event", "asked at %s: %s",
				a.at.Format("05.000"), a.Stream)
		}
	}
	return broken
}

// ranksOn are the ranks that a node has, GROUP/RANK, in its own copy of the state.
func ranksOn(p *harness.Peer, node string) map[string]bool {
	out := map[string]bool{}
	for _, u := range p.State().Units {
		for _, k := range u.Ranks {
			if k.Node == node {
				out[fmt.Sprintf("%d/%d", u.Group, k.Rank)] = true
			}
		}
	}
	return out
}

// lost says that a node is lost.
func lost(node string) func(*state.State) bool {
	return func(s *state.State) bool { n := s.Nodes[node]; return n != nil && n.Lost }
}

// back says that a node is not lost.
func back(node string) func(*state.State) bool {
	return func(s *state.State) bool { n := s.Nodes[node]; return n != nil && !n.Lost }
}

// allReady says whether so many ranks of an app serve.
func allReady(c *harness.Cluster, app string, want int) error {
	st, _ := c.App(app)
	if st.Status != "RUNNING" || st.Ready != want {
		return fmt.Errorf("%s: %d of %d ready: %s", st.Status, st.Ready, want, st.Message)
	}
	return nil
}

// put deploys through a node; code 0: no answer.
func put(ctx context.Context, p *harness.Peer, yaml string) (code int, text string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, p.Admin()+"/api/v1/apps?file=app.yaml",
		strings.NewReader(yaml))
	if err != nil {
		return 0, err.Error()
	}
	resp, err := p.Send(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// aliveHere says whether a node renews its lease.
func aliveHere(c *harness.Cluster, node string) error {
	if s := c.List()[node].State; s != "alive" {
		return fmt.Errorf("it is %s", s)
	}
	return nil
}
