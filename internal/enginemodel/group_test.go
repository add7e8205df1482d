package enginemodel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// lab is a lockstep group on virtual time: messages take no time, in the order of ranks.
type lab struct {
	t      require.TestingT
	now    time.Duration
	cores  []*em.Core
	lost   []bool
	group  *em.Group
	wakes  []time.Duration
	gwake  time.Duration
	died   map[int]time.Duration
	finish map[*em.Request]time.Duration

	begun, ended uint64 // waves and steps of the group
}

func newLab(t require.TestingT, ranks int, mutate func(rank int, c *em.Config)) *lab {
	g, err := em.NewGroup(em.GroupConfig{Ranks: ranks, SyncInterval: 16, MinStep: time.Millisecond})
	require.NoError(t, err)
	l := &lab{
		t: t, group: g, gwake: em.Never, lost: make([]bool, ranks), died: map[int]time.Duration{},
		finish: map[*em.Request]time.Duration{},
	}
	for r := range ranks {
		cfg := small()
		cfg.Lockstep = true
		if mutate != nil {
			mutate(r, &cfg)
		}
		l.cores = append(l.cores, newCore(t, cfg))
		l.wakes = append(l.wakes, em.Never)
	}
	return l
}

func (l *lab) send(rank int, in ...em.Input) {
	if l.lost[rank] {
		return
	}
	effects, wake := l.cores[rank].Step(l.now, in)
	l.wakes[rank] = wake
	var words []em.GroupInput
	for _, e := range effects {
		switch e.Kind {
		case em.EffectWave:
			words = append(words, em.GroupInput{Kind: em.GroupWave, Rank: rank})
		case em.EffectReport:
			words = append(words, em.GroupInput{
				Kind: em.GroupReport, Rank: rank, Took: e.Took,
				Unfinished: e.Unfinished,
			})
		case em.EffectDied:
			l.died[rank] = l.now
		case em.EffectFinished:
			l.finish[e.Req] = l.now
		case em.EffectToken, em.EffectRejected, em.EffectBlocks, em.EffectLoad, em.EffectLeaseOver:
		}
	}
	if len(words) > 0 {
		l.tell(words...)
	}
}

func (l *lab) tell(words ...em.GroupInput) {
	effects, wake := l.group.Step(l.now, words)
	l.gwake = wake
	for _, e := range append([]em.GroupEffect{}, effects...) {
		in := em.Input{Kind: em.InputGroupBegin}
		switch e.Kind {
		case em.GroupBegin:
			l.begun++
		case em.GroupEnd:
			l.ended++
			in = em.Input{Kind: em.InputGroupEnd, Continue: e.Continue}
		case em.GroupBroken:
			in = em.Input{Kind: em.InputPeerLost}
		}
		for r := range l.cores {
			l.send(r, in)
		}
	}
}

// runUntil advances to the next wake-ups until none is left or the instant has come.
func (l *lab) runUntil(limit time.Duration) {
	for {
		next := l.gwake
		for _, w := range l.wakes {
			next = min(next, w)
		}
		if next > limit || next == em.Never {
			return
		}
		l.now = max(l.now, next)
		if l.gwake <= l.now {
			l.tell()
		}
		for r, w := range l.wakes {
			if w <= l.now {
				l.send(r)
			}
		}
	}
}

func (l *lab) lose(rank int) {
	l.lost[rank], l.wakes[rank] = true, em.Never
	l.tell(em.GroupInput{Kind: em.GroupLost, Rank: rank})
}

func TestOneRequestCostsTheGroupAWave(t *testing.T) {
	for _, c := range []struct{ output, steps int }{{1, 16}, {16, 16}, {17, 32}, {40, 48}} {
		l := newLab(t, 4, nil)
		r := &em.Request{Prompt: 4, Output: c.output, Ending: em.FinishLength}
		l.send(2, add(r)...)
		l.runUntil(time.Hour)
		assert.Equal(t, em.FinishLength, r.Finish())
		assert.Equal(t, uint64(c.steps), l.ended, "output %d", c.output)
		for _, core := range l.cores {
			assert.Equal(t, uint64(c.steps), core.Stats().Steps, "idle ranks step too")
		}
		assert.Equal(t, uint64(1), l.begun)
	}
}

