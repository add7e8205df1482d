package enginemodel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// small is a rank on which memory and budget are scarce, with steps of 10 ms.
func small() em.Config {
	c := em.Default()
	c.BlockSize, c.Blocks, c.MaxSeqs, c.MaxModelLen, c.MaxBatchedTokens = 4, 16, 4, 64, 16
	c.Fixed, c.FixedStep = true, 10*time.Millisecond
	return c
}

func newCore(t require.TestingT, c em.Config) *em.Core {
	core, err := em.New(c)
	require.NoError(t, err)
	return core
}

// run drives core until it has nothing left to wake up for, and returns the instant.
func run(core *em.Core, now, wake time.Duration, each func(time.Duration, []em.Effect)) time.Duration {
	for steps := 0; wake != em.Never && steps < 100_000; steps++ {
		now = max(now, wake)
		var effects []em.Effect
		effects, wake = core.Step(now, nil)
		if each != nil {
			each(now, effects)
		}
	}
	return now
}

func add(reqs ...*em.Request) []em.Input {
	var in []em.Input
	for _, r := range reqs {
		in = append(in, em.Input{Kind: em.InputAdd, Req: r})
	}
	return in
}

func text(tokens, blockSize int, salt string) em.Content {
	prompt := make([]uint32, tokens)
	for i := range prompt {
		prompt[i] = uint32(i + 1)
	}
	return em.NewTokenContent(prompt, em.Prose{}, blockSize, salt)
}

func TestOneRequestTakesItsStepsOfTheLaw(t *testing.T) {
	cfg := em.Default()
	core := newCore(t, cfg)
	r := &em.Request{Prompt: 10000, Output: 3, Ending: em.FinishLength}
	_, wake := core.Step(0, add(r))
	end := run(core, 0, wake, nil)

	ms := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	law := cfg.Law
	first := ms(law.Step(8192, 0, 0, 8192.0*8192/2)) + ms(law.Step(1808, 0, 0, 1808.0*1808/2+1808*8192))
	assert.Equal(t, first, r.Times().First, "two chunks of a prefill bring the first token")
	assert.Equal(t, first+ms(law.Step(1, 1, 10000, 0))+ms(law.Step(1, 1, 10001, 0)), r.Times().Last)
	assert.Equal(t, r.Times().Last, end)
	assert.Equal(t, em.FinishLength, r.Finish())
	assert.Equal(t, 3, r.Produced())
	assert.Zero(t, core.Stats().UsedBlocks)
}

func TestPacedStepsKeepTheirCadence(t *testing.T) {
	core := newCore(t, small())
	r := &em.Request{Prompt: 2, Output: 10, Ending: em.FinishLength}
	_, wake := core.Step(0, add(r))
	for range 9 {
		_, wake = core.Step(wake+3*time.Millisecond, nil) // every wake-up is late
	}
	assert.Equal(t, 100*time.Millisecond, wake)
}

func TestPrefixIsReusedAfterFinish(t *testing.T) {
	core := newCore(t, small())
	a := &em.Request{Prompt: 12, Output: 2, Ending: em.FinishLength, Content: text(12, 4, "")}
	_, wake := core.Step(0, add(a))
	now := run(core, 0, wake, nil)
	assert.Zero(t, a.Cached())
	assert.Equal(t, 8, core.Cached(text(12, 4, ""), 12), "what the next one would not compute")
	assert.Zero(t, core.Cached(text(12, 4, "other tenant"), 12))

	b := &em.Request{Prompt: 12, Output: 2, Ending: em.FinishLength, Content: text(12, 4, "")}
	c := &em.Request{Prompt: 12, Output: 2, Ending: em.FinishLength, Content: text(12, 4, "other tenant")}
	_, wake = core.Step(now, add(b, c))
	run(core, now, wake, nil)
	assert.Equal(t, 8, b.Cached(), "whole blocks, at most prompt-1 tokens")
	assert.Zero(t, c.Cached(), "a salt separates")
	s := core.Stats()
	assert.Equal(t, uint64(36), s.CacheQueries)
	assert.Equal(t, uint64(8), s.CacheHits)
}

// The next turn's prompt holds this turn's prompt and answer: prompt + output - 1 tokens are cached, in whole
// blocks.
func TestAnswerBlocksEnterTheCache(t *testing.T) {
	core := newCore(t, small())
	prompt := em.AppendTokens(nil, "0123456789abcdef") // 4 tokens
	answer := em.ProseAfter(0, prompt, 0)
	a := &em.Request{
		Prompt: 4, Output: 9, Ending: em.FinishLength,
		Content: em.NewTokenContent(prompt, answer, 4, ""),
	}
	_, wake := core.Step(0, add(a))
	now := run(core, 0, wake, nil)

	gen := em.NewGenerator(answer)
	next := append([]uint32{}, prompt...)
	for i := range 9 {
		next = append(next, gen.Token(i))
	}
	b := &em.Request{
		Prompt: len(next) + 3, Output: 1, Ending: em.FinishLength,
		Content: em.NewTokenContent(append(next, 1, 2, 3), em.Prose{}, 4, ""),
	}
	_, wake = core.Step(now, add(b))
	run(core, now, wake, nil)
	assert.Equal(t, 12, b.Cached())
}

