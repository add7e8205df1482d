package enginemodel_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// movable is a rank whose blocks other engines can read: 4 tokens a block.
func movable(blocks int) em.Config {
	c := small()
	c.Blocks, c.Transfer = blocks, true
	return c
}

// numbered is a prompt of n tokens whose first shared tokens are those of all numbered prompts.
func numbered(k, n, shared int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000*(k+1) + i)
		if i < shared {
			out[i] = uint32(i)
		}
	}
	return out
}

func request(prompt []uint32, output int, salt string) *em.Request {
	return &em.Request{
		Prompt: len(prompt), Output: output, Ending: em.FinishLength,
		Content: em.NewTokenContent(prompt, em.ProseAfter(0, prompt, 0), 4, salt),
	}
}

// station is a core with its clock. load serves what it asks of other engines; nil: nothing.
type station struct {
	core *em.Core
	now  time.Duration
	over []string // leases that ended unread
	load func(r *em.Request) em.Input
}

// do hands in and runs until nothing is left to do but to wait for the end of leases.
func (s *station) do(in ...em.Input) {
	for steps := 0; steps < 10_000; steps++ {
		effects, wake := s.core.Step(s.now, in)
		in = nil
		for _, e := range effects {
			switch e.Kind {
			case em.EffectLoad:
				if s.load != nil {
					in = append(in, s.load(e.Req))
				}
			case em.EffectLeaseOver:
				s.over = append(s.over, e.Name)
			default:
			}
		}
		if len(in) > 0 {
			continue
		}
		if wake > s.now+time.Second { // steps take 10 ms, leases end much later
			return
		}
		s.now = max(s.now, wake)
	}
	panic("the core finds no rest")
}

func (s *station) pass(d time.Duration) {
	s.now += d
	s.do()
}

// prefill computes a prompt and keeps its blocks under name. If leases have all memory it waits for their
// end.
func (s *station) prefill(prompt []uint32, name string) []int32 {
	r := request(prompt, 1, "")
	r.Lease = name
	s.do(em.Input{Kind: em.InputAdd, Req: r})
	for r.Finish() == em.FinishNone {
		s.pass(em.DefaultLease)
	}
	return slices.Clone(r.Kept())
}

// pull makes a decode station that loads from these blocks of p, as NIXL does: the last ones that it needs.
func pull(t require.TestingT, p *em.Core, blocks []int32) func(r *em.Request) em.Input {
	return func(r *em.Request) em.Input {
		kv, ok := p.ReadBlocks(nil, blocks[len(blocks)-r.LoadBlocks():])
		require.True(t, ok)
		return em.Input{Kind: em.InputLoaded, Req: r, KV: kv}
	}
}

func (s *station) decode(prompt []uint32, salt string, load func(r *em.Request) em.Input) *em.Request {
	r := request(prompt, 3, salt)
	r.Remote, s.load = load != nil, load
	s.do(em.Input{Kind: em.InputAdd, Req: r})
	return r
}

func pair(t require.TestingT, blocks int) (p, d *station) {
	return &station{core: newCore(t, movable(blocks))}, &station{core: newCore(t, movable(64))}
}

func TestALeaseInTimeGivesTheRightAnswer(t *testing.T) {
	p, d := pair(t, 16)
	prompt := numbered(0, 10, 0)
	blocks := p.prefill(prompt, "a")
	require.Len(t, blocks, 3, "the last block holds two tokens")
	assert.Equal(t, 3, p.core.Stats().UsedBlocks)
	assert.Equal(t, 1, p.core.Stats().Leases)
	r := d.decode(prompt, "", pull(t, p.core, blocks))
	assert.Zero(t, r.Wrong())
	assert.Equal(t, 3, r.Produced())
	assert.Equal(t, 10, r.Cached())
	p.do(em.Input{Kind: em.InputLeaseRead, Name: "a"})
	assert.Zero(t, p.core.Stats().UsedBlocks)
	assert.Zero(t, p.core.Stats().LateReads)
	s := d.core.Stats()
	assert.Equal(t, [3]uint64{10, 0, 10}, [3]uint64{s.PromptTokens, s.PromptCached, s.PromptLoaded})

	again := d.decode(prompt, "", pull(t, p.core, p.prefill(prompt, "b")))
	assert.Zero(t, again.Wrong())
	assert.Equal(t, 2*4, int(d.core.Stats().PromptCached), "its own cache shortens the pull from the front")
	assert.Equal(t, 12, int(d.core.Stats().PromptLoaded))
}

