package enginemodel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
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

// LG1: What the ranks do together comes on top of the slowest rank's time, as the tokens of the step say, and
// is as much faster as the ranks are.
func TestGroupStepHasWhatTheRanksShare(t *testing.T) {
	shared := steptime.Shared{FixedMS: 1, FewTokenMS: 1, ManyMS: 100, ExpertsTokenMS: 2}
	for _, c := range []struct {
		speed float64
		want  time.Duration
	}{{0, 32 * time.Millisecond}, {1, 32 * time.Millisecond}, {2, 21 * time.Millisecond}} {
		g, err := em.NewGroup(em.GroupConfig{Ranks: 2, SyncInterval: 16, Shared: shared, Speed: c.speed})
		require.NoError(t, err)
		_, wake := g.Step(0, []em.GroupInput{
			{Kind: em.GroupWave},
			{Kind: em.GroupReport, Rank: 0, Took: 10 * time.Millisecond, Tokens: 5, Unfinished: true},
			{Kind: em.GroupReport, Rank: 1, Took: 4 * time.Millisecond, Tokens: 3},
		})
		assert.Equal(t, c.want, wake, "10 for the slowest, 1, 5 for the fullest, 16 for all")
		_, _ = g.Step(wake, nil)
		_, next := g.Step(wake, []em.GroupInput{
			{Kind: em.GroupReport, Rank: 0, Took: time.Millisecond}, {Kind: em.GroupReport, Rank: 1},
		})
		assert.Less(t, next-wake, c.want/2, "the tokens of a step count once")
	}
}

// LG1: With prompt steps a rank that has a prompt does not decode in that step; without, it does.
func TestPromptSteps(t *testing.T) {
	for _, promptSteps := range []bool{false, true} {
		cfg := small()
		cfg.PromptSteps = promptSteps
		core := newCore(t, cfg)
		first := &em.Request{Prompt: 4, Output: 9, Ending: em.FinishLength}
		second := &em.Request{Prompt: 24, Output: 2, Ending: em.FinishLength} // two steps of 16 tokens
		now := time.Duration(0)
		_, wake := core.Step(now, add(first))
		_, wake = core.Step(wake, add(second))
		var got []int
		for second.Produced() < 1 {
			_, wake = core.Step(wake, nil)
			got = append(got, first.Produced())
		}
		want := []int{2, 3}
		if promptSteps {
			want = []int{1, 1}
		}
		assert.Equal(t, want, got)
		run(core, wake, wake, nil)
		assert.Equal(t, em.FinishLength, first.Finish())
		assert.Equal(t, em.FinishLength, second.Finish())
	}
}

// LG1: A report says how many tokens the step has, and how many of them are of prompts. A prompt that came
// computed has none.
func TestReportsTellTokens(t *testing.T) {
	cfg := small()
	cfg.Lockstep, cfg.Transfer = true, true
	core := newCore(t, cfg)
	report := func(in ...em.Input) (tokens, prompt int) {
		effects, _ := core.Step(0, in)
		for _, e := range effects {
			switch e.Kind {
			case em.EffectReport:
				return e.Tokens, e.Prompt
			case em.EffectLoad:
				in := em.Input{Kind: em.InputLoaded, Req: e.Req, KV: make([]em.BlockKV, e.Req.LoadBlocks())}
				core.Step(0, []em.Input{in})
			default:
			}
		}
		return -1, -1
	}
	report(add(&em.Request{Prompt: 7, Output: 9, Ending: em.FinishLength},
		&em.Request{Prompt: 6, Output: 9, Ending: em.FinishLength, Remote: true})...)
	for _, want := range [][2]int{{7, 7}, {2, 0}, {2, 0}} {
		kind := em.InputGroupEnd
		if want[1] > 0 {
			kind = em.InputGroupBegin
		}
		tokens, prompt := report(em.Input{Kind: kind, Continue: true})
		assert.Equal(t, want, [2]int{tokens, prompt})
	}
}
