package node

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
)

// oracle derives from the whole history what a lease allows.
type oracle struct {
	fence  bool
	ttl    time.Duration
	looks  []time.Time
	grants []time.Time // start times of granted renewals
	tries  []time.Time // start times of ended renewals
}

func (o *oracle) until() (out time.Time) {
	for _, g := range o.grants {
		if u := g.Add(o.ttl); u.After(out) {
			out = u
		}
	}
	return out
}

// doubted reports whether a freeze was noticed that no later renewal has cleared.
func (o *oracle) doubted() bool {
	for i := 1; i < len(o.looks); i++ {
		if o.looks[i].Sub(o.looks[i-1]) <= o.ttl {
			continue
		}
		answered := false
		for _, t := range o.tries {
			answered = answered || !t.Before(o.looks[i])
		}
		if !answered {
			return true
		}
	}
	return false
}

func (o *oracle) covered(now time.Time) bool { return now.Before(o.until().Add(-o.ttl / 10)) }

func (o *oracle) admits(now time.Time) bool {
	return now.Sub(o.looks[len(o.looks)-1]) < o.ttl && !o.doubted() && (!o.fence || o.covered(now))
}

func TestLeaseIsWhatItsHistoryAllows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := time.Unix(1000, 0)
		fence := rapid.Bool().Draw(t, "fence")
		l := lease{fence: fence, ttl: 10 * time.Second, beat: start}
		o := oracle{fence: fence, ttl: 10 * time.Second, looks: []time.Time{start}}
		now, sent := start, []time.Time(nil)
		t.Repeat(map[string]func(*rapid.T){
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 4000).Draw(t, "ms")) * time.Millisecond)
			},
			"freeze": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(5, 30).Draw(t, "s")) * time.Second)
			},
			"look": func(*rapid.T) {
				l.look(now)
				o.looks = append(o.looks, now)
			},
			"send": func(*rapid.T) {
				l.look(now)
				o.looks, sent = append(o.looks, now), append(sent, now)
			},
			"end": func(t *rapid.T) {
				if len(sent) == 0 {
					t.Skip("nothing is under way")
				}
				at := sent[0]
				sent = sent[1:]
				ttl := o.ttl
				if !rapid.Bool().Draw(t, "granted") {
					ttl = 0
				} else {
					o.grants = append(o.grants, at)
				}
				l.ended(at, now, ttl)
				o.looks, o.tries = append(o.looks, now), append(o.tries, at)
			},
			"": func(t *rapid.T) {
				assert.Equal(t, o.admits(now), now.Before(l.admitsUntil()), "admits")
				assert.Equal(t, o.covered(now) && !o.doubted(), l.starts(now), "starts")
				assert.Equal(t, fence && !o.covered(now), l.fences(now), "fences")
				assert.Equal(t, max(0, o.until().Sub(now)), l.left(now))
			},
		})
	})
}

func TestALeaseCountsFromWhenItWasAskedFor(t *testing.T) {
	start := time.Unix(1000, 0)
	l := lease{fence: true, ttl: 10 * time.Second, beat: start}
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	assert.False(t, l.starts(start), "none was ever granted")
	l.ended(start, at(0.9), 10*time.Second)
	assert.True(t, l.starts(at(8.9)))
	assert.False(t, l.fences(at(8.9)))
	assert.False(t, l.starts(at(9)), "lease_stop is a tenth before the end")
	assert.True(t, l.fences(at(9)))
	l.ended(at(0.5), at(9), 0) // a late refusal has no effect
	assert.Equal(t, time.Second, l.left(at(9)))
	l.ended(at(-5), at(9), 10*time.Second) // nor has an answer to an older renewal
	assert.Equal(t, time.Second, l.left(at(9)))
}

// BenchmarkAdmits measures the cost for every admission.
func BenchmarkAdmits(b *testing.B) {
	cfg := CoreConfig{LeaseTTL: DefaultLeaseTTL, LeaseRenew: DefaultLeaseRenew}
	n := &Node{core: NewCore(time.Now(), cfg)}
	n.leaseKeeper = newLeaseKeeper(n)
	n.core.Renew(time.Now())
	n.leaseKeeper.ended(&msg.Lease{TTL: DefaultLeaseTTL})
	b.ReportAllocs()
	for b.Loop() {
		if !n.Admits() {
			b.Fatal("closed")
		}
	}
}

// The node's clock stood still, the leader's did not. The node asks before it continues.
func TestAMachineThatWasSuspendedHasNoLease(t *testing.T) {
	var slept atomic.Int64
	inBubble(t, func(c *Config) { c.OnLeaseLoss = Fence }, func(t *testing.T, b *bubble) {
		b.node.mu.Lock()
		b.node.leaseKeeper.suspended = func() time.Duration { return time.Duration(slept.Load()) }
		b.node.leaseKeeper.slept = 0
		b.node.mu.Unlock()
		b.serving("demo/0/0", 1)
		slept.Store(int64(100 * time.Millisecond)) // at most the time between two clock readings
		time.Sleep(time.Minute)
		assert.True(t, b.node.Admits())
		b.leader.becomes(leaderless)
		slept.Store(int64(time.Hour))
		require.Error(t, b.start("demo/0/1", 1), "a start looks at once")
		time.Sleep(DefaultLeaseTTL / guardPart)
		assert.False(t, b.node.Admits())
		assert.Zero(t, b.node.LeaseLeft())
		cause, _ := b.replica("demo/0/0", 1, 0).fenced()
		assert.Equal(t, causeLeaseLost, cause)
		b.leader.becomes(nil)
		time.Sleep(2 * DefaultLeaseRenew)
		assert.True(t, b.node.Admits())
	})
}

// The renewal counts from its start, by a clock that includes the suspension.
func TestARenewalThatASuspensionCutInTwo(t *testing.T) {
	var slept atomic.Int64
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.node.mu.Lock()
		b.node.leaseKeeper.suspended = func() time.Duration { return time.Duration(slept.Load()) }
		b.node.leaseKeeper.slept = 0
		b.node.mu.Unlock()
		var once atomic.Bool
		b.leader.becomes(func(_ context.Context, r *msg.NodeReport) (msg.Lease, error) {
			if once.Swap(true) {
				return msg.Lease{}, errNobody
			}
			slept.Add(int64(4 * time.Second))
			return b.leader.grant(r), nil
		})
		time.Sleep(DefaultLeaseRenew + DefaultLeaseRenew/4)
		assert.True(t, once.Load())
		assert.Less(t, b.node.LeaseLeft(), 7*time.Second)
		b.leader.becomes(nil)
		time.Sleep(DefaultLeaseRenew)
	})
}