func TestReusedBlocksGiveAnotherAnswerAndStay(t *testing.T) {
	p, d := pair(t, 16)
	prompt := numbered(0, 12, 0)
	blocks := p.prefill(prompt, "a")
	p.pass(em.DefaultLease)
	assert.Equal(t, []string{"a"}, p.over)
	assert.EqualValues(t, 1, p.core.Stats().LeasesOver)
	lucky := d.decode(prompt, "salted", pull(t, p.core, blocks))
	assert.Zero(t, lucky.Wrong(), "nobody had written into the blocks yet")

	p.decode(numbered(1, 60, 0), "", nil) // takes every block
	wrong := d.decode(prompt, "", pull(t, p.core, blocks))
	require.NotZero(t, wrong.Wrong())
	assert.Equal(t, em.FinishLength, wrong.Finish(), "nobody is told")
	p.do(em.Input{Kind: em.InputLeaseRead, Name: "a"})
	assert.EqualValues(t, 1, p.core.Stats().LateReads)

	plain := d.decode(prompt, "", nil)
	assert.Equal(t, 8, plain.Cached())
	assert.NotZero(t, plain.Wrong(), "the wrong blocks are in the prefix cache")
	longer := d.decode(append(slices.Clone(prompt), 7, 8, 9, 10, 11), "", nil)
	assert.NotZero(t, longer.Wrong(), "and what is computed behind them is wrong as well")
	assert.Zero(t, d.decode(prompt, "other salt", nil).Wrong())
	require.True(t, d.core.ResetPrefixCache(false, false))
	assert.Zero(t, d.decode(prompt, "", nil).Wrong())
}

func TestAWrongAnswerIsOfOtherTokens(t *testing.T) {
	prompt := numbered(0, 9, 0)
	answer := em.ProseAfter(5, prompt, 0)
	right := em.NewTokenContent(prompt, answer, 4, "")
	wrong := em.NewTokenContent(prompt, answer, 4, "")
	wrong.Mislead(3)
	assert.Equal(t, right.AppendBlockTokens(nil, 1), wrong.AppendBlockTokens(nil, 1), "the prompt stays")
	assert.NotEqual(t, right.AppendBlockTokens(nil, 3), wrong.AppendBlockTokens(nil, 3))
	assert.Equal(t, em.NewGenerator(answer.Misled(3)).Token(3), wrong.AppendBlockTokens(nil, 3)[0])
	wrong.Mislead(0)
	assert.Equal(t, right.AppendBlockTokens(nil, 3), wrong.AppendBlockTokens(nil, 3))
	given := em.NewTokenContent(prompt, answer, 4, "").Answer([]byte("a given answer"))
	given.Mislead(3)
	assert.Equal(t, em.NewGenerator(answer.Misled(3)).Token(3), given.AppendBlockTokens(nil, 3)[0])
}

func TestHeartbeatsHoldALease(t *testing.T) {
	p, _ := pair(t, 16)
	p.prefill(numbered(0, 8, 0), "a")
	begun := p.now
	for range 20 {
		p.pass(em.DefaultLease / em.HeartbeatsPerLease)
		p.do(em.Input{Kind: em.InputLeaseExtend, Name: "a"})
		p.do(em.Input{Kind: em.InputLeaseExtend, Name: "unknown"})
	}
	assert.Equal(t, 1, p.core.Stats().Leases)
	p.pass(em.DefaultLease*2/3 - 2*time.Second)
	assert.Equal(t, 1, p.core.Stats().Leases, "after %v", p.now-begun)
	p.pass(2 * time.Second)
	assert.Zero(t, p.core.Stats().Leases)
	p.do(em.Input{Kind: em.InputLeaseTime, For: time.Second})
	p.prefill(numbered(0, 8, 0), "b")
	p.pass(2 * time.Second)
	assert.Zero(t, p.core.Stats().Leases)
	assert.Zero(t, p.core.Stats().UsedBlocks)
}

func TestLeasesFillTheMemory(t *testing.T) {
	p, _ := pair(t, 16)
	for k := range 4 {
		p.prefill(numbered(k, 16, 0), fmt.Sprint(k))
	}
	r := request(numbered(9, 8, 0), 1, "")
	p.do(em.Input{Kind: em.InputAdd, Req: r})
	s := p.core.Stats()
	assert.Equal(t, [4]int{0, 1, 16, 4}, [4]int{s.Running, s.Waiting, s.UsedBlocks, s.Leases})
	p.pass(em.DefaultLease)
	assert.Equal(t, em.FinishLength, r.Finish(), "the memory is free again")
}

