package state

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestLostNodeOfAUnitOverTwo(t *testing.T) {
	m, effects := Next(in(Ready), Event{Kind: EvNodeLost, Others: true, Reason: "node b is lost"}, noon,
		Timers{})
	assert.Equal(t, "killing: UnitFenced, stop others", describe(m, effects))
	again, effects := Next(m, Event{Kind: EvNodeLost, Others: true}, noon, Timers{})
	assert.Equal(t, m, again, "once is enough")
	assert.Empty(t, effects)
	m, effects = Next(m, Event{Kind: EvTick}, noon.Add(DefaultResend), Timers{})
	assert.Equal(t, "killing: stop others", describe(m, effects), "silence: told again")
	m, effects = Next(m, Event{Kind: EvKilling, Epoch: 3, Reason: "stopped"}, noon, Timers{})
	assert.Equal(t, "killing:", describe(m, effects))
	assert.True(t, m.Due.IsZero())
	m, effects = Next(m, Event{Kind: EvGone, Epoch: 3, WasReady: true}, noon, Timers{})
	assert.Equal(t, "pending: Release, grant", describe(m, effects),
		"no wait: nothing is wrong with what is started")
	assert.Equal(t, "node b is lost", m.Reason)
	assert.False(t, m.NodeLost)
}

func TestLostNodeOfAUnitThatDrains(t *testing.T) {
	m, effects := Next(in(Draining), Event{Kind: EvNodeLost, Others: true}, noon, Timers{})
	assert.Equal(t, "killing: stop others", describe(m, effects), "its streams are broken: no grace any more")
	m, effects = Next(m, Event{Kind: EvTick}, noon.Add(DefaultResend), Timers{})
	assert.Equal(t, []Effect{{Kind: DoStop}}, effects)
	m, effects = Next(m, Event{Kind: EvGone, Epoch: 3}, noon, Timers{})
	assert.Equal(t, "gone: Release", describe(m, effects))
}

func TestFencedUnitTellsTheOthersUntilTheyAnswer(t *testing.T) {
	m, _ := Next(in(Ready), Event{Kind: EvFenced, Epoch: 3, Others: true}, noon, Timers{})
	for range 3 {
		var effects []Effect
		m, effects = Next(m, Event{Kind: EvTick}, m.Due, Timers{})
		assert.Equal(t, "fenced: stop others", describe(m, effects))
	}
	m, _ = Next(m, Event{Kind: EvKilling, Epoch: 3}, noon, Timers{})
	assert.True(t, m.Due.IsZero())
}

// crowd plays a unit over several nodes against a simple model: which nodes live, and where its processes
// run.
type crowd struct {
	t       *rapid.T
	m       Machine
	now     time.Time
	nodes   []string
	alive   map[string]bool
	running map[string]bool // processes of the grant in hand
	told    map[string]bool // said killing or gone
	raft    uint64
	sure    bool // orders arrive
}

// others says whether a living node has not said what those in the set did.
func (c *crowd) others(set map[string]bool) bool {
	return slices.ContainsFunc(c.nodes, func(n string) bool { return c.alive[n] && !set[n] })
}

func (c *crowd) goneNodes() map[string]bool {
	out := map[string]bool{}
	for _, n := range c.nodes {
		out[n] = !c.running[n]
	}
	return out
}

func (c *crowd) feed(e Event) {
	e.Epoch = max(e.Epoch, c.m.Epoch)
	m, effects := Next(c.m, e, c.now, Timers{})
	c.m = m
	for _, f := range effects {
		c.obey(f)
	}
}

func (c *crowd) obey(f Effect) {
	switch f.Kind {
	case DoGrant, ProposeRelease:
		for n, r := range c.running {
			require.False(c.t, r && c.alive[n], "node %s still runs its part of epoch %d in %s", n, c.m.Epoch,
				c.m.Phase)
		}
	case DoStart:
		for _, n := range c.nodes {
			c.running[n], c.told[n] = c.alive[n], false
		}
	case DoStopOthers, DoStop:
		for _, n := range c.nodes {
			if c.alive[n] && c.running[n] && (c.sure || rapid.Bool().Draw(c.t, "order arrives")) {
				c.endPart(n)
			}
		}
	default:
	}
}

// endPart ends the part of one node. The node reports it through a mailbox, so the report comes after this
// step.
func (c *crowd) endPart(n string) { c.running[n], c.told[n] = false, true }

