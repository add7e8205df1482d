package system

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// hangs is the longest that any request went on after the moment from which it could not succeed where it
// was: no answer of these tests takes as long by itself.
const hangs = 10 * time.Second

// FS7: nodes with ranks leave by SIGTERM, SIGKILL and SIGSTOP and come back, under load through nodes that
// stay. One removal of each kind here; 50 of each, and as many returns, in an acceptance run. Each removal
// starts about two ranks anew, so that ranks come and go about twice as often as nodes.
func TestFS7NodesComeAndGo(t *testing.T) {
	t.Parallel()
	rounds := 1
	if accepting() {
		rounds = 50
	}
	c := harness.StartMembers(t, [][]string{
		{"--roles", "control,ingress"},
		{"--roles", "ingress"},
		{"--roles", "worker"},
		{"--roles", "worker"},
		{"--roles", "worker"},
	},
		harness.MemberSlots(4))
	c.Expect(harness.NodeFails, harness.RanksMove, harness.StreamBreaks)
	workers := c.All[2:]
	c.All[0].Want(spread("wide", 6))
	c.Running("wide")
	load := harness.StartLoad(t, "wide", 8, 40, c.All[0].HTTP, c.All[1].HTTP)
	load.Reaches(30)
	for i := range 3 * rounds {
		m := workers[i%len(workers)]
		began := time.Now()
		switch i % 3 {
		case 0:
			m.Kill()
		case 1:
			m.Freeze()
		case 2:
			m.Term()
		}
		movedFrom(c, "wide", m.Name)
		moved := time.Since(began)
		load.Reaches(20)
		if m.Runs() {
			m.Thaw()
		} else {
			m.Start()
		}
		c.Settled()
		t.Logf("%s of %s: whole again after %s, back after %s", []string{
			"SIGKILL", "SIGSTOP",
			"SIGTERM",
		}[i%3], m.Name, moved.Round(time.Millisecond),
			time.Since(began).Round(time.Millisecond))
	}
	load.Reaches(30)
	y := load.End()
	longest := time.Duration(0)
	for _, a := range load.Answers(time.Time{}) {
		if longest = max(longest, a.Total); a.Total > hangs {
			t.Errorf("a request hung: %s", a.String())
		}
	}
	assert.Zero(t, y.Refused+y.Cut+y.Hung, "what clients saw: %v", y)
	t.Logf("%d answers, %d streams cut with an error event, the longest request took %s", y.OK, y.Broken,
		longest.Round(time.Millisecond))
	c.AllQuiet()
}

// roll is an application of 3 groups of 2 whose grace is longer than any stream of its test.
func roll(step int) string {
	return strings.Replace(simApp("roll", 2, "lockstep", fmt.Sprintf("sim_step_ms: %d", step)),
		"timeout_s: 2", "timeout_s: 300", 1) + "    num_groups: 3\n"
}

// patiently polls until f returns nil, for as long as streams may take.
func patiently(c *harness.Members, limit time.Duration, what string, f func() error) {
	c.T.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.T.Fatalf("waiting for %s: %v", what, err)
		}
	}
}

// FS10: a new revision, then a node's drain, then a node's restart by SIGTERM, under long streams and short
// requests. A few streams of about 1 s here, 500 of 12 s and more than 100 short requests a second in an
// acceptance run: 20 minutes of each would be hours.
func TestFS10RollAndDrain(t *testing.T) {
	t.Parallel()
	streams, tokens, short, step := 12, 120, 2, 10
	if accepting() {
		streams, tokens, short, step = 250, 600, 8, 20
	}
	limit := harness.Patience + time.Duration(tokens)*50*time.Millisecond
	c := harness.StartMembers(t, harness.Each(3), harness.MemberSlots(4), harness.LongLeases)
	c.Expect(harness.NodeFails)
	a := c.All[0]
	a.Want(roll(step))
	c.Running("roll")
	long := []*harness.Load{streamsOf(t, streams, tokens, a), streamsOf(t, streams, tokens, c.All[1])}
	load := harness.StartLoad(t, "roll", short, 1, a.HTTP, c.All[1].HTTP)
	load.Reaches(10)
	watch := watchDrains(c, a, "roll")

	const ranks, group = 6, 2
	phase := func(what string, missing int, f func()) {
		watch.least()
		began := time.Now()
		f()
		load.Reaches(10)
		least := watch.least()
		t.Logf("%s took %s, at least %d of %d ranks were ready", what,
			time.Since(began).Round(time.Millisecond), least, ranks)
		assert.GreaterOrEqual(t, least, ranks-missing, "ready ranks during %s", what)
	}
	busy := func() { // the streams are spread over all groups
		st := c.Running("roll")
		for _, u := range st.Units {
			patiently(c, limit, "streams on "+u.Unit, func() error {
				if n := inFlight(a, "roll", u.Ranks[0].Node); n < streams/2 {
					return fmt.Errorf("%d", n)
				}
				return nil
			})
		}
	}
	busy()
	phase("a new revision", group, func() { // one group after the other
		a.Want(roll(step + 1))
		patiently(c, limit, "the new revision", func() error {
			st, err := a.AppOf("roll")
			if err != nil {
				return err
			}
			for _, u := range st.Units {
				if u.Phase != "ready" || u.Epoch < 2 {
					return errStatus(&st)
				}
			}
			return runs(&st)
		})
	})
	st := c.Running("roll")
	m := c.All[2]
	if len(on(seats(&st), m.Name)) == 0 {
		m = c.All[1]
	}
	require.NotEmpty(t, on(seats(&st), m.Name))
	busy()
	phase("the drain of "+m.Name, len(on(seats(&st), m.Name)), func() { // all but those of the node
		t.Logf("%s has %d streams", m.Name, inFlight(a, "roll", m.Name))
		code, text := command(a, "drain", m.Name, "--detach")
		require.Zero(t, code, text)
		patiently(c, limit, "the drain", func() error {
			list, err := c.Nodes()
			for i := range list {
				if list[i].Node == m.Name && list[i].State != "drained" {
					err = fmt.Errorf("%s is %s: %s", m.Name, list[i].State, list[i].Reason)
				}
			}
			return err
		})
		st := c.Running("roll")
		assert.Empty(t, on(seats(&st), m.Name))
		code, text = command(a, "undrain", m.Name)
		require.Zero(t, code, text)
	})
	st = c.Running("roll")
	m = c.All[2]
	busy()
	phase("the restart of "+m.Name, len(on(seats(&st), m.Name)), func() {
		had, streams := len(on(seats(&st), m.Name)), inFlight(a, "roll", m.Name)
		began := time.Now()
		m.Signal(syscall.SIGTERM)
		patiently(c, limit, "the end of "+m.Name, func() error {
			if m.Runs() {
				return errNotYet
			}
			return nil
		})
		t.Logf("%s with %d ranks and %d streams has ended after %s", m.Name, had, streams,
			time.Since(began).Round(time.Millisecond))
		m.Start()
		c.Settled()
		c.Running("roll")
	})
	watch.end(t)
	for what, y := range map[string]harness.Tally{
		"short requests":       load.End(),
		"streams at " + a.Name: long[0].End(), "streams at " + c.All[1].Name: long[1].End(),
	} {
		assert.Zero(t, y.Refused+y.Broken+y.Cut+y.Hung, "%s: %v", what, y)
		assert.NotZero(t, y.OK, what)
		t.Logf("%s: %d", what, y.OK)
	}
	c.AllQuiet()
}