func TestALoadThatFails(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		cfg := movable(16)
		cfg.Recompute = recompute
		d := &station{core: newCore(t, cfg)}
		r := d.decode(numbered(0, 10, 0), "", func(r *em.Request) em.Input {
			return em.Input{Kind: em.InputLoadFailed, Req: r}
		})
		if recompute {
			assert.Equal(t, em.FinishLength, r.Finish())
			assert.Zero(t, r.Wrong()+uint64(r.Cached()))
			assert.EqualValues(t, 10, d.core.Stats().PromptTokens)
		} else {
			assert.Equal(t, em.FinishError, r.Finish())
			assert.True(t, r.LoadFailed())
		}
		assert.Zero(t, d.core.Stats().UsedBlocks)
	}
}

func TestALoadThatNeverComes(t *testing.T) {
	d := &station{core: newCore(t, movable(16))}
	r := request(numbered(0, 10, 0), 3, "")
	r.Remote = true
	d.do(em.Input{Kind: em.InputAdd, Req: r})
	d.pass(time.Hour)
	s := d.core.Stats()
	assert.Equal(t, [4]int{0, 1, 1, 3}, [4]int{s.Running, s.Waiting, s.Loading, s.UsedBlocks})
	other := d.decode(numbered(1, 10, 0), "", nil)
	assert.Equal(t, em.FinishLength, other.Finish(), "the others go on")
	d.do(em.Input{Kind: em.InputAbort, Req: r})
	d.do(em.Input{Kind: em.InputLoaded, Req: r}) // too late
	assert.Zero(t, d.core.Stats().UsedBlocks+d.core.Stats().Waiting)
	dead := request(numbered(2, 10, 0), 3, "")
	dead.Remote = true
	d.do(em.Input{Kind: em.InputAdd, Req: dead})
	d.do(em.Input{Kind: em.InputAbortAll})
	assert.Equal(t, em.FinishAbort, dead.Finish())
	assert.Zero(t, d.core.Stats().UsedBlocks)
}

// Blocks that were loaded enter the prefix cache, and observers hear of them as of computed ones.
func TestLoadedBlocksAreTold(t *testing.T) {
	p, _ := pair(t, 16)
	cfg := movable(16)
	cfg.BlockEvents = true
	core := newCore(t, cfg)
	prompt := numbered(0, 10, 0)
	blocks := p.prefill(prompt, "a")
	r := request(prompt, 1, "")
	r.Remote = true
	_, _ = core.Step(0, add(r))
	got, _ := steps(core, 0, []em.Input{pull(t, p.core, blocks)(r)})
	assert.Equal(t, [][]em.BlockEvent{{{Kind: em.BlocksStored, Req: r, First: 0, Count: 2}}}, got)
}

// Loaded requests need no memory, so they run although the first one in the queue has not enough.
func TestLoadedRequestsDoNotWaitBehindTheQueue(t *testing.T) {
	p, _ := pair(t, 16)
	d := &station{core: newCore(t, movable(16))}
	prompt := numbered(0, 40, 0)
	blocks := p.prefill(prompt, "a")
	r := request(prompt, 2, "")
	r.Remote = true
	d.do(em.Input{Kind: em.InputAdd, Req: r})
	large := request(numbered(1, 40, 0), 1, "")
	d.do(em.Input{Kind: em.InputAdd, Req: large})
	assert.Equal(t, 2, d.core.Stats().Waiting)
	d.do(pull(t, p.core, blocks)(r))
	assert.Equal(t, em.FinishLength, r.Finish())
	assert.Equal(t, em.FinishLength, large.Finish())
	assert.Zero(t, r.Wrong()+large.Wrong())
}

// A request that has to give up its blocks makes room for one that holds the memory it would need.
func TestLoadedRequestsRunAfterAPreemption(t *testing.T) {
	p, _ := pair(t, 16)
	cfg := movable(16)
	cfg.MaxSeqs = 1
	d := &station{core: newCore(t, cfg)}
	prompt := numbered(0, 36, 0)
	blocks := p.prefill(prompt, "a")
	loaded := request(prompt, 2, "")
	loaded.Remote = true
	d.do(em.Input{Kind: em.InputAdd, Req: loaded})
	grows := request(numbered(1, 28, 0), 30, "")
	_, _ = d.core.Step(d.now, add(grows)) // it takes the only place before the blocks of the other come
	d.do(pull(t, p.core, blocks)(loaded))
	assert.Equal(t, em.FinishLength, loaded.Finish())
	assert.Equal(t, em.FinishLength, grows.Finish())
	assert.Equal(t, 1, grows.Preemptions())
	assert.Zero(t, loaded.Wrong()+grows.Wrong())
}