func (c *crowd) step() {
	c.now = c.now.Add(time.Duration(rapid.IntRange(0, 3).Draw(c.t, "s")) * time.Second)
	n := rapid.SampledFrom(c.nodes).Draw(c.t, "node")
	switch rapid.IntRange(0, 7).Draw(c.t, "what") {
	case 0:
		c.feed(Event{Kind: EvWant})
	case 1:
		if c.m.Phase == Pending || c.m.Phase == Backoff {
			c.raft++
			maps.DeleteFunc(c.running, func(string, bool) bool { return true })
			for _, n := range c.nodes {
				c.alive[n] = true // the new grant is on nodes that live
			}
			c.feed(Event{Kind: EvGranted, Epoch: c.raft, Attempt: 1})
		}
	case 2:
		c.feed(Event{Kind: EvReady})
	case 3:
		if c.alive[n] && c.running[n] {
			c.endPart(n)
			c.feed(Event{Kind: EvKilling, Others: c.others(c.told)})
		}
	case 4:
		if c.m.mayRun() {
			c.alive[n] = false
			c.feed(Event{Kind: EvNodeLost, Others: c.others(c.goneNodes())})
		}
	case 5:
		c.feed(Event{Kind: EvUnwant, Grace: time.Second})
	case 6:
		c.feed(Event{Kind: EvTick})
	default:
		if c.m.mayRun() && !c.running[n] {
			c.feed(Event{Kind: EvGone, Others: c.others(c.goneNodes())})
		}
	}
}

// settle lets only time and reports pass. A grant that began to end has to come to its end.
func (c *crowd) settle() {
	c.sure = true
	for range 3 {
		c.now = c.now.Add(DefaultResend)
		c.feed(Event{Kind: EvTick})
		if c.m.mayRun() && !c.others(c.goneNodes()) && c.m.Phase != Starting && c.m.Phase != Ready {
			c.feed(Event{Kind: EvGone})
		}
	}
}

// TestAnyLossOfNodesNeverDoublesAUnit: a unit over three nodes is released and granted again only when no
// living node runs a part of it, and one that is being ended does end, whichever orders are lost.
func TestAnyLossOfNodesNeverDoublesAUnit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &crowd{
			t: t, now: noon, nodes: []string{"a", "b", "c"}, alive: map[string]bool{},
			running: map[string]bool{}, told: map[string]bool{},
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			c.step()
		}
		ending := c.m.NodeLost || c.m.Stopping
		c.settle()
		if ending {
			require.False(t, c.m.mayRun(), "%s does not end", c.m.Phase)
		}
	})
}

// TestReturnedNodesHearOfStopsAgain: the next process of a node has the engines of the former one, which
// alone had confirmed an order to stop.
func TestReturnedNodesHearOfStopsAgain(t *testing.T) {
	back := Event{Kind: EvReturned, Epoch: 3}
	for name, c := range map[string]struct {
		m    Machine
		want []Effect
		then Phase
	}{
		"starting": {Machine{Phase: Starting}, nil, Starting},
		"ready":    {Machine{Phase: Ready}, nil, Ready},
		"drains for the leader": {
			Machine{Phase: Draining, Stopping: true, Confirmed: true, StopBy: noon.Add(time.Minute)},
			[]Effect{{Kind: DoStop, Grace: time.Minute}},
			Draining,
		},
		"drains by itself": {Machine{Phase: Draining, Confirmed: true}, nil, Ready},
		"fenced":           {Machine{Phase: Fenced, Confirmed: true}, []Effect{{Kind: DoStopOthers}}, Fenced},
		"killed": {
			Machine{Phase: Killing, Confirmed: true}, []Effect{{Kind: DoStopOthers}}, Killing,
		},
		"backoff": {Machine{Phase: Backoff}, nil, Backoff},
	} {
		c.m.Epoch = 3
		m, effects := Next(c.m, back, noon, Timers{})
		assert.Equal(t, c.want, effects, name)
		assert.Equal(t, c.then, m.Phase, name)
		if c.want != nil {
			assert.False(t, m.Confirmed, name)
			assert.Equal(t, noon.Add(DefaultResend), m.Due, name)
		}
	}
}

// TestPartsOfAUnitEndTogether: what a part's draining or killing leads to when no part has a request left.
func TestPartsOfAUnitEndTogether(t *testing.T) {
	drains := Machine{Phase: Draining, Stopping: true, StopBy: noon.Add(time.Minute)}
	ends, told := drains, drains
	ends.Phase, told.StopBy = Killing, noon
	idle, killing := Event{Kind: EvDraining, Idle: true}, Event{Kind: EvKilling, Others: true, Idle: true}
	for name, c := range map[string]struct {
		m    Machine
		e    Event
		want string
	}{
		"another one has requests":        {drains, Event{Kind: EvDraining}, "draining:"},
		"all are idle":                    {drains, idle, "draining: stop"},
		"all are idle, a new leader":      {Machine{Phase: Ready}, idle, "draining: stop others"},
		"idle after the other one ended":  {ends, idle, "killing: stop"},
		"granted anew":                    {Machine{Phase: Starting}, idle, "starting:"},
		"the last one with requests ends": {drains, killing, "killing: stop others"},
		"one of two with requests ends":   {drains, Event{Kind: EvKilling, Others: true}, "killing:"},
		"the first one ends as told":      {told, killing, "killing:"},
	} {
		c.m.Epoch, c.e.Epoch, c.m.Confirmed = 3, 3, true
		m, effects := Next(c.m, c.e, noon, Timers{})
		assert.Equal(t, c.want, describe(m, effects), name)
		if len(effects) > 0 {
			assert.Zero(t, effects[0].Grace, name)
			assert.False(t, m.Confirmed, name)
			assert.Equal(t, noon.Add(DefaultResend), m.Due, name)
		}
	}
}