// inFlight is how many requests the ranks of a node have.
func inFlight(at *harness.Member, app, node string) (n int) {
	st, err := at.AppOf(app)
	require.NoError(at.T, err)
	for _, u := range st.Units {
		for i := range u.Ranks {
			if u.Ranks[i].Node == node {
				n += u.Ranks[i].InFlight
			}
		}
	}
	return n
}

// streamsOf keeps long streams running through a node.
func streamsOf(t *testing.T, n, tokens int, m *harness.Member) *harness.Load {
	t.Helper()
	return harness.StartStreams(t, "roll", n, tokens, time.Duration(tokens)*50*time.Millisecond, m.HTTP)
}

// drains watches the ranks of an application that drain, and how many are ready.
type drains struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	low  int
	seen map[string]*drained // by URL and incarnation
	// phases of ranks when their nodes were last heard of
	phases map[string]string
}

// drained is what an engine had been given since it drained: all of it, and not more some time later.
type drained struct {
	since       time.Time
	first, last uint64
	settled     bool // first holds
}

// drainNoticed bounds how long the news of a drain may take from the leader, which reports it at once, to the
// rank's node.
const drainNoticed = 500 * time.Millisecond

func watchDrains(c *harness.Members, at *harness.Member, app string) *drains {
	d := &drains{
		stop: make(chan struct{}), low: 1 << 10, seen: map[string]*drained{},
		phases: map[string]string{},
	}
	d.wg.Go(func() {
		for {
			select {
			case <-d.stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
			if st, err := at.AppOf(app); err == nil {
				d.look(&st)
			}
		}
	})
	c.T.Cleanup(d.halt)
	return d
}

func (d *drains) look(st *client.AppStatus) {
	ready := 0
	for seat, k := range seats(st) {
		// A node that got no processor for a second is called unreachable: that is not the rollout's doing.
		if k.Phase != client.Unreachable {
			d.phases[seat] = k.Phase
		}
		if d.phases[seat] == "ready" {
			ready++
		}
		if k.Phase != "draining" || k.URL == "" {
			continue
		}
		n, err := given(k.URL)
		if err != nil {
			continue // it has ended
		}
		key := seat + " at " + k.URL + " " + k.Incarnation
		e := d.seen[key]
		if e == nil {
			e = &drained{since: time.Now()}
			d.seen[key] = e
		}
		if !e.settled {
			e.first, e.settled = n, time.Since(e.since) > drainNoticed
		}
		e.last = n
	}
	d.mu.Lock()
	d.low = min(d.low, ready)
	d.mu.Unlock()
}

// given is how many sequences an engine was ever given.
func given(url string) (n uint64, err error) {
	st, err := engineStats(url)
	for _, f := range st.Finished {
		n += f
	}
	return n + uint64(st.Running+st.Waiting) + st.Aborted, err
}

// least is the lowest number of ready ranks since it was last asked.
func (d *drains) least() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	low := d.low
	d.low = 1 << 10
	return low
}

func (d *drains) halt() {
	select {
	case <-d.stop:
	default:
		close(d.stop)
	}
	d.wg.Wait()
}

// end checks that no draining rank was given anything.
func (d *drains) end(t *testing.T) {
	t.Helper()
	d.halt()
	settled := 0
	for key, e := range d.seen {
		if e.settled {
			settled++
			assert.Equal(t, e.first, e.last, "a draining rank was given a request: %s", key)
		}
	}
	assert.NotZero(t, settled, "some drain was long enough to be watched")
	t.Logf("%d drains were watched", settled)
}

// engineStats are a simulated engine's own counters.
func engineStats(url string) (st sim.Stats, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/_sim/stats", nil)
	if err != nil {
		return st, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return st, err
	}
	defer resp.Body.Close()
	return st, json.NewDecoder(resp.Body).Decode(&st)
}