// Whatever comes together in little memory, every request ends, and nothing is left in use.
func TestEveryRequestEndsWithTransfers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := movable(16)
		cfg.MaxSeqs = rapid.IntRange(1, 3).Draw(t, "seqs")
		cfg.Recompute = rapid.Bool().Draw(t, "recompute")
		s := &station{core: newCore(t, cfg)}
		var all, open []*em.Request // open: their blocks did not come yet
		collect := func(in ...em.Input) {
			for steps := 0; steps < 10_000; steps++ {
				effects, wake := s.core.Step(s.now, in)
				in = nil
				for _, e := range effects {
					if e.Kind == em.EffectLoad {
						open = append(open, e.Req)
					}
				}
				if wake > s.now+time.Second {
					return
				}
				s.now = max(s.now, wake)
			}
			t.Fatal("the core finds no rest")
		}
		answer := func(i int, fails bool) {
			r := open[i]
			open = slices.Delete(open, i, i+1)
			if fails {
				collect(em.Input{Kind: em.InputLoadFailed, Req: r})
				return
			}
			collect(em.Input{Kind: em.InputLoaded, Req: r, KV: make([]em.BlockKV, r.LoadBlocks())})
		}
		for i := range rapid.IntRange(1, 30).Draw(t, "requests") {
			r := request(numbered(rapid.IntRange(0, 3).Draw(t, "prompt"),
				rapid.IntRange(1, 40).Draw(t, "tokens"), rapid.IntRange(0, 20).Draw(t, "shared")),
				rapid.IntRange(1, 24).Draw(t, "output"), "")
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				r.Lease = fmt.Sprint(i)
			case 1, 2:
				r.Remote = true
			}
			all = append(all, r)
			collect(em.Input{Kind: em.InputAdd, Req: r})
			if len(open) > 0 && rapid.Bool().Draw(t, "answer") {
				answer(rapid.IntRange(0, len(open)-1).Draw(t, "load"), rapid.Bool().Draw(t, "fails"))
			}
			if rapid.IntRange(0, 9).Draw(t, "abort") == 0 {
				collect(em.Input{Kind: em.InputAbort, Req: all[rapid.IntRange(0, i).Draw(t, "which")]})
			}
		}
		for range 4 * len(all) {
			if len(open) > 0 {
				answer(0, false)
			}
			s.now += em.DefaultLease
			collect()
		}
		for i, r := range all {
			assert.NotEqual(t, em.FinishNone, r.Finish(), "request %d", i)
		}
		stats := s.core.Stats()
		assert.Zero(t, stats.UsedBlocks+stats.Waiting+stats.Running+stats.Loading+stats.Leases)
	})
}

// Against an oracle that keeps, per block number, the prompt that was written there last: an answer is right
// if and only if all blocks still held its own prompt when they were read, and a lease that has not ended
// makes sure of it.
func TestAnswersAreRightIfTheirBlocksAre(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d := pair(t, rapid.IntRange(16, 24).Draw(t, "blocks"))
		type leg struct {
			prompt []uint32
			blocks []int32
			ends   time.Duration
			isRead bool
		}
		held := map[int32]string{} // by block, what the oracle thinks
		prefix := func(prompt []uint32, i int) string { return fmt.Sprint(prompt[:min(len(prompt), 4*i+4)]) }
		var legs []*leg
		reads := 0
		t.Repeat(map[string]func(*rapid.T){
			"prefill": func(t *rapid.T) {
				prompt := numbered(rapid.IntRange(0, 4).Draw(t, "prompt"),
					rapid.IntRange(1, 20).Draw(t, "tokens"), rapid.IntRange(0, 9).Draw(t, "shared"))
				l := &leg{prompt: prompt, blocks: p.prefill(prompt, fmt.Sprint(len(legs)))}
				for i, b := range l.blocks {
					held[b] = prefix(prompt, i)
				}
				l.ends = p.now + em.DefaultLease
				legs = append(legs, l)
			},
			"decode": func(t *rapid.T) {
				if len(legs) == 0 {
					t.Skip("nothing to read")
				}
				k := rapid.IntRange(0, len(legs)-1).Draw(t, "leg")
				l := legs[k]
				want := true
				for i, b := range l.blocks {
					want = want && held[b] == prefix(l.prompt, i)
				}
				reads++
				salt := fmt.Sprint(reads) // another one each time: no hit shortens the pull
				r := d.decode(l.prompt, salt, pull(t, p.core, l.blocks))
				assert.Equal(t, want, r.Wrong() == 0)
				if !l.isRead && p.now < l.ends {
					assert.Zero(t, r.Wrong(), "the lease runs")
				}
				l.isRead = true
				p.do(em.Input{Kind: em.InputLeaseRead, Name: fmt.Sprint(k)})
			},
			"wait": func(t *rapid.T) {
				p.pass(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
			},
			"": func(t *rapid.T) {
				s := p.core.Stats()
				assert.Zero(t, d.core.Stats().UsedBlocks)
				if s.Leases == 0 {
					assert.Zero(t, s.UsedBlocks)
				}
			},
		})
	})
}