func TestTailIsEvictedBeforeHead(t *testing.T) {
	core := newCore(t, small()) // 16 blocks
	a := &em.Request{Prompt: 33, Output: 1, Ending: em.FinishLength, Content: text(33, 4, "")}
	_, wake := core.Step(0, add(a))
	now := run(core, 0, wake, nil)
	// 12 blocks of another prompt: 7 never used ones, then 5 of a's, tail first.
	b := &em.Request{Prompt: 48, Output: 1, Ending: em.FinishLength, Content: text(48, 4, "b")}
	_, wake = core.Step(now, add(b))
	now = run(core, now, wake, nil)
	c := &em.Request{Prompt: 33, Output: 1, Ending: em.FinishLength, Content: text(33, 4, "")}
	_, wake = core.Step(now, add(c))
	run(core, now, wake, nil)
	assert.Equal(t, 16, c.Cached(), "the head of the prefix survived")
}

func TestYoungestIsPreemptedAndRecomputes(t *testing.T) {
	cfg := small()
	cfg.MaxBatchedTokens = 64
	core := newCore(t, cfg) // 64 tokens of memory
	a := &em.Request{Prompt: 20, Output: 30, Ending: em.FinishLength}
	b := &em.Request{Prompt: 20, Output: 30, Ending: em.FinishLength}
	_, wake := core.Step(0, add(a, b))
	run(core, 0, wake, nil)
	assert.Zero(t, a.Preemptions())
	assert.Positive(t, b.Preemptions())
	assert.Equal(t, 30, a.Produced())
	assert.Equal(t, 30, b.Produced())
	assert.Less(t, a.Times().Last, b.Times().Last)
}

func TestAdmissionLimits(t *testing.T) {
	cfg := small()
	cfg.MaxSeqs, cfg.MaxQueuedReqs = 1, 2
	core := newCore(t, cfg)
	var reqs []*em.Request
	for range 5 {
		reqs = append(reqs, &em.Request{Prompt: 4, Output: 4, Ending: em.FinishLength})
	}
	_, _ = core.Step(0, add(reqs[0])) // runs
	effects, _ := core.Step(1, add(reqs[1:]...))
	require.Len(t, effects, 2)
	assert.Equal(t, em.EffectRejected, effects[0].Kind)
	assert.Equal(t, em.RejectRequests, effects[0].Reject)
	assert.Equal(t, uint64(2), core.Stats().Rejected[em.RejectRequests])
	assert.Equal(t, 2, core.Stats().Waiting)
}

func TestAbortFreesAtOnceEvenInsideAStep(t *testing.T) {
	core := newCore(t, small())
	a := &em.Request{Prompt: 8, Output: 20, Ending: em.FinishLength}
	b := &em.Request{Prompt: 8, Output: 3, Ending: em.FinishLength}
	_, _ = core.Step(0, add(a, b))
	effects, wake := core.Step(time.Millisecond, []em.Input{{Kind: em.InputAbort, Req: a}})
	assert.Empty(t, effects)
	assert.Equal(t, 1, core.Stats().Running)
	assert.Equal(t, 2, core.Stats().UsedBlocks)
	run(core, time.Millisecond, wake, nil)
	assert.Equal(t, em.FinishLength, b.Finish())
	assert.Zero(t, a.Produced())
	assert.Equal(t, uint64(1), core.Stats().Aborted)
}

func TestFailureStates(t *testing.T) {
	newPair := func() (*em.Core, *em.Request) {
		core := newCore(t, small())
		r := &em.Request{Prompt: 4, Output: 4, Ending: em.FinishLength}
		_, _ = core.Step(0, add(r))
		return core, r
	}
	t.Run("hang and recover", func(t *testing.T) {
		core, r := newPair()
		_, wake := core.Step(1, []em.Input{{Kind: em.InputHang}})
		assert.Equal(t, em.Never, wake)
		_, wake = core.Step(time.Hour, []em.Input{{Kind: em.InputRecover}})
		run(core, time.Hour, wake, nil)
		assert.Equal(t, em.FinishLength, r.Finish())
	})
	t.Run("slow", func(t *testing.T) {
		core, r := newPair()
		_, wake := core.Step(1, []em.Input{{Kind: em.InputSlow, Factor: 3}})
		run(core, 1, wake, nil)
		assert.Equal(t, 100*time.Millisecond, r.Times().Last, "one step had begun before")
	})
	t.Run("abort all", func(t *testing.T) {
		core, r := newPair()
		effects, _ := core.Step(1, []em.Input{{Kind: em.InputAbortAll}})
		require.Len(t, effects, 1)
		assert.Equal(t, em.FinishAbort, r.Finish())
		assert.False(t, core.Dead())
	})
	t.Run("kill", func(t *testing.T) {
		core, r := newPair()
		effects, wake := core.Step(1, []em.Input{{Kind: em.InputKill}})
		require.Len(t, effects, 2)
		assert.Equal(t, em.FinishError, r.Finish())
		assert.Equal(t, em.EffectDied, effects[1].Kind)
		assert.Equal(t, em.Never, wake)
		late := &em.Request{Prompt: 4, Output: 4, Ending: em.FinishLength}
		effects, _ = core.Step(2, add(late))
		require.Len(t, effects, 1)
		assert.Equal(t, em.FinishError, late.Finish())
	})
}