func TestGroupStepsAsItsSlowestRank(t *testing.T) {
	l := newLab(t, 3, func(rank int, c *em.Config) {
		c.FixedStep = time.Duration(rank+1) * 10 * time.Millisecond
	})
	r := &em.Request{Prompt: 4, Output: 5, Ending: em.FinishLength}
	l.send(0, add(r)...)
	l.runUntil(time.Hour)
	assert.Equal(t, 5*30*time.Millisecond, l.finish[r])
}

func TestHungRankStallsAllAndRecoverGoesOn(t *testing.T) {
	l := newLab(t, 2, nil)
	r := &em.Request{Prompt: 4, Output: 20, Ending: em.FinishLength}
	l.send(0, add(r)...)
	l.runUntil(50 * time.Millisecond)
	l.send(1, em.Input{Kind: em.InputHang})
	l.runUntil(time.Minute)
	assert.Less(t, r.Produced(), 20)
	l.now = time.Minute
	l.send(1, em.Input{Kind: em.InputRecover})
	l.runUntil(time.Hour)
	assert.Equal(t, 20, r.Produced())
}

func TestDeathOfARank(t *testing.T) {
	t.Run("gloo, busy peer", func(t *testing.T) {
		l := newLab(t, 2, nil)
		r := &em.Request{Prompt: 4, Output: 40, Ending: em.FinishLength}
		l.send(0, add(r)...)
		l.runUntil(50 * time.Millisecond)
		l.lose(1)
		l.runUntil(time.Hour)
		assert.Equal(t, em.FinishError, r.Finish())
		assert.Equal(t, l.now, l.died[0])
		assert.LessOrEqual(t, l.died[0], 400*time.Millisecond)
	})
	t.Run("gloo, idle peer dies of its next request", func(t *testing.T) {
		l := newLab(t, 2, nil)
		l.lose(1)
		l.runUntil(time.Hour)
		assert.Empty(t, l.died)
		l.now = time.Hour
		r := &em.Request{Prompt: 4, Output: 40, Ending: em.FinishLength}
		l.send(0, add(r)...)
		l.runUntil(2 * time.Hour)
		assert.Equal(t, em.FinishError, r.Finish())
		assert.Equal(t, 40*time.Millisecond, l.died[0]-time.Hour)
	})
	t.Run("nccl, peers freeze until the timeout", func(t *testing.T) {
		l := newLab(t, 2, func(_ int, c *em.Config) { c.NCCL = true })
		r := &em.Request{Prompt: 4, Output: 40, Ending: em.FinishLength}
		l.send(0, add(r)...)
		l.runUntil(50 * time.Millisecond)
		l.lose(1)
		l.runUntil(599 * time.Second)
		assert.Equal(t, em.FinishNone, r.Finish())
		l.runUntil(time.Hour)
		assert.Equal(t, em.FinishError, r.Finish())
	})
}

// Whatever arrives when, every request ends, and the group comes to rest on a wave boundary.
func TestGroupInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 5).Draw(t, "ranks")
		l := newLab(t, ranks, nil)
		var reqs []*em.Request
		for range rapid.IntRange(1, 12).Draw(t, "requests") {
			r := &em.Request{Prompt: rapid.IntRange(1, 20).Draw(t, "prompt"), Output: rapid.IntRange(1, 30).
				Draw(t, "output"), Ending: em.FinishLength}
			reqs = append(reqs, r)
			l.send(rapid.IntRange(0, ranks-1).Draw(t, "rank"), add(r)...)
			l.now += time.Duration(rapid.IntRange(0, 400).Draw(t, "gap ms")) * time.Millisecond
			l.runUntil(l.now)
		}
		l.runUntil(l.now + time.Hour)
		for _, r := range reqs {
			assert.Equal(t, em.FinishLength, r.Finish())
		}
		assert.Zero(t, l.ended%16)
		for _, core := range l.cores {
			assert.Equal(t, l.ended, core.Stats().Steps)
			assert.Zero(t, core.Stats().UsedBlocks)
		}
	})
}
