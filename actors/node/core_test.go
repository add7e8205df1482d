package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

var coreStart = time.Unix(1000, 0)

func newTestCore() *Core {
	return NewCore(coreStart, CoreConfig{Node: "n", LeaseTTL: DefaultLeaseTTL, LeaseRenew: DefaultLeaseRenew})
}

// TestRenewalsAreDueOnTime: each 2 s, at once with news or on demand, and after a failure not before 100 ms.
func TestRenewalsAreDueOnTime(t *testing.T) {
	c, now := newTestCore(), coreStart
	due := func() time.Duration { return c.RenewAt().Sub(now) }
	assert.LessOrEqual(t, due(), time.Duration(0), "the first at once")
	for _, pause := range []int{100, 200, 400, 800, 1000, 1000} {
		c.Renew(now)
		c.Renewed(now, nil)
		assert.Equal(t, time.Duration(pause)*time.Millisecond, due())
		c.tell(now, msg.UnitEvent{Unit: "u"})
		assert.Equal(t, 100*time.Millisecond, due(), "news waits a little")
	}
	first := c.Demand()
	assert.LessOrEqual(t, due(), time.Duration(0))
	c.Renew(now)
	second := c.Demand()
	now = now.Add(time.Second)
	c.Renewed(now, &msg.Lease{TTL: DefaultLeaseTTL, Acked: 6})
	assert.Equal(t, first, c.Ended())
	assert.Equal(t, first+1, second, "one that begins after the demand")
	assert.LessOrEqual(t, due(), time.Duration(0))
	c.Renew(now)
	c.Renewed(now, &msg.Lease{TTL: DefaultLeaseTTL, Acked: 6})
	assert.Equal(t, DefaultLeaseRenew, due())
	assert.False(t, c.Waiting())
	c.tell(now, msg.UnitEvent{Unit: "u"})
	assert.Equal(t, time.Duration(0), due())
}

// TestOrdersAreTakenInTwoSteps: nothing changes before the epochs are on disk.
func TestOrdersAreTakenInTwoSteps(t *testing.T) {
	c, now, s := newTestCore(), coreStart, state.New()
	o := &msg.StartRank{App: testApp(app.KindSim, app.Independent, 1), Unit: "a/0/0", Epoch: 3}
	_, err := c.MayStart(now, s, o)
	require.ErrorIs(t, err, errNoLease)
	c.Renew(now)
	c.Renewed(now, &msg.Lease{TTL: DefaultLeaseTTL})
	for range 2 {
		epochs, err := c.MayStart(now, s, o)
		require.NoError(t, err)
		assert.Equal(t, map[string]uint64{"a/0/0": 3}, epochs)
		assert.False(t, c.Has("a/0/0"))
	}
	l := c.Start(now, o, map[string]uint64{"a/0/0": 3})
	epochs, err := c.MayStart(now, s, o)
	require.NoError(t, err)
	assert.Nil(t, epochs, "it is here")
	require.Len(t, c.Renew(now).Events, 2, "its last event again")
	_, err = c.MayStop(&msg.StopRank{Unit: "a/0/0", Epoch: 2})
	require.ErrorIs(t, err, ErrStaleEpoch)

	s.Epochs["a/0/0"] = 3 // released
	cut, _ := c.Check(now, s)
	assert.Equal(t, []string{"a/0/0"}, cut)
	cut, _ = c.Check(now, s)
	assert.Empty(t, cut, "once")
	assert.Equal(t, Failure{Rank: -1, Cause: causeSuperseded}, l.Why())
	assert.False(t, c.Enter(now, l, msg.UnitReady, Failure{Rank: -1}, nil))
	c.Enter(now, l, msg.UnitGone, l.Why(), nil)
	c.Check(now, s)
	assert.False(t, c.Has("a/0/0"), "gone and forgotten")
	_, err = c.MayStart(now, s, o)
	require.ErrorIs(t, err, ErrStaleEpoch)
	c.Leave()
	o.Epoch++
	_, err = c.MayStart(now, s, o)
	require.ErrorIs(t, err, msg.ErrNodeStopping)
}

// TestCutAll: a node that is no member any more ends every unit, each once.
func TestCutAll(t *testing.T) {
	c, now := newTestCore(), coreStart
	for _, unit := range []string{"a/0/0", "a/0/1"} {
		c.Start(now, &msg.StartRank{App: testApp(app.KindSim, app.Independent, 1), Unit: unit, Epoch: 1}, nil)
	}
	assert.Equal(t, []string{"a/0/0", "a/0/1"}, c.CutAll(now))
	assert.Empty(t, c.CutAll(now))
	assert.Equal(t, Failure{Rank: -1, Cause: causeRemoved}, c.Life("a/0/0").Why())
	assert.Equal(t, StepEnd, c.Life("a/0/0").Next(now))
}

// TestTheNextStepOfAUnit has every phase, with what may be asked of a unit.
func TestTheNextStepOfAUnit(t *testing.T) {
	for _, c := range []struct {
		phase                  state.Phase
		quiet, failed          Step
		asked, late, askedFail Step // with time left, without, and after a failure
	}{
		{state.Starting, StepStay, StepEnd, StepEnd, StepEnd, StepEnd},
		{state.Ready, StepStay, StepFence, StepDrain, StepEnd, StepEnd},
		{state.Fenced, StepEnd, StepEnd, StepEnd, StepEnd, StepEnd},
		{state.Draining, StepStay, StepEnd, StepStay, StepEnd, StepEnd},
		{state.Killing, StepStay, StepStay, StepStay, StepStay, StepStay},
		{state.Gone, StepStay, StepStay, StepStay, StepStay, StepStay},
	} {
		next := func(grace time.Duration, asked, failed bool) Step {
			l := Life{Order: &msg.StartRank{App: testApp(app.KindSim, app.Independent, 1)}, Phase: c.phase}
			if asked {
				l.stop = &stopRequest{deadline: coreStart.Add(grace)}
			}
			if failed {
				l.Failure = &Failure{}
			}
			return l.Next(coreStart)
		}
		assert.Equal(t, c.quiet, next(0, false, false), "%s", c.phase)
		assert.Equal(t, c.failed, next(0, false, true), "%s, failed", c.phase)
		assert.Equal(t, c.asked, next(time.Second, true, false), "%s, asked", c.phase)
		assert.Equal(t, c.late, next(0, true, false), "%s, asked and late", c.phase)
		assert.Equal(t, c.askedFail, next(time.Second, true, true), "%s, asked and failed", c.phase)
	}
	order := &msg.StartRank{App: testApp(app.KindAttach, app.Independent, 1)}
	attached := Life{Order: order, Phase: state.Fenced}
	assert.Equal(t, StepStay, attached.Next(coreStart), "an attached unit may come back")
}