func TestConfigFaultsSayWhatToDo(t *testing.T) {
	cfg := small()
	cfg.MaxModelLen = 1000
	_, err := em.New(cfg)
	require.ErrorContains(t, err, "raise num_gpu_blocks_override")
}

// Any load on a scarce rank: everything ends with its exact number of tokens, in order of first scheduling,
// within all limits, and nothing is left behind.
func TestSchedulerInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := small()
		cfg.PrefixCaching = rapid.Bool().Draw(t, "prefix caching")
		core := newCore(t, cfg)
		n := rapid.IntRange(1, 20).Draw(t, "requests")
		var reqs []*em.Request
		var now, wake time.Duration
		wake = em.Never
		alive := map[*em.Request]bool{}
		check := func(_ time.Duration, effects []em.Effect) {
			s := core.Stats()
			assert.LessOrEqual(t, s.Running, cfg.MaxSeqs)
			assert.LessOrEqual(t, s.UsedBlocks, cfg.Blocks)
			assert.LessOrEqual(t, s.StepTokens, cfg.MaxBatchedTokens)
			for _, e := range effects {
				if e.Kind == em.EffectFinished {
					assert.True(t, alive[e.Req], "ends once")
					delete(alive, e.Req)
				}
			}
			assert.Equal(t, len(alive), s.Running+s.Waiting)
		}
		for i := range n {
			prompt := rapid.IntRange(1, 40).Draw(t, "prompt")
			r := &em.Request{
				Prompt: prompt, Output: rapid.IntRange(1, 64-prompt).Draw(t, "output"),
				Ending: em.FinishLength,
			}
			if rapid.Bool().Draw(t, "content") {
				r.Content = text(prompt, 4, []string{"x", "y"}[i%2])
			}
			reqs = append(reqs, r)
			alive[r] = true
			effects, w := core.Step(now, add(r))
			check(now, effects)
			wake = w
			for range rapid.IntRange(0, 5).Draw(t, "steps between") {
				if wake == em.Never {
					break
				}
				now = max(now, wake)
				effects, wake = core.Step(now, nil)
				check(now, effects)
			}
			if rapid.IntRange(0, 9).Draw(t, "abort") == 0 && alive[r] {
				_, wake = core.Step(now, []em.Input{{Kind: em.InputAbort, Req: r}})
				delete(alive, r)
			}
		}
		run(core, now, wake, check)
		assert.Empty(t, alive)
		assert.Zero(t, core.Stats().UsedBlocks)
		var last time.Duration
		for _, r := range reqs {
			if r.Finish() == em.FinishAbort {
				continue
			}
			assert.Equal(t, r.Output, r.Produced())
			assert.GreaterOrEqual(t, r.Times().Scheduled, last, "first come first served")
			last = r.Times().Scheduled
			assert.Less(t, r.Cached(), r.Prompt)
			assert.Zero(t, r.Cached()%cfg.BlockSize)
			if !cfg.PrefixCaching {
				assert.Zero(t, r.Cached())
			}
		}
	})
}

func TestStepsDoNotAllocate(t *testing.T) {
	cfg := em.Default()
	cfg.Fixed = true
	core := newCore(t, cfg)
	for range 64 {
		_, _ = core.Step(0, add(&em.Request{Prompt: 100, Output: 30000, Ending: em.FinishLength}))
	}
	for range 5 {
		_, _ = core.Step(0, nil)
	}
	perStep := testing.AllocsPerRun(500, func() { _, _ = core.Step(0, nil) })
	assert.Less(t, perStep, 0.5, "only a growing block list may allocate")
}

func BenchmarkStep64Decodes(b *testing.B) {
	cfg := em.Default()
	cfg.Fixed = true
	core := newCore(b, cfg)
	fill := func() {
		for range 64 {
			_, _ = core.Step(0, add(&em.Request{Prompt: 100, Output: 30000, Ending: em.FinishLength}))
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if core.Stats().Running == 0 {
			fill()
		}
		_, _ = core.Step(0, nil)
	}
}
