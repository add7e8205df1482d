package enginemodel_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

func eventful() em.Config {
	c := small()
	c.BlockEvents = true
	return c
}

// steps runs core to its rest and gives the block events of every step that had some.
func steps(core *em.Core, now time.Duration, in []em.Input) (out [][]em.BlockEvent, end time.Duration) {
	effects, wake := core.Step(now, in)
	note := func(_ time.Duration, effects []em.Effect) {
		for _, e := range effects {
			if e.Kind == em.EffectBlocks {
				out = append(out, append([]em.BlockEvent{}, e.Blocks...))
			}
		}
	}
	note(now, effects)
	return out, run(core, now, wake, note)
}

func TestStoresLeaveAtTheEndOfTheStepOncePerChunk(t *testing.T) {
	core := newCore(t, eventful()) // blocks of 4 tokens, 16 tokens a step
	r := &em.Request{Prompt: 22, Output: 4, Ending: em.FinishLength, Content: text(22, 4, "")}
	got, _ := steps(core, 0, add(r))
	assert.Equal(t, [][]em.BlockEvent{
		{{Kind: em.BlocksStored, Req: r, First: 0, Count: 4}},
		{{Kind: em.BlocksStored, Req: r, First: 4, Count: 1}},
		{{Kind: em.BlocksStored, Req: r, First: 5, Count: 1}}, // filled by the answer
	}, got)
}

func TestEqualPromptsStoreTheirLastBlockTwice(t *testing.T) {
	core := newCore(t, eventful())
	a := &em.Request{Prompt: 8, Output: 1, Ending: em.FinishLength, Content: text(8, 4, "")}
	b := &em.Request{Prompt: 8, Output: 1, Ending: em.FinishLength, Content: text(8, 4, "")}
	got, _ := steps(core, 0, add(a, b))
	assert.Equal(t, [][]em.BlockEvent{{
		{Kind: em.BlocksStored, Req: a, First: 0, Count: 2},
		{Kind: em.BlocksStored, Req: b, First: 1, Count: 1},
	}}, got)
	copies := 0
	core.CachedBlocks(func(_ uint64, n int) { copies += n })
	assert.Equal(t, 3, copies)
}

func TestEvictionsTellTheTailFirstAndBeforeTheStores(t *testing.T) {
	cfg := eventful()
	cfg.Blocks, cfg.MaxModelLen = 4, 16
	core := newCore(t, cfg)
	a := &em.Request{Prompt: 16, Output: 1, Ending: em.FinishLength, Content: text(16, 4, "")}
	_, end := steps(core, 0, add(a))
	b := &em.Request{Prompt: 12, Output: 1, Ending: em.FinishLength, Content: text(12, 4, "other")}
	got, _ := steps(core, end, add(b))
	require.Len(t, got, 1)
	hash := func(i int) uint64 { h, _ := a.Content.BlockHash(i); return h }
	assert.Equal(t, []em.BlockEvent{
		{Kind: em.BlockRemoved, Hash: hash(3)},
		{Kind: em.BlockRemoved, Hash: hash(2)},
		{Kind: em.BlockRemoved, Hash: hash(1)},
		{Kind: em.BlocksStored, Req: b, First: 0, Count: 3},
	}, got[0])
}

func TestResetIsToldWithTheNextStep(t *testing.T) {
	core := newCore(t, eventful())
	a := &em.Request{Prompt: 8, Output: 1, Ending: em.FinishLength, Content: text(8, 4, "")}
	_, end := steps(core, 0, add(a))
	require.True(t, core.ResetPrefixCache(false, false))
	effects, wake := core.Step(end, nil)
	assert.Empty(t, effects)
	assert.Equal(t, em.Never, wake, "an idle engine says nothing")
	b := &em.Request{Prompt: 8, Output: 1, Ending: em.FinishLength, Content: text(8, 4, "")}
	got, _ := steps(core, end, add(b))
	assert.Equal(t, [][]em.BlockEvent{{
		{Kind: em.BlocksCleared},
		{Kind: em.BlocksStored, Req: b, First: 0, Count: 2},
	}}, got)
	assert.Zero(t, b.Cached())
}

func TestResetIsRefusedWhileBlocksAreHeld(t *testing.T) {
	core := newCore(t, eventful())
	r := &em.Request{Prompt: 8, Output: 5, Ending: em.FinishLength, Content: text(8, 4, "")}
	_, wake := core.Step(0, add(r))
	assert.False(t, core.ResetPrefixCache(false, false))
	require.True(t, core.ResetPrefixCache(true, false), "unless the requests give them back")
	run(core, 0, wake, nil)
	assert.Equal(t, em.FinishLength, r.Finish())
	assert.Equal(t, 5, r.Produced())
	assert.Equal(t, 1, r.Preemptions())
}

func TestNoEventsUnlessAsked(t *testing.T) {
	core := newCore(t, small())
	got, _ := steps(core, 0, add(&em.Request{
		Prompt: 8, Output: 5, Ending: em.FinishLength,
		Content: text(8, 4, ""),
	}))
	assert.Empty(t, got)
}

// Whoever counts the events holds exactly what the engine holds, after every step of any history.
func TestEventsTellTheWholeCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := eventful()
		cfg.Blocks = rapid.IntRange(16, 24).Draw(t, "blocks")
		core := newCore(t, cfg)
		view := map[uint64]int{}
		var now, wake time.Duration
		var live []*em.Request
		book := func(effects []em.Effect) {
			for _, e := range effects {
				for _, b := range e.Blocks {
					switch b.Kind {
					case em.BlocksCleared:
						clear(view)
					case em.BlockRemoved:
						assert.Positive(t, view[b.Hash], "removed what was never stored")
						if view[b.Hash]--; view[b.Hash] == 0 {
							delete(view, b.Hash)
						}
					case em.BlocksStored:
						for i := range b.Count {
							h, _ := b.Req.Content.BlockHash(b.First + i)
							view[h]++
						}
					}
				}
			}
		}
		step := func(in []em.Input) {
			var effects []em.Effect
			effects, wake = core.Step(now, in)
			book(effects)
		}
		step(nil)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				n := rapid.IntRange(1, 40).Draw(t, "prompt")
				r := &em.Request{
					Prompt: n, Output: rapid.IntRange(1, 12).Draw(t, "output"), Ending: em.FinishLength,
					Content: text(n, 4, rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "salt")),
				}
				live = append(live, r)
				step(add(r))
			},
			"abort": func(t *rapid.T) {
				if len(live) == 0 {
					t.Skip("none")
				}
				step([]em.Input{{Kind: em.InputAbort, Req: rapid.SampledFrom(live).Draw(t, "req")}})
			},
			"reset": func(t *rapid.T) { core.ResetPrefixCache(rapid.Bool().Draw(t, "force"), false) },
			"step": func(*rapid.T) {
				if wake != em.Never {
					now = max(now, wake)
					step(nil)
				}
			},
		})
		for i := 0; wake != em.Never && i < 10_000; i++ {
			now = max(now, wake)
			step(nil)
		}
		// One more step tells a clear that waits.
		step(add(&em.Request{Prompt: 4, Output: 1, Ending: em.FinishLength, Content: text(4, 4, "last")}))
		for i := 0; wake != em.Never && i < 10_000; i++ {
			now = max(now, wake)
			step(nil)
		}
		want := map[uint64]int{}
		core.CachedBlocks(func(hash uint64, copies int) { want[hash] = copies })
		assert.Equal(t, want, view)
	})
}
